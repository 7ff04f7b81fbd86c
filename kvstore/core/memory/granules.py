"""Computes how much of a segment a value takes; internal waste stays under 25%.

All of it is counted in granules. From `PAGED` on a value takes whole pages, aligned to
them. Below it takes whole granules, and at least a page: so no two slots begin in the same
page, and a page's number names the slot that begins in it.
"""

from __future__ import annotations

from kvstore.limits import SLOT_BYTES_MIN

GRANULE_BYTES = 1 << 10
PAGE = SLOT_BYTES_MIN // GRANULE_BYTES
"""Granules of a page, which has one header."""
PAGED = 4 * PAGE
"""Values up to this many granules take no more of them than they need."""


def granules_of(length: int) -> int:
    """Return the granules that a value of `length` bytes takes; an empty value takes a page as
    well."""
    size = -(-length // GRANULE_BYTES)
    if size <= PAGED:
        return size if size > PAGE else PAGE
    return -(-size // PAGE) * PAGE


def aligned(size: int) -> bool:
    """Return whether a slot of this size, as `granules_of` counts, begins where a page does."""
    return size >= PAGED


def within(page: int, granule: int, size: int, size_bytes: int) -> bool:
    """Return whether a slot can begin with that granule of that page, in a segment of this size."""
    return (
        0 <= granule < PAGE
        and not (granule and aligned(size))
        and (page * PAGE + granule + size) * GRANULE_BYTES <= size_bytes
    )
