"""What the headers of a segment say when its node is started again, page by page."""

from __future__ import annotations

import tracemalloc

import pytest

from kvstore.core.events import Bounds, Mark, Seal
from kvstore.core.recovery import HeldSlot, Seen
from kvstore.segment import scan as scan_module
from kvstore.segment.header import (
    FREE,
    GENERATION_MAX,
    HEADER_BYTES,
    RESERVED,
    pack,
    word,
)
from kvstore.segment.scan import DamagedSegmentError, scan

PAGES = 16
PAGE_BYTES = 4 << 10
SIZE_BYTES = PAGES * PAGE_BYTES
LAST = 100
"""No generation is above it."""
FIRST_USED = Bounds(LAST, PAGES, PAGES)


def seal(page: int, generation: int = 9, *, length: int = 100, granule: int = 0) -> Seal:
    key = bytes([page, generation % 256]) * 16
    return Seal(page, generation, key, length, granule, 1, 0, 77, 5)


class Headers:
    def __init__(self) -> None:
        self.raw = bytearray(PAGES * HEADER_BYTES)
        self.held = bytearray(PAGES)

    def sealed(self, *blocks: Seal) -> Headers:
        for block in blocks:
            at = block.slot_id * HEADER_BYTES
            self.raw[at : at + HEADER_BYTES] = pack(block[1:])
        return self

    def marked(self, page: int, mark: int) -> Headers:
        at = page * HEADER_BYTES
        self.raw[at : at + 8] = mark.to_bytes(8, "little")
        return self

    def left(self, *blocks: Seal) -> Headers:
        """Sealed once, and free now."""
        for block in blocks:
            self.sealed(block).marked(block.slot_id, word(FREE, block.generation))
        return self

    def pinned(self, *pages: int) -> Headers:
        for page in pages:
            self.held[page] = 1
        return self

    def seen(self, bounds: Bounds = FIRST_USED) -> Seen:
        return scan(SIZE_BYTES, bounds, memoryview(self.raw), memoryview(self.held))


@pytest.fixture
def headers() -> Headers:
    return Headers()


def test_an_empty_segment_says_nothing_but_its_bounds(headers: Headers) -> None:
    assert headers.seen() == Seen(FIRST_USED, [], set(), [], [], [])


def test_blocks_are_found_as_they_were_sealed(headers: Headers) -> None:
    blocks = [
        seal(0),
        seal(1, length=2 * PAGE_BYTES),
        seal(3, LAST, length=20_000),  # whole pages: five
        seal(PAGES - 1, length=PAGE_BYTES),
    ]
    assert headers.sealed(*blocks).seen().sealed == blocks


def test_two_slots_may_share_the_page_in_which_one_ends_and_the_next_begins(
    headers: Headers,
) -> None:
    blocks = [seal(2, length=5 << 10), seal(3, length=5 << 10, granule=1), seal(4, granule=2)]
    assert headers.sealed(*blocks).seen().sealed == blocks


@pytest.mark.parametrize("page", [3, 4])
def test_a_slot_that_begins_within_another_is_damage(headers: Headers, page: int) -> None:
    """It goes to the end of page 4."""
    with pytest.raises(DamagedSegmentError, match="within that of page 2"):
        headers.sealed(seal(2, length=3 * PAGE_BYTES), seal(page)).seen()


def test_one_that_a_client_has_pinned_within_another_is_damage_too(headers: Headers) -> None:
    headers.sealed(seal(2, length=3 * PAGE_BYTES)).left(seal(3)).pinned(3)
    with pytest.raises(DamagedSegmentError, match="within that of page 2"):
        headers.seen()


def test_what_was_pinned_is_said(headers: Headers) -> None:
    headers.sealed(seal(1), seal(2), seal(5)).pinned(1, 5)
    seen = headers.seen()
    assert seen.pinned == {1, 5}
    assert [block.slot_id for block in seen.sealed] == [1, 2, 5]


# --- headers that are not whole --------------------------------------------------


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (seal(3, LAST + 1), LAST),
        (seal(3, 9, length=SIZE_BYTES), 9),
        (seal(3, 9, granule=4), 9),
    ],
    ids=["a generation to come", "beyond the end", "no such granule"],
)
def test_a_block_that_cannot_be_is_free_and_the_next_page_is_looked_at(
    headers: Headers, block: Seal, said: int
) -> None:
    seen = headers.sealed(block, seal(4)).seen()
    assert seen.damaged == [Mark(3, FREE, said)]
    assert seen.sealed == [seal(4)]
    assert seen.gone == []


def test_a_sealed_header_with_a_wrong_checksum_is_free(headers: Headers) -> None:
    headers.sealed(seal(3))
    headers.raw[3 * HEADER_BYTES + 50] ^= 1
    assert headers.seen().damaged == [Mark(3, FREE, 9)]
    headers.pinned(3)
    with pytest.raises(DamagedSegmentError, match="slot 3: pinned"):
        headers.seen()


def test_a_state_that_there_is_not_is_damage(headers: Headers) -> None:
    with pytest.raises(DamagedSegmentError, match="slot 3: state 3"):
        headers.marked(3, 9 << 16 | 3).seen()


# --- what clients of then may use ------------------------------------------------


def test_a_reserved_slot_is_held_as_far_as_it_goes(headers: Headers) -> None:
    headers.marked(2, word(RESERVED, 50, 1, 6)).sealed(seal(3, granule=3))
    seen = headers.seen()
    assert seen.held == [HeldSlot(2, 50, 1, 6, True)]
    assert seen.sealed == [seal(3, granule=3)]


