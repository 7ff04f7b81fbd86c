"""Says where on a device the next block goes, and which region is written over for it.

A device is cut into regions. Blocks are put one behind the other into one of them; when the next
does not fit, the region with the oldest lap is begun anew. A lap is the number of one filling: no
two fillings of one device have the same, so a place that names its lap is never another block's.
"""

from __future__ import annotations

from kvstore.core.answers import Begin
from kvstore.core.disk.base import DISK_PAGE, order_of
from kvstore.core.events import DiskFound
from kvstore.types import DiskPlace

LAP_MAX = (1 << 32) - 1


class _Filling:
    """A region that is being filled, in one lap."""

    __slots__ = ("end", "entries", "lap", "page", "pages_again", "region")

    def __init__(self, begin: Begin, found: DiskFound) -> None:
        self.region = begin.region
        self.lap = begin.lap
        self.page = found.first_pages[begin.region]
        self.end = self.page + found.region_pages
        self.entries = found.region_entries
        self.pages_again = 0
        """Of blocks with a second chance."""


class Ring:
    """The regions of one device."""

    def __init__(self, found: DiskFound) -> None:
        self.device = found.device
        self.uuid = found.uuid
        self.capacity_bytes = found.region_pages * len(found.laps) * DISK_PAGE
        self.value_bytes_max = found.region_pages * DISK_PAGE
        self.adopted = False
        """Whether all that a former start wrote was told: only then it is written to."""
        self.wants_region = False
        """Whether a region must be begun for a block that waits for its place."""
        self._found = found
        self._laps = list(found.laps)
        self._last_lap = found.next_lap - 1
        self._filling: _Filling | None = None
        self._next: _Filling | None = None
        self.order = order_of(DiskPlace(self.device, (1 << 32) - 1, self._last_lap))
        """No place with a higher order number (`order_of`) was given out."""

    def place(self, length: int) -> DiskPlace | None:
        """Return where a block of that length goes; None when a region must be begun first."""
        waits, filling = self.wants_region, self._filling
        place = None if waits or filling is None else self._give(filling, length)
        self.wants_region = place is None
        return place

    def again(self, length: int, percent: int) -> DiskPlace | None:
        """Return where in the region that is about to be begun a block of it has its second
        chance; None when such blocks take so much of it already."""
        filling, pages = self._next, _pages(length)
        most = self._found.region_pages * percent // 100
        if filling is None or filling.pages_again + pages > most:
            return None
        filling.pages_again += pages
        return self._give(filling, length)

    def _give(self, filling: _Filling, length: int) -> DiskPlace | None:
        pages = _pages(length)
        if not filling.entries or filling.page + pages > filling.end:
            return None
        place = DiskPlace(self.device, filling.page, filling.lap)
        filling.page += pages
        filling.entries -= 1
        self.order = order_of(place)
        return place

    def next(self, reset_number: int) -> Begin | None:
        """Return which region is to be begun, the oldest; None where none can be. Its lap counts
        only once it is begun."""
        region = min(range(len(self._laps)), key=self._laps.__getitem__)
        self._last_lap += 1
        if max(self._laps[region], self._last_lap) >= LAP_MAX:
            return None
        return Begin(self.device, region, self._last_lap, self._laps[region], reset_number)

    def vacate(self, begin: Begin) -> None:
        """Have blocks of the region placed anew in it (`again`)."""
        if self._next is None or self._next.lap != begin.lap:
            self._next = _Filling(begin, self._found)

    def skip(self, region: int) -> None:
        """Begin a region no more: it failed."""
        self._laps[region] = LAP_MAX
        self._next = None

    def begun(self, begin: Begin, reset_number: int) -> None:
        """Fill the region from here on; not when something was reset meanwhile: its header does
        not say so."""
        self.vacate(begin)
        self._filling = self._next if begin.reset_number == reset_number else None
        self._next = None
        self._laps[begin.region] = begin.lap
        self.wants_region = False

    def reset(self) -> None:
        """Put nothing more into the region that is being filled: its header does not know of the
        reset."""
        self._filling = None


def _pages(length: int) -> int:
    return -(-length // DISK_PAGE)
