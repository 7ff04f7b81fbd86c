"""Gives a client of the simulated world its session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.client.client import Client
from kvstore.client.nodes.reaper import Reaper
from kvstore.client.session import BlockSession
from kvstore.index.open import OpenedIndex
from kvstore.index.outage import GuardedIndex
from kvstore.testing.sim.models.index import SimIndex

if TYPE_CHECKING:
    from kvstore.testing.sim.world import World


def guarded(world: World, timeout_s: float) -> GuardedIndex:
    return GuardedIndex(SimIndex(world, timeout_s), machine=world.machine)


class _NoReaper(Reaper):
    """Dead nodes are found by calls alone: what looks for abandoned segments looks for real."""

    def start(self) -> None:
        """Do nothing: here calls alone find dead nodes."""


class SimSession(BlockSession):
    """Is the session of a simulated client process."""

    world: World

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, machine=self.world.machine, **options)

    def _open_index(self, url: str | None) -> OpenedIndex:
        return OpenedIndex(guarded(self.world, self.limits.redis_timeout_s), str(url), None)

    def _new_reaper(self) -> Reaper:
        return _NoReaper(self._look_after)


def client_class(world: World) -> type[Client]:
    """Makes a class: `Client` in `world`."""
    session_class = type("Session", (SimSession,), {"world": world})
    return type("Client", (Client,), {"_session_class": session_class})
