"""A pool in VRAM over the model of a device, with a real node, a real Redis and real processes."""

import multiprocessing
import random
import time

import pytest
from redis_servers import wait_until
from stores import NodeProcess, NodeThread
from vram_producer import (
    BLOCK_BYTES,
    NAMESPACE,
    PATIENCE_S,
    Producer,
    demoted,
    found_of,
    host_bytes,
    in_vram,
    key_of,
    payload_of,
    produce,
)

from kvstore import MissReason, NoSpaceError, UsageError
from kvstore.cli.checks import machine
from kvstore.cli.checks.base import Context
from kvstore.cuda.base import address_of, wait
from kvstore.nodedir import NodeDir
from kvstore.spi import BlockSession, Tier, VramPool
from kvstore.testing.cuda import ModelCuda
from kvstore.transport.stream.security import StreamSecurity
from kvstore.vram import demoter

MIB = 1 << 20
SECRET = "a secret that both sides know"
POOL_BLOCKS = 20
"""What fits into a pool of 2 MiB."""
spawn = multiprocessing.get_context("spawn")


def test_a_consumer_copies_out_of_the_producers_memory_into_its_own(producer, consumer, device):
    assert producer.save(0, 1, 2) == ["vram"] * 3
    run = consumer.match([key_of(n) for n in range(4)])
    assert len(run) == 3
    assert run.short is MissReason.ABSENT
    views = [consumer.device_view(found) for found in run]
    mine = memoryview(bytearray(3 * BLOCK_BYTES))
    stream = device.stream()
    stream.copy(
        [
            (address_of(mine) + i * BLOCK_BYTES, view.memory.address, BLOCK_BYTES)
            for i, view in enumerate(views)
        ]
    )
    assert wait(stream.record(), time.monotonic() + PATIENCE_S)
    stream.close()
    assert all(view.valid() for view in views)
    assert bytes(mine) == b"".join(map(payload_of, range(3)))
    for view in views:
        view.close()


def test_who_knows_nothing_of_devices_reads_it_into_host_memory(producer, consumer):
    producer.save(0, 1)
    found = found_of(consumer, [0, 1])
    assert host_bytes(consumer, found) == [payload_of(0), payload_of(1)]
    assert consumer.remote.vram.counts["cuda_ipc_hits"] == 2


def test_a_block_in_place_is_valid_until_it_is_dropped(producer, consumer, device):
    producer.save(0)
    (found,) = found_of(consumer, [0])
    with consumer.device_view(found) as view:
        host = memoryview(bytearray(view.memory.size_bytes))
        stream = device.stream()
        stream.copy([(address_of(host), view.memory.address, len(host))])
        assert wait(stream.record(), time.monotonic() + PATIENCE_S)
        stream.close()
        assert view.valid()
        assert bytes(host) == payload_of(0)
        assert producer.pool.clear(NAMESPACE) == 1
        assert not view.valid()
    assert consumer.device_view(found) is None


def test_without_a_device_its_blocks_are_out_of_reach(producer, node):
    producer.save(0)
    with_none = BlockSession(**node.client_options)
    run = with_none.match([key_of(0)])
    assert (list(run), run.short) == ([], MissReason.OUT_OF_REACH)
    assert found_of(with_none, [0]) == [None]
    with_none.close()


def test_transports_can_leave_it_out(producer, node, device):
    producer.save(0)
    without = BlockSession(**node.client_options, device=device, transports=["shm", "stream"])
    assert found_of(without, [0]) == [None]
    without.close()


def test_who_has_nothing_left_to_save_below_reserves_nothing(producer):
    """What VRAM has taken is not asked for again, and often that is all."""
    assert producer.store.reserve([], 1000, NAMESPACE) == []


def test_a_process_without_a_device_may_look_up_for_others(producer, node, consumer):
    producer.save(0)
    scheduler = BlockSession(**node.client_options, sees_vram=lambda node_id, epoch: True)
    (found,) = scheduler.match([key_of(0)])
    assert scheduler.tiers([found]) == [Tier.VRAM]
    assert host_bytes(scheduler, [found]) == [None]
    assert host_bytes(consumer, [found]) == [payload_of(0)]
    scheduler.close()


def test_doctor_says_where_its_blocks_are_and_others_may_only_ask_it(producer, node):
    producer.save(0)
    options = node.client_options
    (finding,) = [
        f
        for f in machine.nodes(Context(options["url"], options["key_prefix"], node.run_dir))
        if "vram-" in f.found
    ]
    assert "read by cuda_ipc from the VRAM of model-0" in finding.found
    assert "1 blocks" in finding.found


