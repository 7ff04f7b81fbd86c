"""Plans what a chaos run does and judges it: faults, prompts, verdict. Nothing here acts."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

VICTIMS = ("node", "redis", "both")
KINDS = ("kill", "pause", "restart")
LIE, FLIP, TAMPER = "lie", "flip", "tamper"
WAYS = (
    *((victim, kind) for victim in VICTIMS for kind in KINDS),
    ("records", LIE),
    ("wire", FLIP),
    ("stream", TAMPER),
)
"""What can happen to whom: besides what is killed, silent (paused) or restarted, records in Redis
are forged, a man in the middle changes what Redis answers the engines, and one between two hosts
flips, leaves out, repeats, reorders, holds and cuts off what they say, both ways."""
FIRST_FAULT_S = 8.0
"""The store fills meanwhile."""
CALM_S = (3.0, 5.0)
"""Between the end of a fault and the next."""
FAULT_S = (1.5, 4.0)
"""How long a killed process stays away and a paused one stopped."""
AFTER_S = 2.0
"""What starts so soon after a fault still counts as under it: breakers half-open by themselves."""

BLOCK = 256
"""Tokens of a store block, and what every engine computes in one step: steps begin at the same
tokens however much was loaded, so all engines run the same kernels on the same shapes."""
BLOCKS = 4
TAIL_TOKENS = 2
NEW, BRANCH, REPEAT = "new", "branch", "repeat"
WEIGHTS = {NEW: 2, BRANCH: 2, REPEAT: 6}
RECENT = range(4, 16)
"""How many prompts ago one that is repeated was asked: saved by then, not evicted yet."""
RUDE = ("hits", "forks", "interrupted", "cancelled")
"""What neighbours of the engines do in every run."""
GIVEN_UP = 0.15
"""Of all requests: whoever asked hangs up in the middle of it, and asks again."""
GIVEN_UP_AFTER_S = (0.0, 0.4)


class Fault(NamedTuple):
    at_s: float
    victim: str
    kind: str
    lasts_s: float


class Window(NamedTuple):
    """Notes a fault as it was carried out, in seconds since the start."""

    fault: Fault
    began_s: float
    ended_s: float

    def meets(self, answer: Answer) -> bool:
        return answer.at_s < self.ended_s + AFTER_S and answer.at_s + answer.took_s > self.began_s


class Answer(NamedTuple):
    """Holds the answer to one request. `tokens` is None when it was not answered."""

    prompt: tuple[int, ...]
    kind: str
    at_s: float
    took_s: float
    tokens: list[int] | None = None
    ttft_s: float = 0.0
    cached_tokens: int = 0
    error: str = ""


def faults(seed: int, seconds: float) -> list[Fault]:
    """Return faults, one after the other: each victim is met in each way before any comes again."""
    rng = random.Random(f"faults {seed}")
    planned: list[Fault] = []
    at_s = FIRST_FAULT_S
    while True:
        ways = list(WAYS)
        rng.shuffle(ways)
        for victim, kind in ways:
            lasts_s = 0.0 if kind == "restart" else rng.uniform(*FAULT_S)
            if at_s + lasts_s + AFTER_S > seconds:
                return planned
            planned.append(Fault(at_s, victim, kind, lasts_s))
            at_s += lasts_s + rng.uniform(*CALM_S)


def traffic(seed: int, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield prompts without end: new ones, old ones, and old beginnings with a new end."""
    rng = random.Random(f"traffic {seed}")
    asked: list[tuple[int, ...]] = []
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    while True:
        kind = rng.choices(kinds, weights)[0] if len(asked) >= RECENT.stop else NEW
        kept = {NEW: 0, BRANCH: BLOCKS // 2 * BLOCK, REPEAT: BLOCKS * BLOCK + TAIL_TOKENS}[kind]
        start = asked[-rng.choice(RECENT)][:kept] if kept else ()
        rest = BLOCKS * BLOCK + TAIL_TOKENS - len(start)
        asked.append(start + tuple(rng.randrange(2, vocabulary) for _ in range(rest)))
        yield kind, asked[-1]


def patience(seed: int) -> Iterator[float | None]:
    """Yield without end after how many seconds a request is given up; None for one that is not."""
    rng = random.Random(f"patience {seed}")
    while True:
        given_up, after_s = rng.random() < GIVEN_UP, rng.uniform(*GIVEN_UP_AFTER_S)
        yield after_s if given_up else None


def judge(
    answers: Sequence[Answer],
    right: dict[tuple[int, ...], list[int]],
    windows: Sequence[Window],
    recompute_s: Sequence[float],
) -> dict[str, Any]:
    """Return the summary. Times are medians over repeated prompts: only those can be loaded
    whole."""

    def median_ms(times: list[float]) -> float | None:
        return round(statistics.median(times) * 1e3, 1) if times else None

    repeats: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        if answer.tokens is not None and answer.kind == REPEAT:
            met = [w.fault for w in windows if w.meets(answer)]
            repeats["fault" if met else "calm"].append(answer)
            for fault in met:
                repeats[f"{fault.kind} {fault.victim}"].append(answer)

    def row(found: list[Answer]) -> dict[str, Any]:
        whole = sum(a.cached_tokens == BLOCKS * BLOCK for a in found)
        return {
            "repeats": len(found),
            "loaded_whole": whole,
            "ttft_ms": median_ms([a.ttft_s for a in found]),
            "ttft_max_ms": median_ms([max((a.ttft_s for a in found), default=0.0)]),
        }

    return {
        "requests": len(answers),
        "answered": sum(a.tokens is not None for a in answers),
        "identical": sum(a.tokens is not None and a.tokens == right.get(a.prompt) for a in answers),
        "tokens_loaded": sum(a.cached_tokens for a in answers),
        "faults": len(windows),
        "recompute_ttft_ms": median_ms(list(recompute_s)),
        "under": {name: row(repeats[name]) for name in sorted(repeats)},
    }


def passed(summary: dict[str, Any], planned: int) -> bool:
    """Tell whether all were answered, all alike, and the run was one: faults happened and the store
    was used, also by neighbours that nothing was wrong with."""
    neighbours = summary["neighbours"]
    return bool(
        summary["answered"] == summary["identical"] == summary["requests"] > 0
        and summary["faults"] == planned > 0
        and summary["tokens_loaded"] > 0
        and not neighbours["wrong"]
        and all(neighbours[what] for what in RUDE)
    )
