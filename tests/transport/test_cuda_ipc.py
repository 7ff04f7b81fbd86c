"""Reading from VRAM, over the model of a device whose copies are late."""

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest
from contract.cuda import get, put
from contract.transport import PATIENCE_S, TransportContract, far, reads, room
from each_input import each
from redis_servers import wait_until
from vram_parts import MIB, VramPlace

from kvstore.core.events import Drop
from kvstore.cuda.base import DeviceRange
from kvstore.errors import DeviceError, InternalError, UsageError
from kvstore.testing.cuda import ModelCuda, ModelStream
from kvstore.transport import cuda_ipc, cuda_memory
from kvstore.transport.base import Read, Wanted
from kvstore.transport.cuda_ipc import WantedAnywhere
from kvstore.transport.cuda_memory import DeviceAddress

FDS = Path("/proc/self/fd")


@pytest.fixture
def owner(tmp_path):
    return ModelCuda(tmp_path)


@pytest.fixture
def reader(tmp_path):
    """The same device as another process sees it."""
    return ModelCuda(tmp_path)


@pytest.fixture
def place(tmp_path, owner, reader):
    place = VramPlace(tmp_path, owner, reader)
    yield place
    reader.hold.set()
    place.close()


class TestCudaIpc(TransportContract):
    @pytest.fixture
    def place(self, tmp_path, owner, reader):
        place = VramPlace(tmp_path, owner, reader)
        yield place
        place.close()


def test_a_destination_may_be_memory_of_the_device_in_pieces(place, reader):
    payload = os.urandom(MIB + 5)
    key, location = place.save(payload)
    mine = reader.allocate(2 * MIB)
    host = memoryview(bytearray(5))
    into = [DeviceRange(mine + 100, MIB - 7, 0), DeviceRange(mine, 7, 0), host]
    outcomes = place.transport.read(place.word, [WantedAnywhere(key, location, into)], far())
    assert reads(outcomes) == [Read.HIT]
    got = get(reader, mine, 2 * MIB)
    assert got[100 : 100 + MIB - 7] == payload[: MIB - 7]
    assert got[:7] == payload[MIB - 7 : MIB]
    assert bytes(host) == payload[MIB:]


def test_neighbours_on_both_sides_are_one_copy(place, reader):
    payloads = [os.urandom(MIB) for _ in range(4)]
    blocks = [place.save(payload) for payload in payloads]
    mine = reader.allocate(4 * MIB)
    look(place)
    queued = reader.queued
    order = [0, 1, 3, 2]  # 0 and 1 follow each other here as they do there
    wanted = [
        WantedAnywhere(*blocks[n], [DeviceRange(mine + i * MIB, MIB, 0)])
        for i, n in enumerate(order)
    ]
    assert reads(place.transport.read(place.word, wanted, far())) == [Read.HIT] * 4
    assert reader.queued - queued == 3
    assert get(reader, mine, 4 * MIB) == b"".join(payloads[n] for n in order)


def test_pieces_on_the_device_must_be_as_long_as_the_block(place):
    key, location = place.save(b"1" * 100)
    wanted = [WantedAnywhere(key, location, [DeviceRange(4096, 99, 0)])]
    with pytest.raises(UsageError, match=r"^into="):
        place.transport.read(place.word, wanted, far())


def look(place):
    """Open its memory, which takes a copy of what everybody knows."""
    place.transport.memory.done_with(place.transport.memory.use(place.word))


def test_trap_reads_that_are_lost_are_no_hits(tmp_path, owner, reader, monkeypatch):
    """The driver says that there is peer access; what is read stays as it was."""
    place = VramPlace(tmp_path, owner, reader)
    key, location = place.save(b"1" * MIB)
    into = room(location)
    reader.loses_reads = True
    monkeypatch.setattr(cuda_memory, "PROBE_EVERY_S", 0.0)
    (outcome,) = place.transport.read(place.word, [Wanted(key, location, (into,))], far())
    assert outcome.read is Read.FAILED, "it was open: it is looked at now and then"
    assert "lost" in outcome.reason
    (outcome,) = place.transport.read(place.word, [Wanted(key, location, (into,))], far())
    assert outcome.read is Read.FAILED, "and when it is opened"
    assert reader.mapped == 0
    with pytest.raises(DeviceError, match="lost"):
        place.transport.memory.view(place.word, key, location)
    reader.loses_reads = False
    assert reads(place.transport.read(place.word, [Wanted(key, location, (into,))], far())) == [
        Read.HIT
    ]
    assert bytes(into) == b"1" * MIB
    place.close()


