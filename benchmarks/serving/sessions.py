"""Makes the sessions of agents that the replay sends: from a trace, or from a seed.

A session is a list of prompts, each of which begins with most of the one before. A trace's line
is a session: `[[t, kept, total, stop], ...]`, seconds since its start, blocks of 64 tokens at the
head that are those of the request before, blocks of the prompt, why the answer stopped. A block
becomes `TOKENS_PER_BLOCK` tokens here, the same for everybody who sends it, and think times are
divided by `THINK_DIVISOR`, so that a small model on two cores sees the shape of the real load.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

TOKENS_PER_BLOCK = 4
PROMPT_TOKENS_MAX = 4096
"""A session ends before its first prompt that is longer."""
BLOCKS_MAX = PROMPT_TOKENS_MAX // TOKENS_PER_BLOCK
THINK_DIVISOR, THINK_S_MAX = 60.0, 2.0
VOCABULARY = 4096
RESERVED_TOKENS = 2
"""Begin and end of a text: no prompt has them."""

# Deciles (least to largest) of the 228 sessions of coding agents whose first two prompts fit into
# `BLOCKS_MAX`, out of 377 of callanjfox/kv-cache-tester (Apache-2.0). Sessions from a seed are
# drawn from these, straight between them; the largest of new blocks, gaps and requests are cut.
FIRST_BLOCKS = (140, 161, 205, 246, 281, 292, 301, 313, 331, 426, 969)
NEW_BLOCKS = (1, 3, 4, 6, 7, 10, 14, 24, 42, 98, 600)
GAP_S = (2.0, 7.0, 8.0, 10.0, 11.0, 13.0, 16.0, 21.0, 33.0, 86.0, 300.0)
REQUESTS = (2, 4, 7, 11, 14, 18, 24, 30, 37, 61, 150)
FORGETTING = 0.07
"""Share of requests that keep less than the whole prompt before: mostly one block less."""


@dataclass(frozen=True, slots=True)
class Request:
    """Holds one prompt of a session."""

    session: int
    number: int
    prompt: tuple[int, ...]
    think_s: float
    """From the answer before to this request."""
    kept_tokens: int
    """At its head, of the prompt before: what an unlimited cache may have."""

    @property
    def name(self) -> str:
        return f"{self.session}/{self.number}"

    def possible_tokens(self, block_tokens: int) -> int:
        """How many of its tokens an unlimited cache of such blocks saves; the last is computed."""
        return min(self.kept_tokens, len(self.prompt) - 1) // block_tokens * block_tokens


Session = list[Request]
Shape = list[tuple[float, int, int]]
"""Of one session: seconds since its start, blocks kept, blocks in all, of each request."""


def sessions(path: Path | None, *, count: int, requests_max: int, seed: int) -> list[Session]:
    """Return the first `count` usable sessions of the trace; without one, as many from the seed.

    Raises `ValueError` when the trace has fewer.
    """
    shapes = iter(_made(seed)) if path is None else _read(path)
    made: list[Session] = []
    for shape in shapes:
        if len(made) == count:
            break
        fitting = _fitting(shape)[:requests_max]
        if len(fitting) > 1:
            made.append(_session(len(made), fitting, seed))
    if len(made) < count:
        raise ValueError(f"{path}: {len(made)} sessions begin small enough, {count} are wanted")
    return made


def _read(path: Path) -> Iterator[Shape]:
    for line in path.read_text().splitlines():
        yield [(at_s, kept, total) for at_s, kept, total, *_ in json.loads(line)]


def _made(seed: int) -> Iterator[Shape]:
    source = random.Random(seed)
    while True:
        at_s, total = 0.0, round(_draw(source, FIRST_BLOCKS))
        shape: Shape = [(at_s, 0, total)]
        for _ in range(round(_draw(source, REQUESTS)) - 1):
            at_s += _draw(source, GAP_S)
            kept = total - (source.random() < FORGETTING)
            total = kept + round(_draw(source, NEW_BLOCKS))
            shape.append((at_s, kept, total))
        yield shape


def _draw(source: random.Random, deciles: Sequence[float]) -> float:
    """Draw from a distribution that is given by its deciles."""
    place = source.random() * (len(deciles) - 1)
    below = int(place)
    return deciles[below] + (deciles[below + 1] - deciles[below]) * (place - below)


def _fitting(shape: Shape) -> Shape:
    """Return a session up to its first prompt that is empty or too long."""
    return list(takewhile(lambda request: 0 < request[2] <= BLOCKS_MAX, shape))


def _session(number: int, shape: Shape, seed: int) -> Session:
    """Give every block tokens of its own: named by session, and by who first had it there."""
    made: Session = []
    prompt: tuple[int, ...] = ()
    before_s = 0.0
    for place, (at_s, kept, total) in enumerate(shape):
        source = random.Random(f"{seed}/{number}/{place}")
        kept_tokens = min(kept, total) * TOKENS_PER_BLOCK if made else 0
        kept_tokens = min(kept_tokens, len(prompt))
        new = total * TOKENS_PER_BLOCK - kept_tokens
        prompt = prompt[:kept_tokens] + tuple(
            source.randrange(RESERVED_TOKENS, VOCABULARY) for _ in range(new)
        )
        think_s = min((at_s - before_s) / THINK_DIVISOR, THINK_S_MAX) if made else 0.0
        before_s = at_s
        made.append(Request(number, place, prompt, think_s, kept_tokens))
    return made


@dataclass(frozen=True, slots=True)
class Load:
    """Sums up sessions."""

    requests: int
    prompt_tokens: int
    possible_tokens: int
    """Of these, how many an unlimited shared cache of the engine's blocks would save."""
    distinct_tokens: int
    """The working set."""

    @property
    def hit_possible(self) -> float:
        return self.possible_tokens / self.prompt_tokens


def load_of(made: Sequence[Session], block_tokens: int) -> Load:
    """Sum up sessions for a cache of such blocks."""
    requests = [request for session in made for request in session]
    return Load(
        len(requests),
        sum(len(r.prompt) for r in requests),
        sum(r.possible_tokens(block_tokens) for r in requests),
        sum(len(r.prompt) - r.kept_tokens for r in requests),
    )
