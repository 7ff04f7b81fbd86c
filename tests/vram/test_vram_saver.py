"""A node that owns VRAM in a process of its own, over the model of a device: engines come and go,
with a real node below, a real Redis and real processes."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from contract.cuda import get, put
from redis_servers import wait_until
from vram_producer import BLOCK_BYTES, NAMESPACE, PATIENCE_S, found_of, key_of, payload_of

from kvstore import PutStatus, UsageError
from kvstore.errors import NodeUnavailableError
from kvstore.nodedir import NodeDir
from kvstore.protocol.control import Op
from kvstore.spi import BlockSession, DeviceReservation, VramPool, VramSaver, vram_for_saves
from kvstore.testing.cuda import ModelCuda
from kvstore.testing.stopping import stop
from kvstore.types import STORED

MIB = 1 << 20
spawn = multiprocessing.get_context("spawn")


def own(options, model_dir, size_bytes: int, pipe) -> None:
    """What `kvstore node --vram` does, until the pipe ends."""
    device = ModelCuda(Path(model_dir))
    store = BlockSession(**options, device=device)
    pool = VramPool(store, device, size_bytes, name="vram-0", takes_saves=True)
    pipe.send("ready")
    pipe.recv()
    pool.stop()


class Owner:
    def __init__(self, node, model_dir, size_bytes=2 * MIB) -> None:
        self.pipe, theirs = spawn.Pipe()
        arguments = (node.client_options, str(model_dir), size_bytes, theirs)
        self.process = spawn.Process(target=own, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(PATIENCE_S), "the owner has not started"
        assert self.pipe.recv() == "ready"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE_S)


@pytest.fixture
def owner(node, model_dir):
    """The node, here in another thread: to be ended it needs no process."""
    device = ModelCuda(model_dir)
    store = BlockSession(**node.client_options, device=device)
    pool = VramPool(store, device, 2 * MIB, name="vram-0", takes_saves=True)
    yield pool
    pool.stop(0.0)
    store.close()


class Engine:
    """Saves to VRAM of the host, and reads from there."""

    def __init__(self, node, model_dir, size_bytes=MIB) -> None:
        self.device = ModelCuda(Path(model_dir))
        self.store = BlockSession(**node, device=self.device)
        self.saver = vram_for_saves(self.store, self.device, size_bytes)

    def reserve(self, *numbers: int):
        return self.saver.reserve([key_of(n) for n in numbers], BLOCK_BYTES, NAMESPACE)

    def fill(self, reservations, *numbers: int) -> None:
        for reservation, n in zip(reservations, numbers, strict=True):
            put(self.device, reservation.buffer.address, payload_of(n))

    def save(self, *numbers: int) -> None:
        reservations = self.reserve(*numbers)
        self.fill(reservations, *numbers)
        assert self.store.commit(reservations) == [STORED] * len(numbers)

    def read(self, *numbers: int) -> list[bytes | None]:
        """What is there in VRAM."""
        found = found_of(self.store, numbers)
        views = [None if one is None else self.store.device_view(one) for one in found]
        return [
            None if view is None else get(self.device, view.memory.address, BLOCK_BYTES)
            for view in views
        ]

    def close(self) -> None:
        self.saver.stop()
        self.store.close()


@pytest.fixture
def engine(node, owner, model_dir):
    engine = Engine(node.client_options, model_dir)
    yield engine
    engine.close()


def engine_process(options, model_dir, ready) -> None:
    """Saves one block, has reserved another, and waits for its end."""
    engine = Engine(options, Path(model_dir))
    engine.save(1)
    (granted,) = engine.reserve(2)
    ready.put(granted.slot)
    time.sleep(PATIENCE_S)


@pytest.fixture
def other(node, owner, model_dir):
    """Another engine's process, and the slot that it has reserved for block 2."""
    ready = spawn.Queue()
    arguments = (node.client_options, str(model_dir), ready)
    process = spawn.Process(target=engine_process, args=arguments, daemon=True)
    process.start()
    yield process, ready.get(timeout=PATIENCE_S)
    process.kill()
    process.join(PATIENCE_S)


