"""A segment in VRAM over the model of a device: what is there, who sees it, and what is left."""

import shutil
from pathlib import Path

import pytest
import xxhash
from contract.cuda import get, put

from kvstore.core.events import Seal
from kvstore.cuda.probe import PROBE_BYTES, probe_of
from kvstore.errors import DeviceError, NoSpaceError
from kvstore.segment import cuda
from kvstore.segment.cuda import AttachedCuda, OwnedCuda, ServedCuda
from kvstore.segment.header import HEADER_BYTES, Superblock, unpack
from kvstore.testing.cuda import ModelCuda

BLOCK = Superblock(7, 3, 0, 128 << 10)
KEY = bytes(range(32))
LATE_S = 0.02


@pytest.fixture
def device(tmp_path):
    directory = tmp_path / "device"
    directory.mkdir()
    return ModelCuda(directory, late_s=LATE_S, capacity_bytes=1 << 60)


@pytest.fixture
def base(tmp_path):
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm" / "segment"


@pytest.fixture
def owned(base, device):
    segment = OwnedCuda(base, BLOCK, device)
    yield segment
    segment.close()
    if any(device.directory.iterdir()):
        segment.free()


@pytest.fixture
def served(owned, device):
    segment = ServedCuda(owned.head_path, device, owned.shared)
    yield segment
    device.hold.set()
    segment.close()


