"""Blocks in VRAM with `verify="always"`: saved with their checksums, read only with the right
bytes, and checked when they go down."""

import time
from contextlib import suppress

import pytest
import xxhash
from contract.cuda import get, put
from redis_servers import wait_until
from test_vram_saver import Engine, Owner
from vram_producer import (
    BLOCK_BYTES,
    PATIENCE_S,
    Producer,
    demoted,
    found_of,
    host_bytes,
    key_of,
    payload_of,
)

from kvstore import MissReason
from kvstore.cuda.base import DeviceRange
from kvstore.errors import DeadlineError
from kvstore.protocol.control import Op
from kvstore.record import unpack_record
from kvstore.spi import BlockSession
from kvstore.transport.base import Read
from kvstore.transport.cuda_ipc import WantedAnywhere
from kvstore.types import EXISTS, STORED

MIB = 1 << 20
ROUNDS = 100


@pytest.fixture
def careful(node):
    return {**node.client_options, "verify": "always"}


@pytest.fixture
def producer(careful, model_dir):
    producer = Producer(careful, model_dir, 2 * MIB)
    yield producer
    producer.close()


@pytest.fixture
def consumer(careful, device):
    session = BlockSession(**careful, device=device)
    yield session
    session.close()


def location_of(session, number):
    (found,) = found_of(session, [number])
    return unpack_record(found.key, found.record)


def spoil(producer, number):
    """Change one byte of the block in place, as nobody may."""
    location = location_of(producer.store, number)
    at = producer.pool.node.address + location.slot * 4096 + 1000
    byte = get(producer.device, at, 1)
    put(producer.device, at, bytes([byte[0] ^ 1]))


def copied(session, found, pieces):
    """Whether the block was read into `pieces` of the device."""
    location, vram = unpack_record(found.key, found.record), session.remote.vram
    announcement = vram.node(location.node_id, location.epoch, time.monotonic())
    wanted = [WantedAnywhere(found.key, location, pieces)]
    (outcome,) = vram.read(announcement, wanted, time.monotonic() + PATIENCE_S)
    return outcome.read is Read.HIT


def device_bytes(session, device, number):
    """The block in place, and copied to memory of the device; None for a miss."""
    (found,) = found_of(session, [number])
    if found is None:
        return None, None
    view = session.device_view(found)
    in_place = None if view is None else get(device, view.memory.address, BLOCK_BYTES)
    if view is not None:
        assert view.valid()
        view.close()
    at = device.allocate(BLOCK_BYTES)
    pieces = [DeviceRange(at, 1000, 0), DeviceRange(at + 1000, BLOCK_BYTES - 1000, 0)]
    arrived = get(device, at, BLOCK_BYTES) if copied(session, found, pieces) else None
    device.free(at)
    return in_place, arrived


def test_a_block_has_the_checksum_of_its_bytes_and_is_read_every_way(producer, consumer, device):
    assert producer.save(0, 1) == ["vram", "vram"]
    for number in (0, 1):
        right = xxhash.xxh3_64_intdigest(payload_of(number))
        assert location_of(consumer, number).checksum == right
        assert device_bytes(consumer, device, number) == (payload_of(number),) * 2
    assert host_bytes(consumer, found_of(consumer, [0, 1])) == [payload_of(0), payload_of(1)]


@pytest.mark.parametrize("way", ["in place", "copied", "host"])
def test_a_block_with_other_bytes_is_a_miss_and_its_node_drops_it(producer, consumer, device, way):
    producer.save(0, 1)
    spoil(producer, 0)
    found = found_of(consumer, [0])
    if way == "in place":
        assert consumer.device_view(found[0]) is None
    elif way == "copied":
        at = device.allocate(BLOCK_BYTES)
        assert not copied(consumer, found[0], [DeviceRange(at, BLOCK_BYTES, 0)])
    else:
        assert host_bytes(consumer, found) == [None]
    assert consumer.remote.vram.counts["cuda_ipc_checksum"] == 1
    wait_until(lambda: found_of(consumer, [0]) == [None], "the node has looked, and dropped it")
    assert device_bytes(consumer, device, 1) == (payload_of(1),) * 2


def test_a_block_without_a_checksum_is_a_miss_for_who_verifies(node, model_dir, consumer, device):
    careless = Producer(node.client_options, model_dir, 2 * MIB)
    assert careless.save(0) == ["vram"]
    assert found_of(consumer, [0]) == [None]
    assert consumer.match([key_of(0)]).short is MissReason.UNREADABLE_NO_CHECKSUM
    assert consumer.remote.vram.counts["cuda_ipc_checksum"] == 0, "nobody's fault"
    careless.close()


