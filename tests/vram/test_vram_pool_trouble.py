"""A pool in VRAM whose node is late, whose name is taken, or that nobody can open."""

import threading
from contextlib import closing, contextmanager

import pytest
from contract.cuda import put
from redis_servers import wait_until
from stores import in_loop
from vram_producer import (
    BLOCK_BYTES,
    NAMESPACE,
    PATIENCE_S,
    demoted,
    found_of,
    host_bytes,
    key_of,
    payload_of,
)

from kvstore import MissReason, PutStatus
from kvstore.core.events import Touch
from kvstore.cuda.checksum import DeviceChecksums
from kvstore.errors import DeviceError, UsageError
from kvstore.index.open import OpenedIndex
from kvstore.limits import TOLD_MAX
from kvstore.record import unpack_record
from kvstore.spi import BlockSession, VramPool
from kvstore.testing.cuda import ModelCuda
from kvstore.vram import demoter
from kvstore.vram import pool as vram_pool

MIB = 1 << 20


@contextmanager
def busy_node(pool):
    """The node in VRAM answers nothing meanwhile: its event loop is at something else."""
    go_on = threading.Event()
    in_loop(pool.node, go_on.wait, PATIENCE_S)
    try:
        yield
    finally:
        go_on.set()


def impatient(monkeypatch, timeout_s=0.05):
    monkeypatch.setattr(vram_pool, "TIMEOUT_S", timeout_s)
    monkeypatch.setattr(demoter, "ANSWER_TIMEOUT_S", timeout_s)


def test_slots_that_are_granted_too_late_are_given_back_and_the_pool_goes_on(producer, monkeypatch):
    with busy_node(producer.pool):
        impatient(monkeypatch)
        assert producer.save(0, 1) == ["dram"] * 2
        impatient(monkeypatch, 10 * PATIENCE_S)
        assert producer.save(2) == ["dram"], "and without waiting: the first answer is to come"
    wait_until(lambda: producer.save(3) == ["vram"], "it is in use again")
    stats = producer.pool.stats()
    assert (stats["reserved"], stats["blocks"]) == (0, 1)


@pytest.mark.parametrize("busy_before", [False, True])
def test_blocks_whose_commit_is_answered_too_late_are_there_all_the_same(
    producer, consumer, monkeypatch, busy_before
):
    (slot,) = producer.pool.reserve([key_of(0)], BLOCK_BYTES, NAMESPACE)
    (other,) = producer.pool.reserve([key_of(1)], BLOCK_BYTES, NAMESPACE)
    put(producer.device, slot.buffer.address, payload_of(0))
    with busy_node(producer.pool):
        impatient(monkeypatch)
        if busy_before:
            producer.pool.reserve([key_of(2)], BLOCK_BYTES, NAMESPACE)
        (result,) = producer.pool.commit([slot])
        assert result.status is PutStatus.REJECTED
        producer.pool.abort([other])
        impatient(monkeypatch, PATIENCE_S)
    wait_until(lambda: found_of(consumer, [0])[0], "it is published")
    assert host_bytes(consumer, found_of(consumer, [0])) == [payload_of(0)]
    wait_until(lambda: producer.save(1) == ["vram"], "what was aborted is free")
    assert producer.pool.stats()["reserved"] == 0


def test_blocks_go_down_again_after_an_answer_that_came_too_late(producer, consumer, monkeypatch):
    with busy_node(producer.pool):
        impatient(monkeypatch)
        producer.pool.demoter._reserve_bytes = 2 * MIB
        producer.pool.demoter.wake()
        wait_until(lambda: producer.pool.demoter._session.busy, "its answer is late")
        impatient(monkeypatch, PATIENCE_S)
    wait_until(lambda: producer.save(*range(4)) == ["vram"] * 4, "the pool is in use again")
    demoted(producer, 4)
    assert host_bytes(consumer, found_of(consumer, range(4))) == [payload_of(n) for n in range(4)]
    wait_until(lambda: producer.pool.stats()["blocks"] == 0, "nothing stays pinned")


