"""Reading through NIXL into VRAM: real agents in real processes, and the model of a device.

Its memory is a file: what NIXL registers is DRAM, and all else is as on a device."""

import os
import signal
import threading
import time
from contextlib import closing

import pytest
from contract.cuda import get
from contract.transport import MIB, PATIENCE_S, SECURITY, TransportContract
from nixl_places import NixlPlace, needs_nixl
from redis_servers import wait_until

from kvstore.circuit_breaker import Breaker
from kvstore.client.nodes.saving.writer import Writer
from kvstore.cuda.base import DeviceRange
from kvstore.errors import UsageError
from kvstore.limits import NIXL_REQUEST_BYTES_MAX, NIXL_REQUESTS_MAX
from kvstore.protocol.nixl import PROBE_BYTES
from kvstore.segment.layout import Layout
from kvstore.testing.cuda import ModelCuda
from kvstore.transport.base import Read, Wanted
from kvstore.transport.nixl import vram as vram_module
from kvstore.transport.nixl.transport import NixlTransport
from kvstore.transport.stream.transport import CHECKSUM_REASON, StreamTransport

pytestmark = needs_nixl
LONG_S = 60.0
STAGING_BYTES = 32 * MIB


class ToVram:
    """A transport that is asked for blocks in VRAM, and puts those that came there where the
    contract looks for them. It takes note of whatever did not come that way."""

    def __init__(self, real: NixlTransport, device: ModelCuda) -> None:
        self.real, self.device = real, device
        self.staging = device.allocate(STAGING_BYTES)
        self.landed = 0
        """Blocks that arrived in VRAM."""
        self.astray: list[str] = []
        """What is wrong with where blocks came."""
        self._lock = threading.Lock()
        way = real._vram
        self._bring, way.bring = way.bring, self._noted

    def _noted(self, arena, copies):
        """What is brought comes from the memory that the reading process has registered, whole in
        one request's part of it, or is the probe's."""
        for to, source, size_bytes in copies:
            ends = [(to, size_bytes), (source, size_bytes)]
            if size_bytes != PROBE_BYTES:
                part = (source - arena.address) // NIXL_REQUEST_BYTES_MAX
                last = (source + size_bytes - 1 - arena.address) // NIXL_REQUEST_BYTES_MAX
                if not (
                    0 <= part == last < NIXL_REQUESTS_MAX and all(self.owns(*end) for end in ends)
                ):
                    self.astray.append(f"{size_bytes} bytes from {source:#x} to {to:#x}")
        self._bring(arena, copies)

    def owns(self, address: int, size_bytes: int) -> bool:
        """Whether these bytes are of one allocation of the device."""
        with self.device._lock:
            return any(
                start <= address and address + size_bytes <= start + len(memory.map)
                for start, memory in self.device._memory.items()
                if memory.owned
            )

    def __getattr__(self, name):
        return getattr(self.real, name)

    def in_vram(self, wanted):
        """The same, each with room in the staging where there is some."""
        at, asked = self.staging, []
        for one in wanted:
            size_bytes = one.location.length
            if sum(map(len, one.into)) == size_bytes and at + size_bytes <= self.end:
                one = one._replace(vram=DeviceRange(at, size_bytes, 0))
                at += size_bytes
            asked.append(one)
        return asked

    @property
    def end(self) -> int:
        return self.staging + STAGING_BYTES

    def read(self, node, wanted, deadline):
        with self._lock:
            asked = self.in_vram(wanted)
            before = [bytes(b"".join(one.into)) for one in asked]
            there = self.real.to_vram
            outcomes = self.real.read(node, asked, deadline)
            there = there and self.real.to_vram
            for one, outcome, was in zip(asked, outcomes, before, strict=True):
                due = there and one.vram is not None and one.location.checksum != 0
                if due and outcome.read is Read.HIT and not outcome.in_vram:
                    self.astray.append(f"{one.location.length} bytes came to host memory")
                if outcome.in_vram and bytes(b"".join(one.into)) != was:
                    self.astray.append(f"{one.location.length} bytes came to both")
                if outcome.in_vram:
                    self.landed += 1
                    came = memoryview(get(self.device, one.vram.address, one.vram.size_bytes))
                    for piece in one.into:
                        piece[:] = came[: piece.nbytes]
                        came = came[piece.nbytes :]
        return outcomes


