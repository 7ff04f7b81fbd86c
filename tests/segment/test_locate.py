"""What a reader believes: a header that says exactly what the location promised, and a place
within the segment; and after copying, that it still says so (rule 4)."""

import pytest
from each_input import each
from segment_bytes import head_of

from kvstore.core.events import Fill, Mark, Seal
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.segment.attached import AttachedShm
from kvstore.segment.header import FREE, SUPERBLOCK_BYTES, Superblock, pack
from kvstore.segment.locate import locate, sealed_as, spot_of
from kvstore.segment.shm import OwnedShm
from kvstore.types import Location

KEY = bytes(range(32))
SIZE = 128 << 10
SLOTS = SIZE // SLOT_BYTES_MIN
AT = Location(7, 3, 0, 2, 9, 1, 5000, 77)
SEALED = Seal(AT.slot, AT.generation, KEY, AT.length, AT.granule, 1, 4, AT.checksum, 5)
OFFSET = AT.slot * SLOT_BYTES_MIN + 1024


@pytest.fixture
def owned(tmp_path):
    segment = OwnedShm(tmp_path / "segment", Superblock(7, 3, 0, SIZE))
    segment.apply(Fill(OFFSET, b"p" * AT.length))
    segment.apply(SEALED)
    yield segment
    segment.close()


@pytest.fixture
def reader(owned):
    attached = AttachedShm(owned.data_path, owned.head_path)
    yield attached
    attached.close()


def test_a_block_is_found_where_its_header_says(reader):
    spot = locate(reader, KEY, AT)
    assert (spot.slot_id, spot.offset) == (AT.slot, OFFSET)
    assert spot.image == reader.header(AT.slot)
    assert spot.header == SEALED[1:]


def test_every_byte_of_the_key_counts(reader):
    for at in range(32):
        other = KEY[:at] + bytes([KEY[at] ^ 1]) + KEY[at + 1 :]
        assert locate(reader, other, AT) is None, at


@each(
    "changed",
    [
        {"generation": 8},  # the header has a later one
        {"generation": 10},
        {"length": 4999},
        {"length": 5001},
        {"granule": 0},
        {"granule": 2},
        {"segment": 1},
        {"slot": 1},
        {"slot": SLOTS},  # the first byte after the headers
        {"slot": SLOTS + 1},
        {"slot": (1 << 32) - 1},
    ],
    ids=str,
)
def test_a_location_that_promises_anything_else_leads_nowhere(reader, changed):
    assert locate(reader, KEY, AT._replace(**changed)) is None


def test_a_header_behind_the_last_slot_is_believed_by_nobody(owned, reader):
    """What lies there is the table of hints: bytes that readers do not choose, but others do."""
    start = SUPERBLOCK_BYTES + SLOTS * 64
    head_of(owned)[start : start + 64] = pack((9, KEY, 0, 0, 0, 0, 0, 0))
    assert locate(reader, KEY, AT._replace(slot=SLOTS, length=0, granule=0)) is None


@pytest.mark.parametrize(
    ("slot", "length", "granule", "meta_length"),
    [
        (SLOTS - 1, SLOT_BYTES_MIN + 1, 0, 0),
        (SLOTS - 1, SLOT_BYTES_MIN - 1023, 1, 0),
        (0, SIZE + 1, 0, 0),
        (0, (1 << 32) - 1, 0, 0),
        (0, 100, 4, 0),
        (0, 100, 255, 0),
        (0, 100, 0, 101),
    ],
)
def test_a_header_that_leads_out_of_its_segment_or_page_or_value_is_not_believed(
    owned, reader, slot, length, granule, meta_length
):
    owned.apply(Seal(slot, 9, KEY, length, granule, 0, meta_length, 0, 0))
    promised = AT._replace(slot=slot, length=length, granule=granule)
    assert sealed_as(reader.header(slot), KEY, promised) is not None
    assert locate(reader, KEY, promised) is None
    assert reader.hinted(KEY)[0] == slot, "its hint leads there"
    assert spot_of(SIZE, *reader.hinted(KEY)) is None


@pytest.mark.parametrize(
    ("slot", "length", "granule", "meta_length"),
    [(SLOTS - 1, SLOT_BYTES_MIN, 0, 0), (SLOTS - 1, 1024, 3, 0), (0, SIZE, 0, 0), (0, 9, 0, 9)],
)
def test_the_last_byte_of_a_segment_and_of_a_value_may_be_used(
    owned, reader, slot, length, granule, meta_length
):
    owned.apply(Seal(slot, 9, KEY, length, granule, 0, meta_length, 0, 0))
    promised = AT._replace(slot=slot, length=length, granule=granule)
    assert locate(reader, KEY, promised).offset == slot * SLOT_BYTES_MIN + granule * 1024


def test_a_hint_leads_to_the_place_that_a_location_leads_to_while_the_block_is_sealed(
    owned, reader
):
    assert spot_of(SIZE, *reader.hinted(KEY)) == locate(reader, KEY, AT)
    assert spot_of(SIZE, *reader.hinted(KEY)).offset == OFFSET
    owned.apply(Mark(AT.slot, FREE, AT.generation))
    assert reader.hinted(KEY)[0] == AT.slot
    assert spot_of(SIZE, *reader.hinted(KEY)) is None