def open_files(directory):
    """Descriptors of this process for files there, those of mappings and of removed ones too."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(fd.readlink()))
        except FileNotFoundError:
            continue
    return sum(link.startswith(str(directory)) for link in links)


def test_its_payload_ends_with_its_probe_and_the_file_in_its_place_is_empty(owned, device):
    at = owned.address + BLOCK.size_bytes
    assert owned.shared.size_bytes == BLOCK.size_bytes + PROBE_BYTES
    assert get(device, at, PROBE_BYTES) == probe_of(owned.shared.name)
    there = owned.data_path.stat()
    assert (there.st_size, there.st_mode & 0o777) == (0, 0o600)


def test_without_room_for_its_headers_nothing_of_the_device_is_taken(base, device):
    with pytest.raises(NoSpaceError, match=r"asked for, \d+ free"):
        OwnedCuda(base, Superblock(7, 3, 0, 1 << 48), device)
    assert list(device.directory.iterdir()) == []


@pytest.mark.parametrize("suffix", [".head", ".data"])
def test_where_another_has_its_name_nothing_is_left_of_it(base, device, suffix):
    there = base.with_suffix(suffix)
    there.write_bytes(b"another's")
    with pytest.raises(FileExistsError) as refused:
        OwnedCuda(base, BLOCK, device)
    assert refused.tb, "what it holds is held still, unless it was given back"
    assert list(base.parent.iterdir()) == [there]
    assert list(device.directory.iterdir()) == []
    assert open_files(device.directory) == 0


def test_a_checksum_is_of_the_bytes_in_place(owned, device):
    put(device, owned.address + 8192, b"payload")
    assert owned.checksum(8192, 7) == xxhash.xxh3_64_intdigest(b"payload")


def test_the_checksum_of_what_cannot_be_read_is_0(owned, device):
    device.broken = True
    assert owned.checksum(0, 7) == 0
    device.broken = False


def test_close_makes_every_block_a_miss_for_who_has_the_headers_mapped(base, device):
    """Also beyond as many headers as are wiped at once."""
    slots = 2 * cuda.WIPE_BYTES // HEADER_BYTES + 8
    owned = OwnedCuda(base, BLOCK._replace(size_bytes=slots << 12), device)
    marked = (0, 1, slots // 2, slots - 1)
    for slot_id in marked:
        owned.apply(Seal(slot_id, 9, KEY, 7, 0, 1, slot_id, 0, 5))
    reader = AttachedCuda(owned.head_path)
    assert all(unpack(reader.header(slot_id)) for slot_id in marked)
    hints = bytes(reader._hints)
    owned.close()
    assert {reader.header(slot_id) for slot_id in range(slots)} == {bytes(HEADER_BYTES)}
    assert bytes(reader._hints) == hints, "nothing else was written"
    assert list(base.parent.iterdir()) == []
    reader.close()
    owned.free()


def test_close_may_be_called_twice_and_finds_its_files_gone(owned, base):
    owned.data_path.unlink()
    owned.close()
    owned.close()
    assert list(base.parent.iterdir()) == []


def test_the_memory_stays_after_close_and_goes_with_free(owned, device):
    put(device, owned.address, b"payload")
    owned.checksum(0, 7)
    owned.close()
    assert get(device, owned.address, 7) == b"payload"
    owned.free()
    assert list(device.directory.iterdir()) == []
    assert open_files(device.directory) == 0
    assert device.registered == {}


def test_payloads_are_the_bytes_at_each_place_in_order(owned, device, served):
    put(device, owned.address + 4096, b"first")
    put(device, owned.address + 8192, b"the second")
    queued = device.queued
    found = served.payloads([(8192, 10), (0, 0), (4096, 5)])
    assert found == [b"the second", b"", b"first"]
    assert device.queued - queued == 2, "of nothing nothing is copied"


def test_what_has_no_bytes_needs_no_device(device, served):
    device.broken = True
    assert served.payloads([(0, 0), (4096, 0)]) == [b"", b""]
    device.broken = False


def test_once_copies_hang_nothing_more_is_copied_and_all_they_use_stays(
    device, served, monkeypatch
):
    kept = []
    monkeypatch.setattr(cuda, "_kept", kept)
    monkeypatch.setattr(cuda, "CUDA_IPC_DRAIN_S", 0.05)
    device.hold.clear()
    with pytest.raises(DeviceError, match="hang for"):
        served.payloads([(0, 7)])
    hangs = served._hanging
    assert [len(hanging) for hanging in hangs] == [7]
    with pytest.raises(DeviceError, match=r"copies on the device hang$"):
        served.payloads([(0, 7)])
    served.close()
    assert (kept, device.mapped) == ([served], 1)
    device.hold.set()
    hangs.clear()


def test_a_closed_one_has_no_memory_stream_or_headers(owned, device, base):
    before = open_files(base.parent)
    served = ServedCuda(owned.head_path, device, owned.shared)
    stream = served._stream
    served.close()
    assert (device.mapped, open_files(base.parent)) == (0, before)
    with pytest.raises(DeviceError, match="closed"):
        stream.record()


@pytest.mark.parametrize("refused", ["open", "stream"])
def test_what_the_device_refuses_to_serve_is_let_go(owned, device, base, monkeypatch, refused):
    def refuse(*_, **__):
        raise DeviceError("no")

    before = open_files(base.parent)
    monkeypatch.setattr(device, refused, refuse)
    with pytest.raises(DeviceError) as raised:
        ServedCuda(owned.head_path, device, owned.shared)
    assert raised.tb, "what it holds is held still, unless it was given back"
    assert (device.mapped, open_files(base.parent)) == (0, before)


def test_a_consumer_sees_the_headers_as_long_as_their_owner_has_them(owned, base):
    owned.apply(Seal(1, 9, KEY, 7, 0, 1, 0, 0, 5))
    reader = AttachedCuda(owned.head_path)
    assert unpack(reader.header(1)).key == KEY
    assert reader.alive()
    owned.close()
    assert not reader.alive()
    reader.close()
    assert open_files(base.parent) == 0


def test_the_headers_of_an_owner_that_has_ended_are_refused_and_let_go(owned, base):
    left = base.with_name("left.head")
    shutil.copy(owned.head_path, left)
    before = open_files(base.parent)
    with pytest.raises(FileNotFoundError, match="has ended") as refused:
        AttachedCuda(left)
    assert refused.tb, "what it holds is held still, unless it was given back"
    assert open_files(base.parent) == before
