"""Reads a trace: which blocks each prompt was made of, and when it came.

A file has one JSON value a line, of one of two kinds:

    {"timestamp": 27482, "hash_ids": [0, 1, 7]}     a request, at so many milliseconds: Mooncake's
                                                    traces, or an engine's block hashes (numbers or
                                                    text), head first; further names are ignored
    [[0.0, 0, 85, "tool_use"], [9.1, 84, 91], ...]  a session: of each request the seconds since the
                                                    session began, how many blocks at its head are
                                                    those of the request before, and its blocks

Blocks get numbers, the same number for the same name behind the same prefix: KV can be reused only
behind the prefix that it was computed behind. So the blocks of a trace are a tree, and a prompt is
a path from its root, which optimum.py relies on.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from kvstore.errors import UsageError, shown

LIVE_DEFAULT, SEED_DEFAULT = 60, 7
LINE_BYTES_MAX = 64 << 20
REQUESTS_MAX = 1 << 22
REFERENCES_MAX = 1 << 28
"""Blocks of all prompts together, at 4 bytes each."""
DISTINCT_MAX = 1 << 23
"""Blocks that differ, at 300 bytes each: all limits together are about 4 GiB."""
MILLISECONDS_MAX = 1 << 53

Session = list[tuple[float, int, int]]
"""Of each request: seconds since the start, blocks kept, blocks in all."""


class PromptTrace(NamedTuple):
    name: str
    times: list[float]
    """Of each prompt, in seconds, ascending."""
    prompts: list[array[int]]
    """The numbers of each prompt's blocks, head first."""
    distinct: int
    """Blocks have the numbers below it."""

    @property
    def references(self) -> int:
        return sum(map(len, self.prompts))


