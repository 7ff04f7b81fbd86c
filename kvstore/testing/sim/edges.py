"""Where the real code touches the machine, and what it finds there during a simulation.

Everything between these edges runs as it is: `Client` and its control channel,
the node's daemon and core, segments, headers, records, breakers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvstore import clock
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
from kvstore.index import guarded as breaker
from kvstore.index.guarded import GuardedIndex
from kvstore.index.open import OpenedIndex
from kvstore.limits import Limits
from kvstore.node import daemon, publisher, resets, restart
from kvstore.node.control_server import Connection
from kvstore.segment import shm
from kvstore.testing.sim import memory
from kvstore.testing.sim.hosts import SimFormerClients, SimLease, SimSessions
from kvstore.testing.sim.index import SimIndex
from kvstore.testing.sim.network import SimSocket
from kvstore.testing.sim.scheduler import FOREVER, Actor

if TYPE_CHECKING:
    from kvstore.testing.sim.world import World


LOCK_POLL_S = 0.02
PART_BYTES_MIN = 4000
"""So that puts of several values are worked on in parts, as large ones are."""


class _SimEvent:
    """`threading.Event`, as far as a breaker's prober needs it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float) -> bool:
        self._world.wait(self._world.now + timeout_s)
        return self._set


class _SimLock:
    """`threading.RLock`: who waits for it lets others run, and whose it is may enter again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Actor | None = None
        self._entered = 0

    def acquire(self, blocking: bool = True, timeout: float = FOREVER) -> bool:
        world = self._world
        give_up_at = world.now + timeout
        while self._owner not in (None, world.current):
            if not blocking or world.now >= give_up_at:
                return False
            world.wait(min(give_up_at, world.now + LOCK_POLL_S))
        self._owner = world.current
        self._entered += 1
        return True

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._entered -= 1
        if not self._entered:
            self._owner = None

    def _is_owned(self) -> bool:
        return self._owner is self._world.current

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class _SimThread:
    def __init__(self, world: World, target: Callable[[], None], name: str) -> None:
        self._world = world
        self._target = target
        self._name = name

    def start(self) -> None:
        process = self._world.current.process
        self._world.spawn(process, f"{process.name}/probe", self._target)


def guarded(world: World, timeout_s: float) -> GuardedIndex:
    return GuardedIndex(SimIndex(world, timeout_s))


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
            daemon,
            publisher,
            resets,
            resetting,
        ),
    ):
        if hasattr(module, "time"):
            yield module, "time", time
    yield clock, "monotonic", time.monotonic
    yield control, "processor_wanted_s", lambda connection: None

    def lock() -> _SimLock:
        return _SimLock(world)

    for module in (control, host_writers, nodes, remote_writer, writer):
        yield module, "threading", SimpleNamespace(RLock=lock)
    # Pins end by calls alone, as below: a thread of the real machine would not replay.
    no_thread = SimpleNamespace(start=lambda: None, is_alive=lambda: True)
    yield (
        pins,
        "threading",
        SimpleNamespace(RLock=lock, local=threading.local, Thread=lambda **_: no_thread),
    )
    yield (
        breaker,
        "threading",
        SimpleNamespace(
            RLock=lock,
            Event=lambda: _SimEvent(world),
            Thread=lambda *, target, name, daemon: _SimThread(world, target, name),
        ),
    )

    def open_guarded(url: str | None, *, key_prefix: str, run_dir: Path, limits: Limits) -> Any:
        return OpenedIndex(guarded(world, limits.redis_timeout_s), str(url), None)

    yield session, "open_guarded", open_guarded
    # A thread of the real machine would not replay: here dead nodes are found by calls alone.
    yield session, "Reaper", lambda _: SimpleNamespace(start=lambda: None, close=lambda: None)
    yield nodes, "node_dirs", world.dirs_of
    yield nodes, "sweep", world.sweep
    yield resets, "node_dirs", world.dirs_of
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
    yield restart, "sweep", lambda *_, **__: []
    yield daemon, "next_epoch", world.next_epoch
    yield daemon, "share_files", lambda *_: None
    yield Connection, "peer_uid", lambda connection: os.geteuid()
    yield restart, "OwnedShm", memory.SimOwned
    yield (
        restart,
        "FormerClients",
        lambda leases, matter: SimFormerClients(world, leases, matter=matter),
    )
    yield daemon, "Sessions", SimSessions
    yield memory.SimOwned, "world", world
    yield SimSessions, "world", world
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
