"""Decides which engine gets a request.

What is known of an engine, each by itself; it gets requests while neither of the first two holds:

    down       a request or a probe failed: until a probe is answered, or for `DOWN_S` after that
    unsaved    its blocks did not come into the store: for `DOWN_S`, whatever probes say
    hangs      it left `MISSED_MAX` probes in a row unanswered: a request that hears nothing of it
               for long is given up (upstream.py). One probe that is answered ends it

Only the router's event loop changes any of it. Must never happen: a request that is refused because
all decode engines are down (one is tried nevertheless); an engine that answers probes but saves
nothing, and is given prompts to prefill all the while.

Pure: no I/O, `now` is an argument, in seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from connector.limits import ROUTER_LOAD_GAP_MAX
from kvstore import UsageError
from kvstore.spi import HolderRun

DOWN_S = 5.0
"""Time for which an engine that failed is skipped, unless it answers a probe sooner."""
MISSED_MAX = 2
"""Probes in a row that an engine may leave unanswered before it counts as hanging."""
ENGINES_MAX = 256


class Role(StrEnum):
    """Says what an engine is there for: computing and saving prompts, or loading them and
    answering."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Engine:
    """Holds one engine and what the router knows of it."""

    url: str
    role: Role
    at: str = ""
    """The memory node that it reads without a network, by the node's name or its host's."""
    in_flight: int = 0
    requests: int = 0
    failures: int = 0
    down_until: float = 0.0
    unsaved_until: float = 0.0
    """Time until which others prefill, because its blocks did not reach the store."""
    missed: int = 0
    """Probes in a row that it has not answered."""
    turn: int = 0
    """Number of the last request that it was given, so that equal engines take turns."""

    @classmethod
    def parse(cls, role: Role, text: str) -> Engine:
        """Return an engine from `URL` or `URL@NODE`. Raises `UsageError` for anything else."""
        url, _, at = text.partition("@")
        try:
            parts = urlsplit(url)
            host, _port = parts.hostname or "", parts.port  # it raises for a port that is none
            right = parts.scheme in ("http", "https") and host != "" and " " not in host
        except ValueError:
            right = False
        if not right:
            raise UsageError(role.value, text, "must be http://HOST:PORT, or that and @NODE")
        return cls(url.rstrip("/"), role, at)

    def up(self, now: float) -> bool:
        return now >= self.down_until and now >= self.unsaved_until

    def failed(self, now: float) -> None:
        self.failures += 1
        self.down_until = now + DOWN_S

    def answered(self) -> None:
        """Note that a probe was answered: the engine lives. Whether it can save is another
        question."""
        self.down_until = 0.0
        self.missed = 0

    def missed_probe(self, now: float) -> None:
        self.failed(now)
        self.missed += 1

    @property
    def hangs(self) -> bool:
        return self.missed >= MISSED_MAX

    def unsaved(self, now: float) -> None:
        self.failures += 1
        self.unsaved_until = now + DOWN_S


class EngineFleet:
    """Holds all engines, and chooses among them."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        """`engines` are there for good; others may come and go (`replace`)."""
        self._fixed = tuple(engines)
        if len(self._fixed) > ENGINES_MAX:
            raise UsageError("engines", len(self._fixed), f"must be at most {ENGINES_MAX}")
        self.engines: list[Engine] = []
        self.replace(())
        self._turns = 0

    def replace(self, engines: Iterable[Engine]) -> None:
        """Have `engines` beside the fixed ones from now on, the first `ENGINES_MAX` of all.

        One that is known already, by URL and role, keeps its state and counts; one that is
        named twice is one.
        """
        known = {(e.url, e.role): e for e in self.engines}
        found: dict[tuple[str, Role], Engine] = {}
        for one in (*self._fixed, *engines):
            place = (one.url, one.role)
            found.setdefault(place, known.get(place, one))
        self.engines = list(found.values())[:ENGINES_MAX]

    def choose(
        self,
        role: Role,
        held: Mapping[str, int],
        now: float,
        without: Collection[Engine] = (),
    ) -> Engine | None:
        """Return the engine beside most of the prefix, then the least loaded, then whose turn it
        is.

        `held` says how many leading blocks are at each node, by name and by host. When all
        are down a decode engine is tried nevertheless, for somebody has to answer; a prefill
        engine is not, for decode engines compute what is missing.
        """
        able = [e for e in self.engines if e.role is role and e not in without]
        candidates = [e for e in able if e.up(now)]
        if role is Role.DECODE:
            candidates = candidates or able
        if not candidates:
            return None
        least_loaded = min(e.in_flight for e in candidates)
        return min(
            candidates,
            key=lambda e: (
                -held.get(e.at, 0) if e.in_flight - least_loaded <= ROUTER_LOAD_GAP_MAX else 0,
                e.in_flight,
                e.turn,
            ),
        )

    def take(
        self,
        role: Role,
        held: Mapping[str, int],
        now: float,
        without: Collection[Engine] = (),
    ) -> Engine | None:
        """Return the engine of `choose`, whose turn that was: it is counted and goes behind its
        equals."""
        chosen = self.choose(role, held, now, without)
        if chosen is not None:
            self._turns += 1
            chosen.turn = self._turns
            chosen.requests += 1
        return chosen


def held_at(runs: Iterable[HolderRun]) -> dict[str, int]:
    """Return how many of the leading blocks each node holds, by its name and by its host's."""
    held: dict[str, int] = {}
    for holder, blocks in runs:
        for name in {holder.name, holder.host}:
            held[name] = held.get(name, 0) + blocks
    return held


def needs_prefill(prompt_tokens: int | None, block_tokens: int | None, found_blocks: int) -> bool:
    """Return whether a prefill engine has anything to add: a full block that nobody holds.

    None is not known. What fills no block is computed where it is decoded.
    """
    if prompt_tokens is None or block_tokens is None:
        return True
    return prompt_tokens // block_tokens > found_blocks
