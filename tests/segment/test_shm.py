import errno
import mmap
import os
from pathlib import Path

import pytest
import xxhash
from open_files import open_files
from segment_bytes import head_of

from kvstore.core.events import Bounds, Fill, Hold, Keep, Mark, Seal
from kvstore.errors import NoSpaceError
from kvstore.limits import SEGMENT_BYTES_MAX, SLOT_BYTES_MIN, SLOTS_PER_SEGMENT_MAX
from kvstore.machine import Machine
from kvstore.segment import shm
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import FREE, RESERVED, SEALED, Superblock, home_of, unpack
from kvstore.segment.shm import OwnedShm, check_room, files_bytes, header_file_bytes, never_fits
from kvstore.system.memory_files import Room

KEY = bytes(range(32))
BLOCK = Superblock(7, 3, 0, 128 << 10)


@pytest.fixture
def owned(tmp_path):
    segment = OwnedShm(tmp_path / "segment", BLOCK)
    yield segment
    segment.close()


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
    head = writer._head
    assert head[:1]
    with pytest.raises(TypeError):
        head[0] = 1
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


@pytest.mark.parametrize("pages", [1025, 1031], ids=str)
def test_a_segment_may_have_any_number_of_pages(tmp_path, pages):
    segment = OwnedShm(tmp_path / "odd", Superblock(1, 1, 0, pages * SLOT_BYTES_MIN))
    segment.apply(Mark(pages - 1, RESERVED, 7, 0, 4))
    segment.close()


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
        images.append(bytes(head_of(owned)[4096 + 64 : 4096 + 128]))

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
    return [key_at(16, i) for i in range(1, count + 1)]


def key_at(place, i=1):
    """A key whose first place that is."""
    return bytes([i]) * 8 + place.to_bytes(4, "little") + bytes([i]) * 20


def sealed_at(slot_id, key, generation=9):
    return Seal(slot_id, generation, key, 7, 0, 1, 0, 0, 5)


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


def test_a_block_that_moved_is_found_at_its_new_place(owned):
    owned.apply(sealed_at(1, KEY))
    owned.apply(sealed_at(2, KEY, 10))
    owned.apply(Mark(1, FREE, 9))
    reader = AttachedShm(owned.data_path, owned.head_path)
    assert reader.hinted(KEY) == (2, owned.header(2))
    assert list(reader.hinted_each([KEY])) == [(2, owned.header(2))]
    reader.close()


def test_a_hint_takes_over_none_that_is_needed_while_its_first_place_is_not(owned):
    """The first place leads to what is gone, or to a block that has its hint elsewhere."""
    gone, beside, third = keys_of_one_place(3)
    for slot_id, key in ((1, gone), (2, beside)):
        owned.apply(sealed_at(slot_id, key))
    owned.apply(Mark(1, FREE, 9))
    owned.apply(sealed_at(3, third))
    elsewhere, neighbour, last = key_at(40), key_at(33), key_at(32)
    for slot_id, key in ((4, neighbour), (0, elsewhere), (5, last)):
        owned.apply(sealed_at(slot_id, key))
    reader = AttachedShm(owned.data_path, owned.head_path)
    found = [reader.hinted(key)[0] for key in (beside, third, elsewhere, neighbour, last)]
    assert found == [2, 3, 0, 4, 5]
    reader.close()


class Full(Machine):
    """/dev/shm takes the payload, and not the headers beside it."""

    def room(self, where):
        return Room(BLOCK.size_bytes + shm.SHM_RESERVE_BYTES, 1 << 40)

    def create_memory(self, path, size_bytes):
        raise AssertionError(f"{path} was begun")


def test_what_lacks_room_is_refused_before_a_page_is_taken(tmp_path):
    """Else a mistyped size takes all memory of the machine before it fails."""
    with pytest.raises(NoSpaceError, match="asked for"):
        OwnedShm(tmp_path / "segment", BLOCK, machine=Full())
    assert list(tmp_path.iterdir()) == []


def test_the_header_file_has_a_page_the_headers_the_hints_the_terms_and_a_byte_a_page(owned):
    """As docs/architecture.md has it: a restart finds them there."""
    pages = BLOCK.size_bytes >> 12
    table = pages * 4
    end = 4096 + pages * 64 + table * 4 + pages * 8 + pages
    assert header_file_bytes(BLOCK.size_bytes) == owned.head_path.stat().st_size == end
    assert files_bytes(BLOCK.size_bytes) == BLOCK.size_bytes + end
    owned.apply(Seal(5, 9, bytes(31) + b"k", 7, 0, 1, 0, 0, 5))
    owned.apply(Seal(6, 9, bytes(8) + b"\xff" * 24, 7, 0, 1, 0, 0, 5))
    before = owned.head_path.read_bytes()
    hints = memoryview(before[4096 + pages * 64 :][: table * 4]).cast("I")
    assert (hints[0], hints[table - 1]) == (5, 6), "the first place and the last"
    for page in (0, pages - 1):
        owned.apply(Keep(page, 7, 0x01020304))
    kept = owned.head_path.read_bytes()
    terms = kept[-9 * pages : -pages]
    assert kept[: -9 * pages] == before[: -9 * pages]
    assert terms == (one := bytes([7, 0, 0, 0, 4, 3, 2, 1])) + bytes(8 * (pages - 2)) + one
    for page in (0, pages - 1):
        owned.apply(Keep(page, 0, 5))
    assert owned.head_path.read_bytes() == before, "of what is not retained nothing is said"
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
    need = files_bytes(BLOCK.size_bytes) + shm.SHM_RESERVE_BYTES
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