def test_producers_that_look_alike_keep_their_blocks_apart(producer):
    """Two engines of one process, or of containers that share a run directory: their process
    numbers are the same."""
    other = VramPool(producer.store, producer.device, MIB)
    assert other.node.config.name != producer.pool.node.config.name
    assert producer.save(0) == ["vram"]
    other.stop(0.0)


@pytest.mark.parametrize("wrong", ["name", "demoter"])
def test_a_pool_that_cannot_be_made_leaves_nothing_open(node, model_dir, monkeypatch, wrong):
    closed = []

    def watch(kind):
        close = kind.close
        monkeypatch.setattr(kind, "close", lambda one: (closed.append(kind), close(one)))

    def refuses(*args):
        raise DeviceError("no stream is left")

    if wrong == "demoter":
        monkeypatch.setattr(vram_pool, "Demoter", refuses)
    device = ModelCuda(model_dir)
    with closing(BlockSession(**node.client_options, device=device, verify="always")) as store:
        watch(OpenedIndex)
        watch(DeviceChecksums)
        with pytest.raises((UsageError, DeviceError)):
            VramPool(store, device, 2 * MIB, name="no/name" if wrong == "name" else None)
        assert set(closed) == {OpenedIndex, DeviceChecksums}


def test_what_cannot_be_read_for_long_is_said_once(producer, node, tmp_path, caplog):
    far = ModelCuda(tmp_path / "other box")
    producer.save(0)
    session = BlockSession(**node.client_options, device=far)
    (found,) = session.match([key_of(0)])
    for _ in range(3):
        assert session.device_view(found) is None
        assert session.match([key_of(0)]).short is MissReason.UNREADABLE_UNMAPPED
        start = unpack_record(found.key, found.record)[:2]
        session.nodes.entry(*start).vram_breaker.probe_at = 0.0  # its time is over
        session.remote.vram.look()
    assert caplog.text.count("cannot be read over CUDA IPC") == 1
    session.close()


def test_hints_to_the_node_in_vram_share_one_limit(producer, monkeypatch):
    told = []
    node = producer.pool.node
    monkeypatch.setattr(node._loop, "call_soon_threadsafe", told.append)
    for _ in range(TOLD_MAX + 10):
        node.tell(Touch(0, []))
    monkeypatch.undo()
    assert len(told) == TOLD_MAX
    for one in told:
        node._loop.call_soon_threadsafe(one)


def test_a_block_that_stays_for_now_keeps_no_other_pinned(producer, node, monkeypatch):
    """Somebody else is saving it below, and may die: what was chosen beside it goes down."""
    monkeypatch.setattr(demoter, "DEMOTE_BYTES_MAX", BLOCK_BYTES)  # each block is a batch
    other = BlockSession(**node.client_options)
    (reserved,) = other.reserve([key_of(3)], BLOCK_BYTES, NAMESPACE)  # the coldest of a run
    assert producer.save(*range(4)) == ["vram"] * 4
    producer.pool.demoter._reserve_bytes = 2 * MIB
    producer.pool.demoter.wake()
    demoted(producer, 3)
    other.abort([reserved])
    other.close()
    producer.pool.demoter.wake()
    wait_until(lambda: producer.pool.stats()["blocks"] == 0, "nothing stays pinned")


def test_a_node_whose_vram_opens_after_all_is_found_again(producer, node, device, monkeypatch):
    producer.save(0)
    session = BlockSession(**node.client_options, device=device)
    (found,) = session.match([key_of(0)])
    opens = device.open

    def refuses(*args, **more):
        raise DeviceError("no context is left")

    monkeypatch.setattr(device, "open", refuses)
    assert session.device_view(found) is None
    run = session.match([key_of(0)])
    assert (list(run), run.short) == ([], MissReason.UNREADABLE_UNMAPPED)
    monkeypatch.setattr(device, "open", opens)
    wait_until(lambda: len(session.match([key_of(0)])) == 1, "it is opened")
    view = session.device_view(found)
    assert view is not None
    view.close()
    session.close()