def test_only_who_may_enter_the_nodes_directory_gets_its_memory(producer):
    node = producer.pool.node
    assert node.announcement.transports == {"cuda_ipc": "model-0"}
    assert node.dir.path.stat().st_mode & 0o077 == 0
    assert node.dir.vram_socket.stat().st_mode & 0o077 == 0
    assert producer.store.index.node(node.announcement.node_id)


def test_saves_of_others_go_to_host_memory(producer, node):
    other = BlockSession(**node.client_options)
    assert other.writer.link().announcement.name == "node"
    other.close()


def test_under_pressure_nothing_is_lost_while_host_memory_has_room(producer, consumer):
    numbers = range(10 * POOL_BLOCKS)
    went = [where for n in numbers for where in producer.save(n)]
    assert set(went) <= {"vram", "dram"}
    demoted(producer, 1)
    found = found_of(consumer, numbers)
    got = host_bytes(consumer, found)
    # What went down between lookup and read is found by the next lookup.
    for n in [n for n in numbers if got[n] is None]:
        wait_until(lambda n=n: host_bytes(consumer, found_of(consumer, [n]))[0], f"block {n}")
    assert [n for n in numbers if got[n] not in (None, payload_of(n))] == []
    assert producer.pool.demoter.counts["lost"] == 0


def test_some_slots_are_free_again_without_anybody_asking(producer):
    producer.save(*range(POOL_BLOCKS))
    demoted(producer, 1)
    wait_until(lambda: producer.save(POOL_BLOCKS) == ["vram"], "there is a free slot")


def test_a_location_of_a_demoted_block_is_a_miss_and_the_next_lookup_finds_it_below(
    producer, consumer
):
    producer.save(0)
    (old,) = found_of(consumer, [0])
    assert in_vram(consumer, old)
    producer.save(*range(1, POOL_BLOCKS))
    demoted(producer, 1)
    wait_until(lambda: not in_vram(consumer, old), "it has gone down")
    assert host_bytes(consumer, [old]) == [None]
    (fresh,) = found_of(consumer, [0])
    assert fresh != old
    assert not in_vram(consumer, fresh)
    assert host_bytes(consumer, [fresh]) == [payload_of(0)]


def test_what_is_below_already_is_only_dropped(producer, consumer):
    (slot,) = producer.store.reserve([key_of(0)], BLOCK_BYTES, NAMESPACE)
    slot.buffer[:] = payload_of(0)
    assert producer.store.commit([slot])[0]
    assert producer.save(0) == ["vram"]
    producer.save(*range(1, POOL_BLOCKS))
    counts = producer.pool.demoter.counts
    wait_until(lambda: counts["already_below"] == 1, "it is seen to be below")
    wait_until(lambda: producer.pool.stats()["evicted"] > 0, "it was dropped")
    # The index may have forgotten it with the record of VRAM, until the node looks.
    wait_until(lambda: consumer.reader.search([key_of(0)]).places[0], "it is found below")
    assert bytes(consumer.reader.search([key_of(0)]).places[0].buffer) == payload_of(0)


def test_without_a_node_on_its_host_blocks_go_down_to_another_host(
    redis_server, model_dir, tmp_path_factory
):
    listens = {"options": ("--listen", "127.0.0.1:0"), "environment": {"KVSTORE_SECRET": SECRET}}
    with NodeProcess(redis_server, **listens) as far:
        options = {**far.client_options, "run_dir": tmp_path_factory.mktemp("here")}
        options["security"] = StreamSecurity(secret=SECRET.encode())
        producer = Producer(options, model_dir, 2 * MIB)
        assert producer.save(*range(10)) == ["vram"] * 10
        producer.pool.stop(PATIENCE_S)
        assert producer.pool.demoter.counts["demoted"] == 10
        wait_until(lambda: len(found_of(producer.store, range(10))) == 10, "they are indexed")
        found = found_of(producer.store, range(10))
        assert host_bytes(producer.store, found) == [payload_of(n) for n in range(10)]
        producer.close()


def test_what_host_memory_does_not_take_is_evicted_and_saves_go_on(redis_server, model_dir):
    with NodeThread(redis_server, size_bytes=64 << 10) as small:  # none fits
        producer = Producer(small.client_options, model_dir, 2 * MIB)
        for n in range(POOL_BLOCKS):
            producer.save(n)
        wait_until(lambda: producer.pool.demoter.counts["lost"] > 0, "something was evicted")
        wait_until(lambda: producer.save(99) == ["vram"], "there is a free slot")
        producer.close()


