import mmap
import os

import pytest

from kvstore.core.events import Fill, Hold, Mark, Seal
from kvstore.errors import NoSpaceError
from kvstore.machine import Machine
from kvstore.memory_files import Room
from kvstore.segment import shm
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import FREE, RESERVED, SEALED, Superblock, unpack
from kvstore.segment.shm import OwnedShm, check_room, files_bytes, header_file_bytes, never_fits

KEY = bytes(range(32))
BLOCK = Superblock(7, 3, 0, 128 << 10)


@pytest.fixture
def owned(tmp_path):
    segment = OwnedShm(tmp_path / "segment", BLOCK)
    yield segment
    segment.close()


def test_a_reader_sees_what_the_owner_sealed(owned):
    owned.apply(Fill(1024, b"payload"))
    owned.apply(Seal(1, 9, KEY, 7, 0, 1, 0, 0, 5))
    reader = AttachedShm(owned.data_path, owned.head_path)
    assert reader.superblock == BLOCK
    assert bytes(reader.payload[1024:1031]) == b"payload"
    header = unpack(reader.header(1))
    assert (header.generation, header.key, header.length) == (9, KEY, 7)
    reader.close()


def test_a_mark_changes_the_word_alone(owned):
    owned.apply(Seal(1, 9, KEY, 7, 0, 1, 0, 0, 5))
    before = owned.header(1)
    owned.apply(Mark(1, SEALED + 1, 10))
    assert owned.header(1)[8:] == before[8:]
    assert int.from_bytes(owned.header(1)[:8], "little") == 10 << 16 | SEALED + 1


def test_a_readers_mapping_cannot_write(owned):
    reader = AttachedShm(owned.data_path, owned.head_path)
    assert reader.payload.readonly
    with pytest.raises(TypeError):
        reader.payload[0] = 1
    reader.close()


def test_a_writers_mapping_can_write_payload_and_not_headers(owned):
    writer = AttachedShm(owned.data_path, owned.head_path, writable=True)
    writer.payload[5:8] = b"abc"
    reader = AttachedShm(owned.data_path, owned.head_path)
    assert bytes(reader.payload[5:8]) == b"abc"
    assert writer._head[:1]
    with pytest.raises(TypeError):
        writer._head[0] = 1
    writer.close()
    reader.close()


def test_a_segment_that_does_not_fit_is_refused_with_figures_and_leaves_nothing(tmp_path):
    huge = Superblock(7, 3, 0, 1 << 48)
    with pytest.raises(NoSpaceError, match=r"asked for, \d+ free"):
        OwnedShm(tmp_path / "huge", huge)
    assert list(tmp_path.iterdir()) == []


def test_when_pages_run_out_half_way_nothing_is_left(tmp_path, monkeypatch):
    """The room can go between the check and the allocation."""
    real = os.posix_fallocate

    def fallocate(fd, offset, size):
        if size < BLOCK.size_bytes:
            raise OSError(28, "No space left on device")
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(NoSpaceError, match="no room"):
        OwnedShm(tmp_path / "segment", BLOCK)
    assert list(tmp_path.iterdir()) == []


def test_close_removes_the_files_and_may_be_called_twice(tmp_path):
    segment = OwnedShm(tmp_path / "segment", BLOCK)
    segment.close()
    segment.close()
    assert list(tmp_path.iterdir()) == []


def test_a_view_outlives_the_mapping_it_came_from(owned):
    owned.apply(Fill(0, b"still here"))
    reader = AttachedShm(owned.data_path, owned.head_path)
    view = reader.payload[:10]
    reader.close()
    assert bytes(view) == b"still here"


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * (mmap.PAGESIZE * 3)])
def test_a_file_that_is_no_segment_is_refused(tmp_path, owned, content):
    alien = tmp_path / "alien"
    alien.write_bytes(content)
    with pytest.raises(ValueError, match="alien"):
        AttachedShm(owned.data_path, alien)
    with pytest.raises(ValueError, match="alien"):
        AttachedShm(alien, owned.head_path)


class Watched:
    """Bytes that a segment stores to: `look` is called after each store."""

    def __init__(self, real, look) -> None:
        self._real, self._look = real, look

    def __getitem__(self, place):
        return self._real[place]

    def __setitem__(self, place, value) -> None:
        self._real[place] = value
        self._look()


def test_a_header_says_sealed_only_once_all_of_it_is_there(owned, monkeypatch):
    """Rule 3, store by store: its checksum is a second line of defence, not the first."""
    images = []

    def look():
        images.append(bytes(owned._head[4096 + 64 : 4096 + 128]))

    for name in ("_head", "_words"):
        monkeypatch.setattr(owned, name, Watched(getattr(owned, name), look))
    for generation, key in ((9, KEY), (10, KEY[::-1])):
        owned.apply(Mark(1, RESERVED, generation))
        owned.apply(Seal(1, generation, key, 7, 0, 1, 0, 0, 5))
    monkeypatch.undo()
    states = [image[0] for image in images]
    assert states.count(SEALED) == 2
    assert all(unpack(image) for image in images if image[0] == SEALED)