@pytest.fixture
def start(place, reader):
    """Begins a read in another thread, and waits until it has queued its first copies."""
    look(place)
    with ThreadPoolExecutor(2) as pool:

        def start(wanted, deadline_s=PATIENCE_S, copies=1):
            before = reader.queued
            deadline = time.monotonic() + deadline_s
            reading = pool.submit(place.transport.read, place.word, wanted, deadline)
            wait_until(lambda: reader.queued >= before + copies, "the copies are queued")
            return reading

        yield start
        reader.hold.set()


def under_way(reading):
    return not wait([reading], 0.3).done


def test_a_block_that_goes_while_its_copy_is_queued_is_a_miss(place, reader, start):
    """The check comes after the event, not after the copy was queued."""
    key, location = place.save(b"1" * MIB)
    reader.hold.clear()
    into = room(location)
    reading = start([Wanted(key, location, (into,))])
    place.writer.drop([key])
    other = place.save(b"2" * MIB)
    assert other[1].slot == location.slot
    assert not reading.done()
    reader.hold.set()
    assert reads(reading.result()) == [Read.MISS]
    assert bytes(into) == b"2" * MIB, "the copy was made when the slot was another block's"


def test_a_deadline_ends_a_read_only_when_what_is_queued_is_done(place, reader, start):
    key, location = place.save(b"1" * MIB)
    reader.hold.clear()
    into = room(location)
    reading = start([Wanted(key, location, (into,))], deadline_s=1.0)
    time.sleep(1.0)
    assert under_way(reading), "the destination may still be written to"
    reader.hold.set()
    assert reads(reading.result()) == [Read.HIT]
    assert bytes(into) == b"1" * MIB, "what was under way has been carried out"


def test_after_the_deadline_nothing_more_is_queued(place, reader, start, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "CUDA_IPC_WINDOW_BYTES", MIB)
    blocks = [place.save(bytes([i]) * MIB) for i in range(6)]
    reader.hold.clear()
    wanted = [Wanted(key, location, (room(location),)) for key, location in blocks]
    queued = reader.queued
    reading = start(wanted, deadline_s=1.0, copies=cuda_ipc.WINDOWS)
    time.sleep(1.0)
    reader.hold.set()
    assert reads(reading.result()) == [Read.HIT] * 2 + [Read.FAILED] * 4
    assert reader.queued - queued == cuda_ipc.WINDOWS


def test_after_close_nothing_more_is_queued(place, reader, start, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "CUDA_IPC_WINDOW_BYTES", MIB)
    blocks = [place.save(bytes([i]) * MIB) for i in range(6)]
    reader.hold.clear()
    wanted = [Wanted(key, location, (room(location),)) for key, location in blocks]
    queued = reader.queued
    reading = start(wanted, copies=cuda_ipc.WINDOWS)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(place.transport.close)
        assert under_way(closing), "copies into the destination are queued"
        reader.hold.set()
        closing.result()
    assert reads(reading.result()) == [Read.HIT] * 2 + [Read.FAILED] * 4
    assert reader.queued - queued == cuda_ipc.WINDOWS
    assert reader.mapped == 0


