"""Scans all slot headers of a segment when its node is started again.

Headers are the truth (header.py). From the first page on, a header that says SEALED or RESERVED
is that of a slot and says how far the slot goes; the headers within the slot say FREE, or the
segment is damaged. A header that says FREE is that of a slot too while clients have its block
pinned. What lies between slots is free.

A segment of 100 GiB has 26 million headers. Those of pages that were never used are not looked
at (the segment says which), and of each of the others only one byte, except where a slot begins.
"""

from __future__ import annotations

import re

from kvstore.core.events import Bounds, Mark, Seal, seal_of
from kvstore.core.memory.granules import PAGE, granules_of, within
from kvstore.core.recovery import HeldSlot, Seen, fits
from kvstore.segment.header import (
    FREE,
    GENERATION_MAX,
    HEADER_BYTES,
    RESERVED,
    SEALED,
    body_of,
    fields,
    of_reserved,
)

GONE_MAX = 1 << 16
"""Blocks that had left before the end, which are searched up to this number. The index removes what
it still has of them; a look at the header settles the rest."""
WORDS_AT_ONCE = 1 << 12
"""Words that are converted at once; as Python's numbers they take 40 bytes each."""
_IN_USE = re.compile(rb"[^\0]")


class DamagedSegmentError(ValueError):
    """Raised when the headers of a segment contradict each other, so that nobody can say what may
    be reused."""


def scan(size_bytes: int, bounds: Bounds, headers: memoryview, held: memoryview) -> Seen:
    """Return all slots of a segment. `headers` are 64 bytes a page, `held` is one byte a page.

    Raises `DamagedSegmentError`; the caller then starts with an empty segment.
    """
    pages = len(held)
    below, from_ = bounds.used_below, bounds.used_from
    if bounds.generation > GENERATION_MAX // 2 or below > pages or from_ > pages:
        raise DamagedSegmentError(f"impossible bounds: {bounds}")
    found = Seen(bounds, [], set(), [], [], [])
    one = _Scan(size_bytes, found, headers, held)
    if below >= from_:
        one.look(0, pages)
    elif one.look(0, below) <= from_:
        one.look(from_, pages)
    else:
        raise DamagedSegmentError(f"a slot below page {below} reaches beyond page {from_}")
    return found


class _Scan:
    def __init__(self, size_bytes: int, found: Seen, headers: memoryview, held: memoryview) -> None:
        self._size_bytes = size_bytes
        self._found = found
        self._headers = headers
        self._words = headers.cast("Q")[:: HEADER_BYTES // 8]
        self._held = held

    def look(self, first: int, last: int) -> int:
        """Look at pages `first` to `last` - 1; returns the page after them, or after the last slot
        that begins in them, if that is later."""
        # A slot begins where the state is not FREE, or where somebody has it pinned.
        states = bytes(self._headers[first * HEADER_BYTES : last * HEADER_BYTES : HEADER_BYTES])
        held = bytes(self._held[first:last])
        if any(held):
            length = len(states)
            both = int.from_bytes(states, "little") | int.from_bytes(held, "little")
            marked = both.to_bytes(length, "little")
        else:
            marked = states
        free = at = end = 0
        while (match := _IN_USE.search(marked, at)) is not None:
            page = match.start()
            end = self._slot(first + page, bool(held[page])) - first
            if end == page:  # it says nothing that can be believed: free
                at = page + 1
                continue
            # The page that it ends in may be that in which the next one begins.
            if _IN_USE.search(marked, page + 1, end) is not None:
                raise DamagedSegmentError(f"a slot begins within that of page {first + page}")
            self._gone(first + free, first + page)
            free = at = end
        self._gone(first + free, last)
        return max(last, first + end)

    def _slot(self, page: int, pinned: bool) -> int:
        """Note the slot that begins in `page`; returns the first page in which another may."""
        word = self._words[page]
        state = word & 0xFF
        if state == SEALED:
            block = self._block(page, fields(self._image(page)))
            if block is not None:
                self._found.sealed.append(block)
                if pinned:
                    self._found.pinned.add(page)
                return self._after(page, block.granule, granules_of(block.length))
            if pinned:
                raise DamagedSegmentError(f"slot {page}: pinned, and its header is damaged")
            self._found.damaged.append(Mark(page, FREE, min(word >> 16, self._last)))
            return page
        if state == RESERVED:
            generation, granule, size = of_reserved(word, self._last)
            if not (size >= PAGE and within(page, granule, size, self._size_bytes)):
                raise DamagedSegmentError(f"slot {page}: {size} granules reserved")
            self._found.held.append(HeldSlot(page, generation, granule, size, True))
            return self._after(page, granule, size)
        if state != FREE:
            raise DamagedSegmentError(f"slot {page}: state {state}")
        block = self._left(page)
        if block is None:
            raise DamagedSegmentError(f"slot {page}: pinned, and its size is unknown")
        size = granules_of(block.length)
        self._found.held.append(HeldSlot(page, block.generation, block.granule, size, False))
        self._found.gone.append(block)
        return self._after(page, block.granule, size)

    @property
    def _last(self) -> int:
        return self._found.bounds.generation

    @staticmethod
    def _after(page: int, granule: int, size: int) -> int:
        """Return the first page in which another slot may begin: the last one that this slot
        touches, if that is not all the slot's, else the next."""
        return page + (granule + size) // PAGE

    def _gone(self, first: int, last: int) -> None:
        """Note the blocks that left pages which are free now."""
        gone = self._found.gone
        for start in range(first, last, WORDS_AT_ONCE):
            words = self._words[start : min(start + WORDS_AT_ONCE, last)].tolist()
            for page, word in enumerate(words, start):
                if len(gone) >= GONE_MAX:
                    return
                if word and (block := self._left(page)) is not None:
                    gone.append(block)

    def _left(self, page: int) -> Seal | None:
        """Return the block that was there last, if the header's body still describes it. What a
        damaged header that says SEALED describes does not count."""
        return self._block(page, body_of(self._image(page), self._words[page] >> 16))

    def _image(self, page: int) -> bytes:
        return bytes(self._headers[page * HEADER_BYTES : (page + 1) * HEADER_BYTES])

    def _block(
        self, page: int, seen: tuple[int, bytes, int, int, int, int, int, int] | None
    ) -> Seal | None:
        """Return what a header describes; None unless it is whole and possible."""
        if seen is None:
            return None
        block: Seal = seal_of((page, *seen))
        return block if fits(block, self._size_bytes) and block.generation <= self._last else None