class ToVramPlace(NixlPlace):
    """As `NixlPlace`, read by a process with a device; all blocks have checksums."""

    def __init__(self, run_dir, device=None, **config) -> None:
        if device is None:
            (run_dir / "model").mkdir()
            device = ModelCuda(run_dir / "model")
        self.device = device
        super().__init__(run_dir, **config)
        self.writer.close()
        self.writer = Writer(self.nodes, name=None, timeout_s=PATIENCE_S, checksums=True)
        real = NixlTransport(StreamTransport(SECURITY), Layout, self.device)
        self.transport.close()
        # As `VramWay` has them, for who cannot wait for a minute.
        real._vram._tries = Breaker(failures_max=1, retry_after_s=0.2, retry_after_max_s=0.2)
        self.transport = ToVram(real, self.device)
        self.wait_until_ready()

    def comes_to_vram(self) -> bool:
        """Whether blocks arrive there now, or again once it is time to try."""
        return self.transport.ready(self.word) and self.transport.to_vram

    @property
    def reader(self):
        return self.transport.real._reader


PLACE = ToVramPlace


ENDS_AT_ONCE = (
    *("nothing_wanted", "callers_fault", "is_a_miss", "locations_that", "after_close"),
    "changes_under",
)
"""Of the contract's tests, those that read no whole block, or need not."""


class TestToVram(TransportContract):
    """Not only that the bytes are the right ones: whatever was read arrived in VRAM."""

    @pytest.fixture
    def place(self, nixl_place, request):
        nixl_place.wait_until_ready()
        transport = nixl_place.transport
        wait_until(nixl_place.comes_to_vram, transport.why_not_to_vram, LONG_S)
        landed = transport.landed
        yield nixl_place
        assert transport.astray == []
        if not any(name in request.node.name for name in ENDS_AT_ONCE):
            assert transport.landed > landed, "some of it arrived in VRAM"


@pytest.fixture
def place(shared):
    shared.tidy()
    shared.wait_until_ready()
    wait_until(shared.comes_to_vram, "it comes to VRAM", LONG_S)
    return shared


def wanted_in_vram(place, block) -> Wanted:
    size_bytes = block[1].length
    at = DeviceRange(place.transport.staging, size_bytes, 0)
    return Wanted(*block, (memoryview(bytearray(size_bytes)),), at)


def read_once(place, wanted, transport=None):
    transport = transport or place.transport.real
    return transport.read(place.word, [wanted], time.monotonic() + LONG_S)[0]


