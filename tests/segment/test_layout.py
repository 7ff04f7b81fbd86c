import dataclasses

from each_input import each
from stores import announcement

from kvstore.limits import SEGMENT_BYTES_MIN, SLOT_BYTES_MIN, SLOTS_PER_SEGMENT_MAX
from kvstore.segment import header
from kvstore.segment.layout import Layout
from kvstore.types import Location

KEY = bytes(range(32))
WORD = announcement(node_id=7, epoch=5)
AT = Location(7, 5, 0, 256 + 1, 9, 3, 4000, 0)
"""It begins with the fourth KiB of its page."""


def test_a_location_leads_to_its_header_and_its_payload() -> None:
    head_at, data_at = Layout(WORD).places(AT)
    assert head_at == header.SUPERBLOCK_BYTES + 257 * 64
    assert data_at == 257 * 4096 + 3 * 1024


@each(
    "wrong",
    [
        {"node_id": 8},
        {"epoch": 4},
        {"segment": 1},
        {"slot": 4 * 256},
        {"slot": (1 << 32) - 1},
        {"granule": 4},
        {"granule": 255},
        {"slot": 4 * 256 - 1, "length": 1025},
        {"length": (1 << 32) - 1},
    ],
    ids=str,
)
def test_a_location_outside_leads_nowhere(wrong: dict[str, int]) -> None:
    assert Layout(WORD).places(AT._replace(**wrong)) is None


@each("size_bytes", [-1, 0, 1, SEGMENT_BYTES_MIN - 1, 1 << 62])
def test_a_shape_that_no_node_has_leads_nowhere(size_bytes: int) -> None:
    word = dataclasses.replace(WORD, size_bytes=size_bytes)
    assert Layout(word).places(AT._replace(slot=0)) is None


def test_only_a_header_of_that_key_and_location_counts() -> None:
    fields = (AT.generation, KEY, AT.length, AT.granule, 1, 17, 99, 0)
    raw = header.pack(fields)
    assert Layout.seen(raw, KEY, AT) == (1, 17, 99)
    assert Layout.seen(raw, KEY[::-1], AT) is None
    assert Layout.seen(raw, KEY, AT._replace(generation=10)) is None
    assert Layout.seen(raw[:-1] + bytes([raw[-1] ^ 1]), KEY, AT) is None
    assert Layout.seen(bytes(64), KEY, AT) is None


def test_a_value_may_be_all_meta_and_no_more() -> None:
    for meta_length, seen in ((40, (1, 40, 99)), (41, None)):
        raw = header.pack((AT.generation, KEY, 40, AT.granule, 1, meta_length, 99, 0))
        assert Layout.seen(raw, KEY, AT._replace(length=40)) == seen


def test_the_smallest_and_the_largest_segment_have_all_their_slots() -> None:
    largest = SLOTS_PER_SEGMENT_MAX * SLOT_BYTES_MIN
    for size_bytes, slots in (
        (SEGMENT_BYTES_MIN, SEGMENT_BYTES_MIN // SLOT_BYTES_MIN),
        (largest, SLOTS_PER_SEGMENT_MAX),
        (largest + SLOT_BYTES_MIN, 0),
    ):
        assert Layout(dataclasses.replace(WORD, size_bytes=size_bytes)).slots == slots
