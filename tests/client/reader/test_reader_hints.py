"""A reader finds blocks of its own host without the index, and only right ones."""

from types import SimpleNamespace

import pytest
from reader_parts import readable
from segment_bytes import head_of, hints_in_head

from kvstore.client.reader import Reader
from kvstore.core.events import Fill, Mark, Seal
from kvstore.errors import IndexUnavailableError
from kvstore.machine import REAL
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import Superblock, hint_of
from kvstore.segment.shm import OwnedShm

SIZE_BYTES = 128 << 10
VALUE = b"v" * 1000


class NoIndex:
    """Counts the questions, and answers none."""

    asked = 0

    def match(self, keys):
        self.asked += 1
        raise IndexUnavailableError("no index here")

    lookup = match


class Nodes:
    """One mapped segment."""

    machine = REAL

    def __init__(self, shm):
        self.mapped = (SimpleNamespace(shm=shm, gone=False, disks=None),)

    def check(self, now):
        pass

    def only_others(self):
        pass

    def map_ours(self, now):
        return False

    def map_all(self, now):
        return False


@pytest.fixture
def owned(tmp_path):
    segment = OwnedShm(tmp_path / "s", Superblock(7, 1, 0, SIZE_BYTES))
    yield segment
    segment.close()


@pytest.fixture
def index():
    return NoIndex()


@pytest.fixture
def reader(owned, index):
    return Reader(index, readable(Nodes(AttachedShm(owned.data_path, owned.head_path))))


def key_of(hint: int, name: bytes = b"a") -> bytes:
    return name.ljust(8) + hint.to_bytes(4, "little") + name.ljust(20)


def save(segment, slot_id, key, value=VALUE, granule=0):
    segment.apply(Mark(slot_id, 1, 1))
    segment.apply(Fill(slot_id * 4096, value))
    segment.apply(Seal(slot_id, 1, key, len(value), granule, 1, 0, 0, 0))


def test_a_sealed_block_is_found_without_the_index(owned, reader, index):
    save(owned, 3, key_of(9))
    (place,) = reader.search([key_of(9)])
    assert bytes(place.buffer) == VALUE
    assert place.valid()
    assert index.asked == 0


def test_the_index_is_asked_for_what_is_not_here(owned, reader, index):
    save(owned, 3, key_of(9))
    places = reader.search([key_of(9), key_of(10)])
    assert [place is not None for place in places] == [True, False]
    assert index.asked == 1


def test_the_hint_of_a_block_that_is_gone_leads_nowhere(owned, reader):
    save(owned, 3, key_of(9))
    owned.apply(Mark(3, 0, 1))
    assert reader.search([key_of(9)]) == [None]


def test_two_keys_with_one_hint_are_both_found(owned, reader, index):
    save(owned, 3, key_of(9, b"a"), b"a" * 1000)
    save(owned, 4, key_of(9, b"b"), b"b" * 1000)
    found = reader.search([key_of(9, b"a"), key_of(9, b"b")])
    assert [bytes(place.buffer[:1]) for place in found] == [b"a", b"b"]
    assert index.asked == 0


def test_more_keys_with_one_hint_are_never_taken_for_each_other(owned, reader):
    names = [b"a", b"b", b"c", b"d"]
    for slot_id, name in enumerate(names):
        save(owned, slot_id, key_of(9, name), name * 1000)
    found = reader.search([key_of(9, name) for name in names])
    assert [bytes(p.buffer[:1]) if p else None for p in found] == [b"a", None, None, b"d"]


def test_the_place_of_a_key_that_is_gone_is_used_again(owned, reader):
    save(owned, 3, key_of(9, b"a"))
    owned.apply(Mark(3, 0, 1))
    save(owned, 4, key_of(9, b"b"))
    save(owned, 5, key_of(9, b"c"))
    assert all(reader.search([key_of(9, b"b"), key_of(9, b"c")]))


def test_the_first_slot_is_no_block_while_nothing_was_saved(reader):
    assert reader.search([key_of(0)]) == [None]


@pytest.mark.parametrize("offset", range(0, 64, 4))
def test_a_damaged_header_is_a_miss(owned, reader, offset):
    save(owned, 3, key_of(9))
    start = 4096 + 3 * 64 + offset
    head_of(owned)[start] ^= 0x40
    assert reader.search([key_of(9)]) == [None]


@pytest.mark.parametrize("granule", [4, 255])
def test_a_block_that_would_leave_the_segment_is_a_miss(owned, reader, granule):
    save(owned, 3, key_of(9), granule=granule)
    assert reader.search([key_of(9)]) == [None]


def test_a_hint_beyond_the_segment_leads_nowhere(owned, reader):
    hints_in_head(owned)[hint_of(key_of(9), len(hints_in_head(owned)))] = 1 << 31
    assert reader.search([key_of(9)]) == [None]


def test_a_remembered_place_ends_with_its_block(owned, reader):
    save(owned, 3, key_of(9))
    (place,) = reader.search([key_of(9)])
    owned.apply(Mark(3, 0, 1))
    assert not place.valid()


def test_a_full_memory_of_places_may_change_while_the_oldest_is_looked_for(
    reader, owned, monkeypatch
):
    class Changing(dict):
        """Another thread adds to it between the two steps of looking for the first."""

        def __iter__(self):
            found = super().__iter__()
            super().__setitem__(bytes(32), None)
            return found

    monkeypatch.setattr("kvstore.client.reader.PLACES_KEPT_MAX", 1)
    save(owned, 3, key_of(9))
    reader.remembered = Changing({b"o" * 32: None})
    assert reader.search([key_of(9)])[0] is not None