@pytest.mark.parametrize(("granule", "size"), [(0, 3), (4, 4), (0, 4 * PAGES), (1, 16)])
def test_a_reserved_slot_that_cannot_be_is_damage(
    headers: Headers, granule: int, size: int
) -> None:
    """Too small, beyond its page, beyond the end, or not aligned."""
    with pytest.raises(DamagedSegmentError, match=f"slot 1: {size} granules reserved"):
        headers.marked(1, word(RESERVED, 9, granule, size)).seen()


def test_the_smallest_slot_and_the_last_page_can_be_reserved(headers: Headers) -> None:
    headers.marked(PAGES - 1, word(RESERVED, 9, 0, 4))
    assert headers.seen().held == [HeldSlot(PAGES - 1, 9, 0, 4, True)]


def test_a_block_that_left_while_it_was_pinned_is_held_and_gone(headers: Headers) -> None:
    block = seal(2, length=6000, granule=1)
    seen = headers.left(block).pinned(2).sealed(seal(3, granule=3)).seen()
    assert seen.held == [HeldSlot(2, 9, 1, 6, False)]
    assert seen.gone == [block]
    assert seen.sealed == [seal(3, granule=3)]


@pytest.mark.parametrize("mark", [word(FREE, 0), word(FREE, 10)], ids=["no", "another"])
def test_a_pin_on_what_nobody_can_tell_the_size_of_is_damage(headers: Headers, mark: int) -> None:
    with pytest.raises(DamagedSegmentError, match="slot 2: pinned, and its size is unknown"):
        headers.left(seal(2)).marked(2, mark).pinned(2).seen()


# --- what had left ----------------------------------------------------------------


def test_blocks_that_left_pages_which_are_free_now_are_gone_in_order(headers: Headers) -> None:
    gone = [seal(0), seal(1), seal(4), seal(PAGES - 1)]
    live = [seal(2, length=2 * PAGE_BYTES), seal(7)]
    seen = headers.left(*gone).sealed(*live).seen()
    assert seen.gone == gone
    assert seen.sealed == live


def test_what_left_a_page_that_is_another_slots_now_is_not_told(headers: Headers) -> None:
    """It was overwritten long ago."""
    seen = headers.left(seal(3)).sealed(seal(2, length=2 * PAGE_BYTES)).seen()
    assert seen.gone == []


def test_of_what_left_only_so_much_is_told(
    headers: Headers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_module, "GONE_MAX", 2)
    assert headers.left(seal(1), seal(2), seal(3)).seen().gone == [seal(1), seal(2)]
    assert headers.sealed(seal(6)).left(seal(8)).seen().gone == [seal(1), seal(2)]


def test_a_segment_that_was_full_once_takes_little_memory_to_look_at() -> None:
    """A node of a TiB has 268 million headers; as many numbers at once would be 10 GB."""
    pages = 1 << 16
    raw = bytearray(word(FREE, 9).to_bytes(8, "little").ljust(HEADER_BYTES, b"x")) * pages
    headers, held = memoryview(raw), memoryview(bytearray(pages))
    tracemalloc.start()
    try:
        seen = scan(pages * PAGE_BYTES, Bounds(LAST, pages, pages), headers, held)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == Seen(Bounds(LAST, pages, pages), [], set(), [], [], [])
    assert most < 8 * pages, "a byte or two for each page, and no number"


# --- bounds -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(GENERATION_MAX // 2 + 1, PAGES, PAGES),
        Bounds(LAST, PAGES + 1, PAGES),
        Bounds(LAST, 0, PAGES + 1),
    ],
)
def test_impossible_bounds_are_damage(headers: Headers, bounds: Bounds) -> None:
    with pytest.raises(DamagedSegmentError, match="impossible bounds"):
        headers.seen(bounds)


def test_generations_may_reach_the_middle_of_what_there_is(headers: Headers) -> None:
    bounds = Bounds(GENERATION_MAX // 2, PAGES, PAGES)
    block = seal(3, GENERATION_MAX // 2)
    assert headers.sealed(block).seen(bounds).sealed == [block]


def test_pages_that_were_never_used_are_not_looked_at(headers: Headers) -> None:
    used = [seal(0), seal(3), seal(10, length=2 * PAGE_BYTES), seal(12)]
    headers.sealed(*used, seal(4), seal(9)).left(seal(5), seal(8), seal(11), seal(13))
    seen = headers.seen(Bounds(LAST, 4, 10))
    assert seen.sealed == used
    assert seen.gone == [seal(13)]


def test_all_are_where_the_used_ones_meet(headers: Headers) -> None:
    used = [seal(3, length=2 * PAGE_BYTES), seal(5)]
    headers.sealed(*used).left(seal(9))
    for bounds in (Bounds(LAST, 4, 4), Bounds(LAST, 5, 4)):
        seen = headers.seen(bounds)
        assert seen.sealed == used
        assert seen.gone == [seal(9)]


def test_a_slot_may_reach_to_the_last_page_that_was_used_and_not_beyond(headers: Headers) -> None:
    headers.sealed(seal(2, length=2 * PAGE_BYTES), seal(4))
    assert len(headers.seen(Bounds(LAST, 3, 4)).sealed) == 2
    headers.sealed(seal(2, length=3 * PAGE_BYTES))
    with pytest.raises(DamagedSegmentError, match="below page 3 reaches beyond page 4"):
        headers.seen(Bounds(LAST, 3, 4))