class Unlockable(Machine):
    """A process without a descriptor left for the lock on what it has just made."""

    def own_memory(self, path):
        raise OSError(errno.EMFILE, "too many open files")


def test_a_segment_that_cannot_be_locked_leaves_nothing(tmp_path):
    """Else it lay there, owned by nobody, until somebody else freed it ten minutes later."""
    with pytest.raises(OSError, match="too many open files"):
        OwnedShm(tmp_path / "segment", BLOCK, machine=Unlockable())
    assert list(tmp_path.iterdir()) == []


def test_who_is_interrupted_while_a_segment_is_made_leaves_neither_files_nor_a_lock(
    tmp_path, monkeypatch
):
    """Files whose lock this process keeps would be nobody's to free before it ends."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shm, "hints_in", interrupted)
    before = open_files()
    with pytest.raises(KeyboardInterrupt):
        OwnedShm(tmp_path / "segment", BLOCK)
    assert list(tmp_path.iterdir()) == []
    assert open_files() == before


# --- taking over what a former start left -----------------------------------------


class NoRoom(Machine):
    def room(self, where):
        return Room(0, 1 << 40)


def left(tmp_path, *writes, home=""):
    """A segment that a former start of the node left behind."""
    segment = OwnedShm(tmp_path / "segment", BLOCK, home=home)
    for write in writes:
        segment.apply(write)
    segment.close(keep=True)
    return segment


def taken_over(tmp_path, **changed):
    superblock = BLOCK._replace(**{"epoch": 4, **changed})
    return OwnedShm(tmp_path / "segment", superblock, reopen=True, machine=NoRoom())


def test_who_takes_over_finds_everything_and_changes_nothing_until_it_adopts(tmp_path):
    """Nor does it need room: the memory is there."""
    block, bounds = sealed_at(1, KEY), Bounds((1 << 40) + 3, 5, 9)
    terms = [Keep(1, (1 << 32) - 1, 1 << 31), Keep(2, 600, 7)]
    writes = Fill(4096, b"payload"), block, *terms, Hold(1, True), bounds
    before = left(tmp_path, *writes, home="/run/n")
    image = before.head_path.read_bytes()
    again = taken_over(tmp_path)
    epoch, seen = again.seen()
    assert (epoch, seen.bounds, seen.sealed, seen.pinned) == (3, bounds, [block], {1})
    assert seen.retained == terms[:1], "of what is not sealed nothing is"
    assert before.head_path.read_bytes() == image
    again.adopt()
    reader = AttachedShm(again.data_path, again.head_path)
    assert reader.superblock.epoch == 4
    assert bytes(reader.payload[4096:4103]) == b"payload"
    assert home_of(again.head_path.read_bytes()) == Path("/run/n")
    reader.close()
    again.close()


def test_a_new_segment_says_that_no_page_was_used(tmp_path):
    left(tmp_path)
    again = taken_over(tmp_path)
    assert again.seen()[1].bounds == Bounds(0, 0, BLOCK.size_bytes >> 12)
    again.close()


@pytest.mark.parametrize("other", [{"node_id": 8}, {"segment": 1}, {"epoch": 3}, {"epoch": 2}])
def test_the_segment_of_another_node_or_of_no_former_start_is_not_believed(tmp_path, other):
    left(tmp_path)
    again = taken_over(tmp_path, **other)
    with pytest.raises(ValueError, match="not of one before"):
        again.seen()
    again.close()


def test_the_largest_segment_there_may_be_has_bounds_that_fit_their_words(owned):
    last = SLOTS_PER_SEGMENT_MAX
    for bounds in (Bounds(0, 0, last), Bounds(1, last, last)):
        owned.apply(bounds)
    assert (
        owned.head_path.read_bytes()[3072:3088]
        == bytes([1, *[0] * 7]) + last.to_bytes(4, "little") * 2
    )
    assert last * SLOT_BYTES_MIN >= SEGMENT_BYTES_MAX, "what a client may ask for, a node can have"


def test_a_segment_whose_superblock_is_damaged_is_not_believed(tmp_path):
    with left(tmp_path).head_path.open("r+b") as head:
        head.write(b"x")
    again = taken_over(tmp_path)
    with pytest.raises(ValueError, match="superblock is damaged"):
        again.seen()
    again.close()


def test_headers_whose_payload_is_gone_stay_and_nobody_keeps_their_lock(tmp_path):
    segment = left(tmp_path)
    away = segment.data_path.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError) as held:
        taken_over(tmp_path)
    away.rename(segment.data_path)
    again = taken_over(tmp_path)
    again.close()
    assert held.value is not None


def test_what_was_kept_at_close_is_not_removed_by_a_second_one(tmp_path):
    segment = left(tmp_path)
    segment.close()
    taken_over(tmp_path).close()


def test_a_checksum_is_of_those_bytes_alone(owned):
    owned.apply(Fill(4096, b"xpayloady"))
    assert owned.checksum(4097, 7) == xxhash.xxh3_64_intdigest(b"payload")


def test_a_segment_that_is_closed_is_not_mapped_any_more(tmp_path):
    for keep in (True, False):
        segment = OwnedShm(tmp_path / f"segment{keep}", BLOCK)
        segment.close(keep=keep)
        assert segment._head.closed
        assert segment._data.closed