def test_blocks_go_down_with_their_checksums_and_damaged_ones_are_dropped(producer, consumer):
    producer.save(0, 1)
    spoil(producer, 0)
    producer.pool.stop(PATIENCE_S)
    demoted(producer, 1)
    counts = producer.pool.demoter.counts
    assert (counts["demoted"], counts["lost"]) == (1, 1)
    wait_until(lambda: found_of(consumer, [0]) == [None], "it is nowhere")
    assert host_bytes(consumer, found_of(consumer, [1])) == [payload_of(1)]
    assert location_of(consumer, 1).checksum == xxhash.xxh3_64_intdigest(payload_of(1))


def test_an_engine_saves_checksums_to_the_node_that_owns_vram(node, careful, model_dir, consumer):
    owner = Owner(node, model_dir)
    engine = Engine(careful, model_dir)
    engine.save(3)
    assert location_of(consumer, 3).checksum == xxhash.xxh3_64_intdigest(payload_of(3))
    assert engine.read(3) == [payload_of(3)]
    engine.close()
    owner.kill()


def test_what_was_saved_there_without_checksums_is_saved_anew_once_by_who_verifies(
    node, careful, model_dir, consumer
):
    owner = Owner(node, model_dir)
    never, always = Engine(node.client_options, model_dir), Engine(careful, model_dir)
    never.save(1, 2, 3)
    assert found_of(consumer, [1, 2, 3]) == [None] * 3
    always.save(1, 2)
    stored = {never: 0, always: 0}
    for _ in range(ROUNDS):
        for engine in (always, never):
            granted = [a for a in engine.reserve(1, 2, 3) if a != EXISTS]
            engine.fill(granted, *[3] * len(granted))
            stored[engine] += engine.store.commit(granted).count(STORED)
    assert stored == {never: 0, always: 1}
    payloads = [payload_of(n) for n in (1, 2, 3)]
    assert always.read(1, 2, 3) == never.read(1, 2, 3) == payloads
    assert host_bytes(consumer, found_of(consumer, [1, 2, 3])) == payloads
    for engine in (never, always):
        engine.close()
    owner.kill()


@pytest.mark.parametrize("failing", [Op.PIN, Op.UNPIN, Op.DROP])
@pytest.mark.parametrize("error", [KeyboardInterrupt, DeadlineError])
def test_who_is_interrupted_while_it_replaces_holds_nothing(
    node, careful, model_dir, monkeypatch, failing, error
):
    owner = Producer(node.client_options, model_dir, 2 * MIB, name="vram-0", takes_saves=True)
    never, always = Engine(node.client_options, model_dir), Engine(careful, model_dir)
    never.save(1)
    control = always.saver._writer.linked.control
    post, collect, asked = control.post, control.collect, {}

    def noted(op, *args, **options):
        ticket = post(op, *args, **options)
        asked[id(ticket)] = op
        return ticket

    def fails_after(ticket):
        answer = collect(ticket)
        if asked[id(ticket)] is failing:
            raise error
        return answer

    granted = []
    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(control, "post", noted)
        patched.setattr(control, "collect", fails_after)
        granted = always.reserve(2, 1)
    unpinned_late = (failing, error) == (Op.UNPIN, DeadlineError)
    assert any(granted) == unpinned_late, "what is not said of a pin now is said later"
    always.store.abort(granted)
    always.save(2, 3)
    counters = owner.pool.stats()
    assert (counters["pinned"], counters["reserved"]) == (0, 0)
    always.save(1)
    for one in (never, always, owner):
        one.close()


def test_a_device_that_cannot_be_looked_at_saves_nothing(producer, consumer, monkeypatch):
    from kvstore.cuda import checksum

    monkeypatch.setattr(checksum, "CUDA_IPC_DRAIN_S", 0.05)
    (granted,) = producer.pool.reserve([key_of(5)], BLOCK_BYTES, 7)
    producer.device.hold.clear()
    (result,) = producer.pool.commit([granted])
    producer.device.hold.set()
    assert not result
    assert "hang" in result.reason
    time.sleep(0.05)
    assert found_of(consumer, [5]) == [None]


def test_what_was_read_out_of_vram_is_counted_by_its_transport(producer, consumer):
    producer.save(0, 1)
    assert consumer.read_bytes()["cuda_ipc"] == 0
    assert host_bytes(consumer, found_of(consumer, [0, 1])) == [payload_of(0), payload_of(1)]
    assert consumer.read_bytes()["cuda_ipc"] == 2 * BLOCK_BYTES