def test_a_read_that_is_interrupted_ends_when_what_is_queued_is_done(place, reader, monkeypatch):
    look(place)
    block = place.save(b"1" * MIB)
    into = room(block[1])
    reader.hold.clear()

    def interrupted(event, deadline):
        monkeypatch.undo()
        threading.Timer(0.1, reader.hold.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(cuda_ipc, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place.transport.read(place.word, [Wanted(*block, (into,))], far())
    assert bytes(into) == b"1" * MIB, "nobody writes there any more"
    place.node.stop()
    place.vram.sweep()
    assert reader.mapped == 0


def test_a_device_that_hangs_is_no_failed_read_but_an_error(place, reader, monkeypatch):
    """Nobody may think that the destination is free."""
    look(place)
    monkeypatch.setattr(cuda_ipc, "CUDA_IPC_DRAIN_S", 0.1)
    key, location = place.save(b"1" * MIB)
    reader.hold.clear()
    into = room(location)
    with pytest.raises(InternalError, match="hang"):
        place.transport.read(place.word, [Wanted(key, location, (into,))], time.monotonic() + 0.1)
    place.transport.close()
    assert reader.mapped == 1, "the copies are still queued"
    reader.hold.set()
    wait_until(lambda: bytes(into) == b"1" * MIB, "they are carried out")
    place.transport.close()
    assert reader.mapped == 0


def test_a_device_that_fails_fails_the_read(place, reader):
    block = place.save(b"1" * MIB)
    reader.broken = True
    assert reads(place.read(block)[0]) == [Read.FAILED]


def test_a_copy_that_is_refused_fails_when_those_before_it_are_done(place, reader, start):
    one, other = place.save(b"1" * MIB), place.save(b"2" * MIB)
    reader.hold.clear()
    into = room(one[1])
    wanted = [Wanted(*one, (into,)), WantedAnywhere(*other, [DeviceRange(8, MIB, 0)])]
    reading = start(wanted)
    assert under_way(reading), "the first may still be written to"
    reader.hold.set()
    assert reads(reading.result()) == [Read.FAILED] * 2
    assert bytes(into) == b"1" * MIB
    assert reads(place.read(one)[0]) == [Read.HIT]


def test_memory_is_opened_once_and_closed_when_its_node_has_ended(place, reader):
    blocks = [place.save(os.urandom(1000)) for _ in range(3)]
    for block in blocks:
        place.read(block)
    assert reader.mapped == 1
    place.node.stop()
    place.vram.sweep()
    assert reader.mapped == 0


def test_memory_in_use_outlives_its_node_until_the_read_has_ended(place, reader, start):
    key, location = place.save(b"1" * MIB)
    reader.hold.clear()
    into = room(location)
    reading = start([Wanted(key, location, (into,))])
    place.node.stop()
    place.vram.sweep()
    place.node.free()
    assert reader.mapped == 1, "it stays for who has it open"
    reader.hold.set()
    assert reads(reading.result()) == [Read.MISS]
    assert bytes(into) == b"1" * MIB
    assert reader.mapped == 0


def test_at_the_end_the_memory_is_given_back(tmp_path, owner, reader):
    place = VramPlace(tmp_path, owner, reader)
    place.read(place.save(b"1" * MIB))
    place.vram.close()
    place.node.stop()
    place.node.free()
    assert not list(tmp_path.glob("?" * 32)), "the model's memory"
    place.writer.stream.close()


def test_only_so_many_nodes_are_open_at_once(tmp_path, owner, reader, monkeypatch):
    monkeypatch.setattr(cuda_memory, "CUDA_IPC_NODES_MAX", 1)
    places = [VramPlace(tmp_path, owner, reader, name=f"n{i}") for i in range(2)]
    blocks = [place.save(bytes([i]) * MIB) for i, place in enumerate(places)]
    transport = places[0].transport
    for _ in range(2):
        for i, place in enumerate(places):
            wanted = [Wanted(*blocks[i], (room(blocks[i][1]),))]
            assert reads(transport.read(place.word, wanted, far())) == [Read.HIT]
            assert bytes(wanted[0].into[0]) == bytes([i]) * MIB
            assert reader.mapped == 1
    reader.hold.clear()
    queued = reader.queued
    one, other = ([Wanted(*block, (room(block[1]),))] for block in blocks)
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(transport.read, places[1].word, other, far())
        wait_until(lambda: reader.queued > queued, "its copy is queued")
        assert reads(transport.read(places[0].word, one, far())) == [Read.FAILED]
        reader.hold.set()
        assert reads(busy.result()) == [Read.HIT]
    for place in places:
        place.close()


def test_a_device_without_peer_access_reads_nothing(tmp_path, owner):
    place = VramPlace(tmp_path, owner, ModelCuda(tmp_path, uuid="other", unreachable=["model-0"]))
    block = place.save(b"1" * 100)
    assert reads(place.read(block)[0]) == [Read.FAILED]
    assert place.vram.node(place.word.node_id, place.word.epoch, time.monotonic()) is None
    place.close()


@each("text", ["", "uuid", "uuid/", "uuid/zz", "uuid/" + "00" * 15, "/" + "00" * 16])
def test_what_is_no_address_is_none(text):
    assert DeviceAddress.parse(text) is None


def test_an_address_says_what_it_was_made_of():
    address = DeviceAddress("a/b", bytes(range(16)))
    assert DeviceAddress.parse(str(address)) == address


def test_nobody_but_the_owner_writes(place, tmp_path):
    from kvstore.client.nodes.saving.link import Grants
    from kvstore.client.nodes.saving.writer import Writer
    from kvstore.errors import KVStoreError
    from kvstore.protocol.control_requests import Wants

    writer = Writer(place.nodes, name="node", timeout_s=PATIENCE_S, checksums=False)
    with pytest.raises(KVStoreError):
        writer.link().reserve_later(Wants([b"k" * 32], 100, values=[b"1" * 100]), 7, Grants())()
    writer.close()
    assert place.writer.ask(Drop(0, 0, [b"k" * 32])) == [False]


def test_a_node_that_hands_nothing_over_fails_the_read_by_its_deadline(place, reader):
    block = place.save(b"1" * MIB)
    wanted = [Wanted(*block, (room(block[1]),))]
    loop, listener = place.node._loop, place.node._vram_listener
    loop.call_soon_threadsafe(loop.remove_reader, listener)
    began = time.monotonic()
    outcomes = place.transport.read(place.word, wanted, began + 0.2)
    assert reads(outcomes) == [Read.FAILED]
    assert "hand its memory over" in outcomes[0].reason
    assert time.monotonic() - began < PATIENCE_S / 4
    loop.call_soon_threadsafe(place.node._watch)
    assert reads(place.transport.read(place.word, wanted, far())) == [Read.HIT]


def test_memory_of_another_start_is_not_taken_for_that_one(place, reader):
    block = place.save(b"1" * MIB)
    former = replace(place.word, transports={"cuda_ipc": str(DeviceAddress("model-0", bytes(16)))})
    wanted = [Wanted(*block, (room(block[1]),))]
    open_before = len(list(FDS.iterdir()))
    outcomes = place.transport.read(former, wanted, far())
    assert reads(outcomes) == [Read.FAILED]
    assert "started anew" in outcomes[0].reason
    assert reader.mapped == 0
    # The node of this process opens files of its own now and then.
    wait_until(lambda: len(list(FDS.iterdir())) <= open_before, "no descriptor is left")


def test_reading_others_memory_cannot_change_it(place, reader):
    key, location = place.save(b"1" * MIB)
    with place.transport.memory.view(place.word, key, location) as view, pytest.raises(DeviceError):
        put(reader, view.memory.address, b"2")
    assert reads(place.read((key, location))[0]) == [Read.HIT]


def test_an_address_says_whether_others_may_save_there():
    for address in (DeviceAddress("a/b", bytes(16), True), DeviceAddress("a/b", bytes(16))):
        assert DeviceAddress.parse(str(address)) == address


def test_a_view_may_be_forgotten_while_memory_is_opened(place, reader, monkeypatch):
    """The garbage collector runs wherever something is made, so inside the lock too."""
    key, location = place.save(b"x" * 100)
    memory = place.transport.memory
    ring = [memory.view(place.word, key, location)]
    ring.append(ring)
    del ring
    monkeypatch.setattr(cuda_memory, "PROBE_EVERY_S", 0.0)
    monkeypatch.setattr(cuda_memory, "read_probe", lambda *_: gc.collect())
    asking = threading.Thread(target=memory.view, args=(place.word, key, location), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert not asking.is_alive(), "it waits for itself"
    monkeypatch.undo()
    opened = memory.use(place.word)
    assert opened.users == 1, "and nobody else's"
    memory.done_with(opened)


def test_a_stream_that_cannot_be_given_back_keeps_nothing_else(place, monkeypatch):
    """As when the context of the device is lost."""
    payload = os.urandom(100)
    key, location = place.save(payload)
    wanted = Wanted(key, location, (room(location),))
    assert reads(place.transport.read(place.word, [wanted], far())) == [Read.HIT]

    def lost(_):
        raise DeviceError("the context is lost")

    monkeypatch.setattr(ModelStream, "close", lost)
    place.transport.close()
    assert place.transport.memory.starts() == frozenset()
