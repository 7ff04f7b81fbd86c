"""Reading VRAM of another host over NVLink: the model of a device, whose domain is a directory."""

import threading
import time

import pytest
import xxhash
from contract.cuda import get
from contract.transport import PATIENCE_S, SECURITY, TransportContract, far, reads, room
from redis_servers import wait_until
from vram_parts import StreamedVram, VramWriter

from kvstore.core.events import Commit
from kvstore.cuda.base import FABRIC_HANDLE_BYTES, DeviceRange
from kvstore.errors import UsageError
from kvstore.node import NodeConfig
from kvstore.protocol.fabric import HANDLE_BYTES, NAME_BYTES, FabricMemory
from kvstore.segment.layout import Layout
from kvstore.testing.cuda import ModelCuda
from kvstore.transport import cuda_fabric, cuda_memory, proving
from kvstore.transport.base import Read, Wanted
from kvstore.transport.cuda_fabric import NAME, FabricTransport
from kvstore.transport.cuda_memory import DeviceAddress


class CheckedWriter(VramWriter):
    """Saves with checksums, without which nothing is read over NVLink."""

    def fill(self, offset: int, payload: bytes) -> None:
        super().fill(offset, payload)
        self.checksum = xxhash.xxh3_64_intdigest(payload)

    def commit(self, slot, generation):
        return self.ask(Commit(0, 0, [(slot, generation, self.checksum)]))


class FabricPlace(StreamedVram):
    """A node in VRAM, and a reader whose device is on another host."""

    def __init__(self, run_dir, *, ours="domain", theirs="domain", **config) -> None:
        hosts = []
        for host, domain in (("theirs", theirs), ("ours", ours)):
            (run_dir / host).mkdir()
            (run_dir / domain).mkdir(exist_ok=True)
            hosts.append(ModelCuda(run_dir / host, uuid=host, fabric=run_dir / domain))
        owner, self.reader = hosts
        super().__init__(run_dir, owner, fabric=True, **config)
        self.word = self.node.announcement  # what the index is told
        self.writer = CheckedWriter(self.node, owner)
        self.stream = self.transport
        self.transport = FabricTransport(self.stream, Layout, self.reader)

    def close(self) -> None:
        self.reader.hold.set()
        self.stream.close()
        super().close()


@pytest.fixture
def place(tmp_path):
    place = FabricPlace(tmp_path)
    yield place
    place.close()


class TestCudaFabric(TransportContract):
    @pytest.fixture
    def place(self, tmp_path):
        place = FabricPlace(tmp_path)
        yield place
        place.close()


def test_the_index_is_told_of_it_and_not_of_the_handle(place):
    address = DeviceAddress.parse(place.word.transports[NAME])
    handle = place.node._memory.shared.fabric
    assert address == DeviceAddress("theirs", place.node._memory.shared.name)
    assert len(handle) == FABRIC_HANDLE_BYTES == HANDLE_BYTES
    assert len(address.name) == NAME_BYTES
    assert handle.hex() not in str(place.word)


def test_what_has_a_place_on_the_device_goes_there(place):
    key, location = place.save(b"5" * 100_000)
    memory = DeviceRange(place.reader.allocate(100_000), 100_000, 0)
    host = room(location)
    (outcome,) = place.transport.read(place.word, [Wanted(key, location, (host,), memory)], far())
    assert (outcome.read, outcome.in_vram) == (Read.HIT, True)
    assert get(place.reader, memory.address, 100_000) == b"5" * 100_000
    assert host == bytes(100_000)


def test_a_block_without_a_checksum_is_no_hit(place):
    key, location = place.save(b"5" * 100_000)
    outcomes, _ = place.read((key, location._replace(checksum=0)))
    assert reads(outcomes) == [Read.MISS]


def test_trap_what_arrives_wrong_is_a_miss(place):
    key, location = place.save(b"5" * 100_000)
    (good,), _ = place.read((key, location))
    assert good.read is Read.HIT
    place.reader.loses_reads = True
    outcomes, _ = place.read((key, location))
    assert reads(outcomes) == [Read.MISS]


def test_trap_a_block_that_goes_during_the_copy_is_a_miss(place):
    """Its bytes and its checksum are right; the node says that it was let go."""
    key, location = place.save(b"5" * 100_000)
    assert reads(place.read((key, location))[0]) == [Read.HIT]
    place.reader.hold.clear()
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(reads(place.read((key, location))[0])))
    queued = place.reader.queued
    thread.start()
    wait_until(lambda: place.reader.queued > queued, "its copy is queued", PATIENCE_S)
    place.writer.drop([key])
    place.reader.hold.set()
    thread.join(PATIENCE_S)
    assert seen == [Read.MISS]