class _Reader:
    """Gathers the prompts of one file, and says where it is wrong."""

    def __init__(self, path: Path, join: int) -> None:
        self._path, self._join = path, join
        self._line = 0
        self._numbers: dict[tuple[int, object], int] = {}
        """(number of the block before, -1 for none; name) -> number."""
        self._sessions: list[Session] = []
        self._found: list[tuple[float, array[int]]] = []
        self._distinct = self._references = self._requests = 0

    def read(self, live: int | None, seed: int | None) -> PromptTrace:
        for value in self._values():
            if isinstance(value, dict) and not self._sessions:
                self._add_request(value)
            elif isinstance(value, list) and not self._found:
                self._add_session(value)
            else:
                first = "sessions" if self._sessions else "requests"
                other = (
                    f", and those before it are {first}" if self._found or self._sessions else ""
                )
                raise self._wrong(f"is no request and no session{other}: {shown(value, 60)}")
        if self._sessions:
            self._lay_out(LIVE_DEFAULT if live is None else live, seed)
        elif live is not None or seed is not None:
            field, value = ("--seed", seed) if live is None else ("--live", live)
            must = f"is for sessions: the requests of {self._path} have times of their own"
            raise UsageError(field, value, must)
        found = sorted((one for one in self._found if one[1]), key=lambda one: one[0])
        if not found:
            raise UsageError("TRACE", str(self._path), "has no prompt with a block: is it empty?")
        times, prompts = map(list, zip(*found, strict=True))
        return PromptTrace(self._path.name, times, prompts, self._distinct)

    def _wrong(self, what: str) -> UsageError:
        must = f"{what}; mend the line, or take it out: sed -i {self._line}d {self._path}"
        return UsageError("TRACE", f"{self._path}, line {self._line}", must)

    def _values(self) -> Iterator[object]:
        try:
            with self._path.open("rb") as file:
                while raw := file.readline(LINE_BYTES_MAX + 1):
                    self._line += 1
                    if len(raw) > LINE_BYTES_MAX:
                        raise self._wrong(f"has more than {LINE_BYTES_MAX} bytes")
                    if not raw.strip():
                        continue
                    try:
                        yield json.loads(raw)
                    except (ValueError, RecursionError) as e:
                        raise self._wrong(f"is no JSON ({e})") from e
        except OSError as e:
            raise UsageError("TRACE", str(self._path), f"cannot be read: {e.strerror}") from e

    def _count(self, references: int) -> None:
        self._requests += 1
        self._references += references
        for what, most, have in (
            ("requests", REQUESTS_MAX, self._requests),
            ("blocks", REFERENCES_MAX, self._references),
            ("different blocks", DISTINCT_MAX, self._distinct),
        ):
            if have > most:
                must = (
                    f"has more than {most} {what} up to line {self._line}: read a part of it "
                    "(head -n), or several blocks as one (--join 4)"
                )
                raise UsageError("TRACE", str(self._path), must)

    # --- requests ----------------------------------------------------------------

    def _add_request(self, value: dict[str, object]) -> None:
        at_ms, names = _number(value.get("timestamp")), value.get("hash_ids")
        if at_ms is None or not 0 <= at_ms <= MILLISECONDS_MAX:
            said = shown(value.get("timestamp"), 40)
            raise self._wrong(f"timestamp={said} must be milliseconds from 0 on")
        if not isinstance(names, list):
            raise self._wrong(f"hash_ids={shown(names, 40)} must be a list of block hashes")
        numbers, last = array("I"), -1
        for name in names[self._join - 1 :: self._join]:
            if type(name) not in (int, str):
                raise self._wrong(f"hash_ids has {shown(name, 40)}, and must have numbers or text")
            last = self._numbers.setdefault((last, name), self._distinct)
            self._distinct = len(self._numbers)
            numbers.append(last)
        self._count(len(numbers))
        self._found.append((at_ms / 1000, numbers))

    # --- sessions ----------------------------------------------------------------

    def _add_session(self, value: list[object]) -> None:
        session: Session = []
        before_s, before = 0.0, 0
        for place, one in enumerate(value):
            if not isinstance(one, list) or len(one) < 3:
                raise self._wrong(f"its request {place} must be [seconds, kept, blocks, ...]")
            at_s, kept, total = map(_number, one[:3])
            if at_s is None or not before_s <= at_s < math.inf:
                must = f"must be seconds from {before_s} on, when the one before it came"
                raise self._wrong(f"the time {shown(one[0], 40)} of its request {place} {must}")
            if type(kept) is not int or type(total) is not int or not 0 <= kept <= total:
                must = "must be whole numbers, no more kept than there are"
                raise self._wrong(f"the blocks {shown(one[1:3], 40)} of its request {place} {must}")
            if kept > before:
                must = f"keeps {kept} blocks, and the one before it has {before}"
                raise self._wrong(f"its request {place} {must}")
            self._distinct += total // self._join - kept // self._join
            self._count(total // self._join)
            session.append((at_s, kept // self._join, total // self._join))
            before_s, before = at_s, total
        if session:
            self._sessions.append(session)

    def _lay_out(self, live: int, seed: int | None) -> None:
        """Have sessions begin by chance, so often that `live` of them are there at once."""
        rng = random.Random(SEED_DEFAULT if seed is None else seed)
        each_s = fmean(session[-1][0] for session in self._sessions) / live
        began, new = 0.0, 0
        for session in self._sessions:
            began += rng.expovariate(1 / each_s) if each_s else 0.0
            blocks = array("I")
            for at_s, kept, total in session:
                blocks = blocks[:kept] + array("I", range(new, new + total - kept))
                new += total - kept
                self._found.append((began + at_s, blocks))


def _number(value: object) -> int | float | None:
    return value if type(value) is int or type(value) is float else None


def read_trace(
    path: Path, *, join: int = 1, live: int | None = None, seed: int | None = None
) -> PromptTrace:
    """Return the trace in `path`, of which `join` blocks are one. Raises `UsageError`, which names
    the line that is wrong and what to do."""
    return _Reader(path, join).read(live, seed)
