"""Replaces what the real code calls of the machine by the simulated world.

Everything between these edges runs as it is: `Client` and its control channel,
the node's daemon and core, segments, headers, records, breakers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvstore.client import client, pins, put_pipeline, resetting, session
from kvstore.client.local import (
    control,
    host_writer,
    host_writers,
    link,
    nodes,
    reader,
    writer,
)
from kvstore.client.remote import writer as remote_writer
from kvstore.index.guarded import GuardedIndex
from kvstore.index.open import OpenedIndex
from kvstore.limits import Limits
from kvstore.node import restart
from kvstore.segment import shm
from kvstore.testing.sim import memory
from kvstore.testing.sim.hosts import SimLease
from kvstore.testing.sim.index import SimIndex
from kvstore.testing.sim.network import SimSocket

if TYPE_CHECKING:
    from kvstore.testing.sim.world import World


PART_BYTES_MIN = 4000
"""So that puts of several values are worked on in parts, as large ones are."""


def guarded(world: World, timeout_s: float) -> GuardedIndex:
    return GuardedIndex(SimIndex(world, timeout_s), machine=world.machine)


def _edges(world: World) -> Iterator[tuple[Any, str, object]]:
    """(module, name, what stands there during a simulation)"""
    time = SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep, time=world.wall)
    time.time_ns = lambda: int(world.wall() * 1e9)
    for module in (
        *(
            client,
            control,
            host_writer,
            host_writers,
            reader,
            remote_writer,
            put_pipeline,
            session,
            writer,
            resetting,
        ),
    ):
        if hasattr(module, "time"):
            yield module, "time", time
    yield control, "processor_wanted_s", lambda connection: None

    lock = world.machine.lock

    for module in (control, host_writers, nodes, remote_writer, writer):
        yield module, "threading", SimpleNamespace(RLock=lock)
    # Pins end by calls alone, as below: a thread of the real machine would not replay.
    no_thread = SimpleNamespace(start=lambda: None, is_alive=lambda: True)
    yield (
        pins,
        "threading",
        SimpleNamespace(RLock=lock, local=threading.local, Thread=lambda **_: no_thread),
    )

    def open_guarded(url: str | None, *, key_prefix: str, run_dir: Path, limits: Limits) -> Any:
        return OpenedIndex(guarded(world, limits.redis_timeout_s), str(url), None)

    yield session, "open_guarded", open_guarded
    # A thread of the real machine would not replay: here dead nodes are found by calls alone.
    yield session, "Reaper", lambda _: SimpleNamespace(start=lambda: None, close=lambda: None)
    yield nodes, "node_dirs", world.dirs_of
    yield nodes, "sweep", world.sweep
    yield resetting, "node_dirs", world.dirs_of
    yield resetting, "secrets", SimpleNamespace(randbits=world.rng.getrandbits)
    yield nodes, "AttachedShm", memory.SimAttached
    yield link, "AttachedShm", memory.SimAttached
    yield shm, "_create", world.files.create
    yield shm, "_map", world.files.map
    yield shm, "check_room", lambda *_: None
    yield shm, "_reopen", world.files.reopen
    # The lock of the node's directory says the same: nobody sweeps by segment here.
    yield shm, "_lock_head", lambda _: SimpleNamespace(release=lambda: None)
    yield restart, "check_room", lambda *_: None
    yield memory.SimOwned, "world", world
    yield put_pipeline, "PART_BYTES_MIN", PART_BYTES_MIN
    for module in (put_pipeline, client):
        yield module, "copy", lambda to, from_: memory.copy(world, to, from_)
    yield (
        control,
        "socket",
        SimpleNamespace(
            AF_UNIX=0,
            SOCK_STREAM=0,
            socket=lambda *_: SimSocket(world, world.current.process),
        ),
    )
    yield control, "lease_at", lambda leases: SimLease(world, leases)
    yield link, "os", SimpleNamespace(access=lambda *_: True, W_OK=os.W_OK)


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """The machine is the world's, and the real one afterwards."""
    real: list[tuple[Any, str, object]] = []
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