def test_trap_reads_that_are_lost_are_noticed_before_the_first_block(tmp_path):
    place = FabricPlace(tmp_path)
    place.reader.loses_reads = True
    (outcome,), _ = place.read(place.save(b"5" * 100_000))
    assert outcome.read is Read.FAILED
    assert "lost" in outcome.reason
    assert not place.transport.ready(place.word)
    assert place.reader.mapped == 0
    place.close()


def test_memory_of_another_domain_is_not_opened_and_soon_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(proving, "RETRY_AFTER_S", 0.05)
    place = FabricPlace(tmp_path, theirs="other")
    block = place.save(b"5" * 100_000)
    (outcome,), _ = place.read(block)
    assert outcome.read is Read.FAILED
    assert "cuMemImportFromShareableHandle" in outcome.reason
    place.reader.fabric = place.device.fabric
    wait_until(lambda: place.transport.ready(place.word), "it was tried again", PATIENCE_S)
    assert reads(place.read(block)[0]) == [Read.HIT]
    place.close()


def test_a_probe_is_read_again_every_minute(place, monkeypatch):
    block = place.save(b"5" * 100_000)
    assert reads(place.read(block)[0]) == [Read.HIT]
    monkeypatch.setattr(cuda_memory, "PROBE_EVERY_S", 0.0)
    place.reader.loses_reads = True
    assert reads(place.read(block)[0]) == [Read.FAILED]


@pytest.mark.parametrize(
    "lie",
    [
        {"size_bytes": 1 << 20},
        {"name": bytes(NAME_BYTES)},
        {"handle": bytes(HANDLE_BYTES)},
        None,
    ],
    ids=str,
)
def test_a_node_that_lies_about_its_memory_is_left_alone(place, monkeypatch, lie):
    real = place.node._fabric()
    said = None if lie is None else real._replace(**lie)
    monkeypatch.setattr(cuda_fabric, "fabric_memory", lambda *_: said)
    assert reads(place.read(place.save(b"5" * 100_000))[0]) == [Read.FAILED]
    assert place.reader.mapped == 0


def test_memory_of_a_node_that_has_ended_is_let_go(place):
    assert reads(place.read(place.save(b"5" * 100_000))[0]) == [Read.HIT]
    assert place.reader.mapped == 1
    place.transport.sweep()
    assert place.reader.mapped == 1
    place.node.stop()

    def let_go() -> bool:
        place.transport.sweep()
        return place.reader.mapped == 0

    wait_until(let_go, "nothing of it is open", PATIENCE_S)


def test_a_read_that_had_no_time_says_nothing_of_its_node(place):
    block = place.save(b"5" * 100_000)
    assert reads(place.read(block)[0]) == [Read.HIT]
    assert reads(place.read(block, timeout_s=1e-3)[0]) == [Read.FAILED]
    assert place.transport.ready(place.word)


def test_a_node_that_is_asked_and_does_not_answer_fails_the_read(place, monkeypatch):
    block = place.save(b"5" * 100_000)
    assert reads(place.read(block)[0]) == [Read.HIT]
    place.node._stream.stop()
    began = time.monotonic()
    assert reads(place.read(block, timeout_s=5.0)[0]) == [Read.FAILED]
    assert time.monotonic() - began < PATIENCE_S


def test_a_device_without_handles_serves_streams_and_says_so(tmp_path, caplog):
    (tmp_path / "model").mkdir()
    place = StreamedVram(tmp_path, ModelCuda(tmp_path / "model"), fabric=True)
    assert NAME not in place.node.announcement.transports
    assert "no fabric handle" in caplog.text
    assert reads(place.read(place.save(b"5" * 100_000))[0]) == [Read.HIT]
    place.close()


def test_only_who_has_a_secret_may_offer_it(tmp_path):
    with pytest.raises(UsageError, match=r"^fabric="):
        NodeConfig(run_dir=tmp_path, fabric=True)
    with pytest.raises(UsageError, match=r"^fabric="):
        NodeConfig(run_dir=tmp_path, fabric=True, security=SECURITY)


def test_a_handle_is_given_as_it_is(place):
    found = cuda_fabric.fabric_memory(place.stream, place.word, far())
    assert found == FabricMemory(*place.node._memory.shared[:2], place.node._memory.shared.fabric)