def test_blocks_outlive_the_engine_that_saved_them(other, engine, node, model_dir):
    process, _ = other
    assert engine.read(1) == [payload_of(1)]
    process.kill()
    process.join(PATIENCE_S)
    assert engine.read(1) == [payload_of(1)]
    wait_until(lambda: isinstance(engine.reserve(2)[0], DeviceReservation), "its slot is free")
    following = Engine(node.client_options, model_dir)
    assert following.read(1) == [payload_of(1)], "an engine that starts after it finds them"
    following.close()


def test_a_slot_of_a_stopped_engine_stays_its_own(other, engine):
    process, slot = other
    stop(process.pid)
    (answer,) = engine.reserve(2)
    assert answer.status is PutStatus.IN_PROGRESS
    granted = engine.reserve(*range(3, 30))
    taken = [one.slot for one in granted if isinstance(one, DeviceReservation)]
    assert taken
    assert slot not in taken
    os.kill(process.pid, signal.SIGCONT)


def test_an_engine_takes_the_hosts_node_before_a_pool_of_its_own(engine, node, model_dir):
    assert isinstance(engine.saver, VramSaver)
    elsewhere = ModelCuda(model_dir, uuid="model-1")
    pool = vram_for_saves(engine.store, elsewhere, MIB)
    assert isinstance(pool, VramPool), "the node has no memory of that device"
    pool.stop(0.0)


def test_a_full_node_makes_room_by_taking_blocks_down(engine, owner):
    numbers = range(40)  # twice what fits
    for n in numbers:
        wait_until(lambda n=n: _saved(engine, n), f"there is room for block {n}")
    owner.stop(PATIENCE_S)
    counts = owner.demoter.counts
    assert (counts["demoted"], counts["lost"]) == (40, 0)


def _saved(engine, number):
    answers = engine.reserve(number)
    if not isinstance(answers[0], DeviceReservation):
        return False
    engine.fill(answers, number)
    return engine.store.commit(answers) == [STORED]


def test_what_was_saved_goes_down_when_the_node_ends(engine, owner):
    engine.save(*range(10))
    owner.stop(PATIENCE_S)
    assert owner.demoter.counts["demoted"] == 10
    found = engine.store.match([key_of(n) for n in range(10)])
    assert len(found) == 10
    assert engine.read(0) == [None]


def test_when_the_node_is_killed_its_memory_stays_for_who_still_writes_there(node, model_dir):
    owner = Owner(node, model_dir)
    engine = Engine(node.client_options, model_dir)
    granted = engine.reserve(1)
    owner.kill()
    engine.fill(granted, 1)
    (answer,) = engine.reserve(2)
    assert answer.status is PutStatus.REJECTED
    assert engine.device.mapped == 1, "it may still be written to"
    with pytest.raises(NodeUnavailableError):
        engine.store.commit(granted)
    assert engine.device.mapped == 0
    again = Owner(node, model_dir)
    wait_until(lambda: isinstance(engine.reserve(2)[0], DeviceReservation), "the next start")
    again.kill()
    engine.close()


def test_what_its_node_cannot_do_is_refused_and_the_node_goes_on(engine):
    engine.save(1)
    control = engine.saver._writer.linked.control
    (granted,) = engine.reserve(2)
    arguments = (NAMESPACE, key_of(3), [4], [0], [0], [b"four"], 0)
    with pytest.raises(UsageError, match="values"):
        control.request(Op.RESERVE, *arguments)
    engine.fill([granted], 2)
    assert engine.store.commit([granted]) == [STORED]
    assert engine.read(1, 2) == [payload_of(1), payload_of(2)]


def test_a_namespace_is_cleared_there_too(engine):
    engine.save(1, 2)
    assert engine.saver.clear(NAMESPACE) == 2
    assert engine.read(1) == [None]


def test_what_is_given_up_is_free_again(engine):
    granted = engine.reserve(1, 2)
    engine.store.abort(granted)
    engine.save(1, 2)


def test_at_the_end_nothing_stays_mapped(engine, node):
    engine.save(1)
    engine.reserve(2)
    engine.saver.stop()
    assert engine.device.mapped == 0
    engine.saver.stop()
    (answer,) = engine.reserve(2)
    assert answer.status is PutStatus.REJECTED
    assert NodeDir(node.run_dir, "vram-0").alive()