def keys_of_one_place(count):
    """Keys whose first place in the table of hints is the same."""
    return [bytes([i]) * 8 + bytes(4) + bytes([i]) * 20 for i in range(1, count + 1)]


def test_two_keys_with_one_place_for_hints_are_both_found(owned):
    first, second = keys_of_one_place(2)
    owned.apply(Seal(1, 9, first, 7, 0, 1, 0, 0, 5))
    owned.apply(Seal(2, 9, second, 7, 0, 1, 0, 0, 5))
    reader = AttachedShm(owned.data_path, owned.head_path)
    assert reader.hinted(first) == (1, owned.header(1))
    assert reader.hinted(second) == (2, owned.header(2))
    reader.close()


def test_a_key_saved_anew_keeps_its_place_and_leaves_the_second_to_others(owned):
    first, second = keys_of_one_place(2)
    owned.apply(Seal(2, 9, second, 7, 0, 1, 0, 0, 5))
    owned.apply(Seal(1, 9, first, 7, 0, 1, 0, 0, 5))
    owned.apply(Mark(2, FREE, 9))
    owned.apply(Seal(3, 10, second, 7, 0, 1, 0, 0, 5))
    reader = AttachedShm(owned.data_path, owned.head_path)
    assert reader.hinted(first)[0] == 1
    assert reader.hinted(second)[0] == 3
    reader.close()


class Full(Machine):
    """/dev/shm takes the payload, and not the headers beside it."""

    def room(self, where):
        return Room(BLOCK.size_bytes + shm.RESERVE_BYTES, 1 << 40)

    def create_memory(self, path, size_bytes):
        raise AssertionError(f"{path} was begun")


def test_what_lacks_room_is_refused_before_a_page_is_taken(tmp_path):
    """Else a mistyped size takes all memory of the machine before it fails."""
    with pytest.raises(NoSpaceError, match="asked for"):
        OwnedShm(tmp_path / "segment", BLOCK, machine=Full())
    assert list(tmp_path.iterdir()) == []


def test_the_header_file_has_a_page_the_headers_the_hints_and_a_byte_for_each_page(owned):
    """As docs/architecture.md has it: a restart finds them there."""
    pages = BLOCK.size_bytes >> 12
    table = pages * 4
    end = 4096 + pages * 64 + table * 4 + pages
    assert header_file_bytes(BLOCK.size_bytes) == owned.head_path.stat().st_size == end
    assert files_bytes(BLOCK.size_bytes) == BLOCK.size_bytes + end
    owned.apply(Seal(5, 9, bytes(31) + b"k", 7, 0, 1, 0, 0, 5))
    owned.apply(Seal(6, 9, bytes(8) + b"\xff" * 24, 7, 0, 1, 0, 0, 5))
    before = owned.head_path.read_bytes()
    hints = memoryview(before[4096 + pages * 64 :][: table * 4]).cast("I")
    assert (hints[0], hints[table - 1]) == (5, 6), "the first place and the last"
    for page in (0, pages - 1):
        owned.apply(Hold(page, True))
    held = owned.head_path.read_bytes()
    assert held[:-pages] == before[:-pages]
    assert held[-pages:] == b"\1" + bytes(pages - 2) + b"\1"


class Roomy(Machine):
    def __init__(self, free_bytes, total_bytes):
        self._room = Room(free_bytes, total_bytes)

    def room(self, where):
        return self._room


def test_what_fits_to_the_byte_beside_what_is_left_for_others_fits(tmp_path):
    need = files_bytes(BLOCK.size_bytes) + shm.RESERVE_BYTES
    check_room(tmp_path, BLOCK.size_bytes, Roomy(need, need))
    assert not never_fits(tmp_path, BLOCK.size_bytes, Roomy(0, need))
    with pytest.raises(NoSpaceError):
        check_room(tmp_path, BLOCK.size_bytes, Roomy(need - 1, need))
    assert never_fits(tmp_path, BLOCK.size_bytes, Roomy(0, need - 1))


def test_who_cannot_take_a_segment_over_leaves_it_to_others(tmp_path):
    OwnedShm(tmp_path / "segment", BLOCK).close(keep=True)
    other_shape = BLOCK._replace(epoch=4, size_bytes=2 * BLOCK.size_bytes)
    with pytest.raises(ValueError, match="segment") as held:
        OwnedShm(tmp_path / "segment", other_shape, reopen=True)
    OwnedShm(tmp_path / "segment", BLOCK._replace(epoch=4), reopen=True).close()
    assert held.value is not None