def test_an_orderly_end_takes_blocks_down(node, model_dir, consumer):
    producer = Producer(node.client_options, model_dir, 2 * MIB)
    producer.save(*range(10))
    producer.close(drain_s=PATIENCE_S)
    found = found_of(consumer, range(10))
    assert host_bytes(consumer, found) == [payload_of(n) for n in range(10)]
    assert not list(model_dir.glob("?" * 32)), "its memory was given back"
    assert not NodeDir(node.run_dir, producer.pool.node.config.name).path.exists()


def test_a_device_that_hangs_keeps_what_its_copies_use(node, model_dir, monkeypatch):
    monkeypatch.setattr(demoter, "CUDA_IPC_DRAIN_S", 0.2)
    monkeypatch.setattr(demoter, "IN_DOUBT", [])
    producer = Producer(node.client_options, model_dir, 2 * MIB)
    producer.save(*range(10))
    producer.device.hold.clear()
    producer.pool.demoter._reserve_bytes = 2 * MIB
    producer.pool.demoter.wake()
    wait_until(lambda: not producer.pool.demoter._thread.is_alive(), "the demoter gives up")
    reserved = producer.store.writer.stats()["reserved"]
    assert reserved > 0, "no slot below is given back while it may be written to"
    producer.pool.stop(0.0)
    assert list(model_dir.glob("?" * 32)), "nor is the memory that is read"
    assert demoter.IN_DOUBT, "nor are they given back when nobody has the pool any more"
    producer.device.hold.set()
    producer.stream.close()
    producer.store.close()


def test_a_pool_needs_a_size_and_room(producer, node):
    with pytest.raises(UsageError, match=r"^size_bytes="):
        VramPool(producer.store, producer.device, 100)
    small = ModelCuda(producer.device.directory, capacity_bytes=MIB)
    with pytest.raises(NoSpaceError):
        VramPool(producer.store, small, 4 * MIB, name="another")
    assert not NodeDir(node.run_dir, "another").path.exists()


@pytest.mark.parametrize("seed", range(2))
def test_a_producer_that_is_killed_leaves_right_bytes_or_misses(node, model_dir, consumer, seed):
    """At any point: while it saves, while blocks go down, while they are read."""
    rng = random.Random(seed)
    reports = spawn.Queue()
    child = spawn.Process(
        target=produce, args=(node.client_options, str(model_dir), seed, reports), daemon=True
    )
    child.start()
    hits = {"vram": 0, "below": 0}

    def read(numbers) -> int:
        """How many were there; any that was must be right."""
        found = [(n, f) for n, f in zip(numbers, found_of(consumer, numbers), strict=True) if f]
        here = [in_vram(consumer, f) for _, f in found]
        got = host_bytes(consumer, [f for _, f in found])
        for (n, _), data, vram in zip(found, got, here, strict=True):
            assert data in (None, payload_of(n)), f"seed {seed}: block {n} has other bytes"
            hits["vram" if vram else "below"] += data is not None
        return sum(data is not None for data in got)

    try:
        count = 0
        while count < 2 * POOL_BLOCKS:
            count = reports.get(timeout=PATIENCE_S)
        kill_at = time.monotonic() + rng.random() * 0.5
        while time.monotonic() < kill_at or not hits["vram"]:
            while not reports.empty():
                count = reports.get()  # the latest are those in VRAM
            read([rng.randrange(count - POOL_BLOCKS, count) for _ in range(8)])
            read([rng.randrange(count) for _ in range(8)])
            assert time.monotonic() < kill_at + PATIENCE_S, f"seed {seed}: nothing is in VRAM"
        assert child.is_alive()
        child.kill()
        while child.is_alive():
            read([rng.randrange(count) for _ in range(8)])
        for _ in range(5):
            read(range(count))
        assert hits["below"], f"seed {seed}: nothing had gone down"
        name = f"vram-{child.pid}"
        wait_until(
            lambda: not any(in_vram(consumer, f) for f in found_of(consumer, range(count)) if f),
            "its VRAM is out of reach",
        )
        wait_until(lambda: consumer.nodes.close() or True, "swept")
        assert not NodeDir(node.run_dir, name).path.exists(), "nothing of it is left"
    finally:
        child.kill()
