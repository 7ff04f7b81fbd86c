"""Says what is replayed: which sessions, how many at once, at which engine, with which store."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from benchmarks.serving.sessions import Request

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Scenario:
    """Describes one replay."""

    sessions: int = 12
    requests_max: int = 14
    """Of a session."""
    live: int = 6
    """Sessions at once: each is a closed loop, and when it ends the next begins."""
    sticky: bool = False
    """All requests of a session go to one engine; else each goes to either."""
    in_turn: bool = False
    """A session's requests go to the engines in turn."""
    store_share: float | None = None
    """Of the working set; None: room for all."""
    killed: bool = False
    """The store's server is killed (SIGKILL) when half of the requests are answered."""
    kv_blocks: int = 256
    """Of each engine's own cache: less than the working set, so that it forgets."""

    @property
    def load(self) -> tuple[object, ...]:
        """What an engine without a store makes of it depends on this alone."""
        where = self.sticky, self.in_turn
        return self.sessions, self.requests_max, self.live, *where, self.kv_blocks

    def engine_of(self, request: Request, engines: int, seed: int) -> int:
        """Return the engine that a request goes to: the same in every run."""
        if self.sticky:
            return request.session % engines
        if self.in_turn:
            return (request.session + request.number) % engines
        return random.Random(f"{seed}/{request.name}").randrange(engines)


FULL = Scenario()
SCENARIOS = {
    "full": FULL,
    "small-store": Scenario(store_share=1 / 3),
    "tight-store": Scenario(store_share=1 / 6),
    "sticky": Scenario(sticky=True),
    "replicas": Scenario(in_turn=True),
    "two-live": Scenario(sessions=4, requests_max=12, live=2),
    "burst": Scenario(sessions=24, requests_max=6, live=24),
    "store-killed": Scenario(killed=True),
}


def quick(scenario: Scenario) -> Scenario:
    """Return a small replay of the same kind: a smoke test, which measures nothing."""
    return replace(scenario, sessions=4, requests_max=4, live=4, kv_blocks=160)