@pytest.mark.parametrize("size", [1, 4096, NIXL_REQUEST_BYTES_MAX // 16 * 11 + 7])
def test_blocks_arrive_in_vram_and_nowhere_else(place, size):
    payload = os.urandom(size)
    wanted = wanted_in_vram(place, place.save(payload))
    outcome = read_once(place, wanted)
    assert (outcome.read, outcome.in_vram) == (Read.HIT, True)
    assert wanted.into[0] == bytes(size)
    assert get(place.device, wanted.vram.address, size) == payload


def test_a_destination_of_another_size_is_refused(place):
    wanted = wanted_in_vram(place, place.save(b"1" * 1000))
    wrong = wanted._replace(vram=DeviceRange(place.transport.staging, 999, 0))
    with pytest.raises(UsageError, match="vram"):
        read_once(place, wrong)


def test_a_block_without_a_checksum_comes_to_host_memory(place):
    key, location = place.save(b"1" * 1000)
    wanted = wanted_in_vram(place, (key, location._replace(checksum=0)))
    outcome = read_once(place, wanted)
    assert (outcome.read, outcome.in_vram) == (Read.HIT, False)
    assert wanted.into[0] == b"1" * 1000


def test_what_rdma_wrote_is_flushed_before_it_is_copied(tmp_path):
    (tmp_path / "late").mkdir()
    device = ModelCuda(tmp_path / "late")
    device.sees_rdma_late = True
    with closing(ToVramPlace(tmp_path, device)) as place:
        payload = os.urandom(100_000)
        wanted = wanted_in_vram(place, place.save(payload))
        outcome = read_once(place, wanted)
        assert (outcome.read, outcome.in_vram) == (Read.HIT, True)
        assert get(device, wanted.vram.address, len(payload)) == payload


def test_what_comes_wrong_is_a_miss_once_and_comes_to_host_memory_then(own, monkeypatch):
    """Nothing is lost: whose fault it was is not known, and host memory is read as ever."""
    payload = os.urandom(100_000)
    wanted = wanted_in_vram(own, own.save(payload))
    way = own.transport.real._vram
    real = way.bring

    def spoil(arena, copies):
        """As a card that writes elsewhere: what was READ is not there."""
        real(arena, [(to, arena.address + NIXL_REQUEST_BYTES_MAX - n, n) for to, _, n in copies])

    with monkeypatch.context() as patch:
        patch.setattr(way, "bring", spoil)
        outcome = read_once(own, wanted)
    assert (outcome.read, outcome.reason) == (Read.MISS, CHECKSUM_REASON)
    way._tries.probe_at += LONG_S
    again = read_once(own, wanted)
    assert (again.read, again.in_vram) == (Read.HIT, False)
    assert wanted.into[0] == payload


def test_one_damaged_block_does_not_end_it_for_as_long_as_the_process_lives(own):
    """Its node's memory may be at fault: the device is tried again, by the process that reads."""
    payload = os.urandom(100_000)
    key, location = own.save(payload)
    wanted = wanted_in_vram(own, (key, location._replace(checksum=location.checksum ^ 1)))
    process = own.reader.pid
    assert own.transport.to_vram
    assert read_once(own, wanted).reason == CHECKSUM_REASON
    assert not own.transport.to_vram
    wait_until(own.comes_to_vram, "the device is tried again", LONG_S)
    assert own.reader.pid == process
    outcome = read_once(own, wanted_in_vram(own, (key, location)))
    assert (outcome.read, outcome.in_vram) == (Read.HIT, True)


def test_a_device_that_refuses_fails_the_read_and_host_memory_is_read_then(own):
    wanted = wanted_in_vram(own, own.save(b"1" * 100_000))
    assert own.transport.to_vram
    own.device.broken = True
    assert read_once(own, wanted).read is Read.FAILED
    again = read_once(own, wanted)
    assert (again.read, again.in_vram) == (Read.HIT, False)
    own.device.broken = False


def test_a_process_killed_in_the_middle_writes_nothing_and_its_arena_is_given_back(own):
    """What is READ goes to the arena alone: the caller's memory has whole blocks or nothing."""
    payload = os.urandom(10 * MIB)
    wanted = wanted_in_vram(own, own.save(payload))
    transport, reader = own.transport.real, own.reader
    os.kill(reader.pid, signal.SIGSTOP)
    ended: list = []
    thread = threading.Thread(target=lambda: ended.append(read_once(own, wanted)))
    thread.start()
    wait_until(lambda: reader._due, "the READ is asked for", LONG_S)
    os.kill(reader.pid, signal.SIGKILL)
    thread.join(LONG_S)
    assert ended[0].read is Read.FAILED
    assert get(own.device, wanted.vram.address, len(payload)) == bytes(len(payload))
    with pytest.raises(UsageError, match="allocate"):
        wait_until(lambda: own.device.export(reader.vram.address) and False, "it is free", LONG_S)
    own.wait_until_ready()
    wait_until(lambda: transport.to_vram, "another process brings it to VRAM", LONG_S)
    outcome = read_once(own, wanted)
    assert (outcome.read, outcome.in_vram) == (Read.HIT, True)
    assert get(own.device, wanted.vram.address, len(payload)) == payload


@pytest.mark.parametrize("trouble", ["full", "unregistered"])
def test_without_an_arena_blocks_come_to_host_memory(tmp_path, monkeypatch, caplog, trouble):
    (tmp_path / "small").mkdir()
    arena_bytes = NIXL_REQUESTS_MAX * NIXL_REQUEST_BYTES_MAX
    room = STAGING_BYTES + (arena_bytes - 1 if trouble == "full" else arena_bytes)
    device = ModelCuda(tmp_path / "small", capacity_bytes=room)
    if trouble == "unregistered":
        # The descriptor of no file: a driver is asked, which is not here.
        ends = os.pipe()
        monkeypatch.setattr(vram_module.VramArena, "fd", property(lambda arena: ends[0]))
        real = vram_module.VramArena.arguments
        monkeypatch.setattr(
            vram_module.VramArena, "arguments", lambda arena: [str(ends[0]), *real(arena)[1:]]
        )
    with closing(ToVramPlace(tmp_path, device)) as place:
        assert not place.transport.to_vram
        assert (
            "no room" if trouble == "full" else "DeviceError"
        ) in place.transport.why_not_to_vram
        wanted = wanted_in_vram(place, place.save(b"1" * 1000))
        outcome = read_once(place, wanted)
        assert (outcome.read, outcome.in_vram) == (Read.HIT, False)
        assert wanted.into[0] == b"1" * 1000
        if trouble == "unregistered":
            wait_until(lambda: device.free_bytes == arena_bytes, "it is given back", LONG_S)
