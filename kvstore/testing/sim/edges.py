"""Replaces what the real code calls of the machine by the simulated world.

Everything between these edges runs as it is: `Client` and its control channel,
the node's daemon and core, segments, headers, records, breakers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

from kvstore.client import pins, reader
from kvstore.client.nodes import fetch
from kvstore.client.values import put_pipeline
from kvstore.compiled import part
from kvstore.core import blocks, node
from kvstore.segment import batch_read, shm
from kvstore.testing.sim.models import memory

if TYPE_CHECKING:
    from kvstore.testing.sim.world import World


PART_BYTES_MIN = 4000
"""So that puts of several values are worked on in parts, as large ones are."""
RESERVATIONS_MAX, GONE_KEYS_MAX, PENDING_REMOVE_MAX = 12, 64, 1000
"""So that a node of a few blocks reaches them."""


def _edges(world: World) -> Iterator[tuple[ModuleType, str, object]]:
    """Lists (module, name, what stands there during a simulation)."""
    # Pins end by calls alone: who closes one settles all that have ended.
    no_thread = SimpleNamespace(start=lambda: None, is_alive=lambda: True)
    threads = SimpleNamespace(local=threading.local, Thread=lambda **_: no_thread)
    yield pins, "threading", threads
    yield put_pipeline, "PART_BYTES_MIN", PART_BYTES_MIN
    yield node, "RESERVATIONS_MAX", RESERVATIONS_MAX
    yield blocks, "GONE_KEYS_MAX", GONE_KEYS_MAX
    yield blocks, "PENDING_REMOVE_MAX", PENDING_REMOVE_MAX
    for module in (reader, fetch, batch_read):
        yield module, "copy", lambda to, from_: memory.copy(world, to, from_)
    # In Python unless asked otherwise: a seed is the same run on every machine.
    wanted = "yes" if part.wanted() == "yes" else "no"
    yield batch_read, "READER", memory.SimReader(world, batch_read.choose(wanted))
    yield shm, "WRITE_HEADERS", shm.header_writer(wanted)


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """Makes the machine the world's, and the real one again afterwards."""
    real: list[tuple[ModuleType, str, object]] = []
    log = logging.getLogger("kvstore")
    level = log.level
    log.setLevel(logging.CRITICAL)  # trouble is what it is about
    try:
        for module, name, simulation in _edges(world):
            # An edge that has moved would go on leading to the real machine.
            declared = hasattr(module, name) or name in module.__annotations__
            assert declared, f"{module.__name__} has no {name}: where is it now?"
            real.append((module, name, getattr(module, name, None)))
            setattr(module, name, simulation)
        yield
    finally:
        log.setLevel(level)
        for module, name, before in reversed(real):
            setattr(module, name, before)
