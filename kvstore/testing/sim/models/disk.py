"""Models the file of a disk device: pages that are not synced yet, power losses, and drives that
lose writes, put them elsewhere, flip bits and fail."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

PAGE, SECTOR = 4096, 512
_BLANK = bytes(PAGE)


class PowerLossError(Exception):
    """The power failed: nothing of the process goes on. Not an `OSError`, which is handled."""


class SimDisk:
    """A `BlockFile` in memory. What is written is read back at once, as from a drive's cache, and
    survives a power loss for certain only when it was synced."""

    def __init__(self, size_bytes: int, rng: random.Random) -> None:
        self.name, self.size_bytes = "simulated disk", size_bytes
        self.pages: dict[int, bytes] = {}
        """What is durable, by page; others are blank."""
        self.pending: dict[int, list[bytes]] = {}
        """What was written to a page since the last sync, the oldest first."""
        self.unreadable: set[int] = set()
        """Pages whose reads fail."""
        self.failing_writes = self.failing_syncs = 0
        """How many of the next ones fail."""
        self.lost_writes = self.misdirected_writes = 0
        """How many of the next pages are said to be written and are not, or go elsewhere."""
        self.lose_page = -1
        """A page whose writes are all lost."""
        self.syncs = self.skipped_syncs = 0
        """How many there were, and how many of the next do nothing."""
        self.power_fails_in: int | None = None
        """After so many pages and syncs more the power fails, in the middle of the next."""
        self.trouble_now: str | None = None
        self._rng = rng
        self._closed = False

    # --- what a BlockFile does ----------------------------------------------------------

    def read(self, offset: int, into: memoryview) -> None:
        for page in self._pages(offset, len(into)):
            if page in self.unreadable:
                raise OSError(errno.EIO, "the page cannot be read", self.name)
            at = page * PAGE - offset
            into[at : at + PAGE] = self.page(page)

    def write(self, offset: int, parts: Sequence[Buffer]) -> None:
        raw = b"".join(parts)
        pages = self._pages(offset, len(raw))
        if self.failing_writes:
            self.failing_writes -= 1
            raw = raw[: self._rng.randrange(len(pages)) * PAGE]  # some may be there
            self._write(offset, raw)
            raise OSError(errno.EIO, "the write failed", self.name)
        self._write(offset, raw)

    def sync(self) -> None:
        self._check()
        self._step()
        self.syncs += 1
        if self.failing_syncs:
            self.failing_syncs -= 1
            self._land()  # what did not land is not tried again, but still read
            raise OSError(errno.EIO, "the sync failed", self.name)
        if self.skipped_syncs:
            self.skipped_syncs -= 1
            return
        for page, versions in self.pending.items():
            self.pages[page] = versions[-1]
        self.pending.clear()

    def trouble(self) -> str | None:
        return self.trouble_now

    def close(self) -> None:
        self._closed = True

    # --- what befalls it -------------------------------------------------------------------

    def power_loss(self) -> None:
        """Let any of the pages written since the last sync land, in any order, whole or in part.
        The disk can be opened again afterwards."""
        self._land()
        self._closed, self.power_fails_in = False, None
        self.failing_writes = self.failing_syncs = 0

    def flip(self, page: int, bit: int) -> None:
        """Flip a bit of what is on the disk."""
        for versions in [self.pending.get(page) or [self.pages.get(page, _BLANK)]]:
            raw = bytearray(versions[-1])
            raw[bit // 8 % PAGE] ^= 1 << bit % 8
            versions[-1] = self.pages[page] = bytes(raw)

    def page(self, page: int) -> bytes:
        """Return what is read from a page now."""
        versions = self.pending.get(page)
        return versions[-1] if versions else self.pages.get(page, _BLANK)

    def _land(self) -> None:
        rng = self._rng
        # A drive may have written nearly nothing of it, or nearly all.
        lost, whole = rng.choice([(0.25, 0.5), (0.25, 0.5), (0.02, 0.9), (0.9, 0.95), (1.0, 1.0)])
        for page, versions in self.pending.items():
            kind = rng.random()
            if kind < lost:
                continue
            if kind < whole:
                self.pages[page] = versions[-1]
                continue
            rng.shuffle(versions)
            now = bytearray(self.pages.get(page, _BLANK))
            for version in versions[: rng.randint(0, len(versions))]:
                torn = rng.getrandbits(PAGE // SECTOR) if rng.random() < 0.5 else -1
                for sector in range(PAGE // SECTOR):
                    if torn >> sector & 1:
                        part = slice(sector * SECTOR, (sector + 1) * SECTOR)
                        now[part] = version[part]
            self.pages[page] = bytes(now)
        self.pending.clear()

    def _write(self, offset: int, raw: bytes) -> None:
        for number, page in enumerate(self._pages(offset, len(raw))):
            self._step()
            part = raw[number * PAGE : (number + 1) * PAGE]
            if self.lost_writes or page == self.lose_page:
                self.lost_writes = max(self.lost_writes - 1, 0)
            elif self.misdirected_writes:
                self.misdirected_writes -= 1
                self.pending.setdefault(self._rng.randrange(self.size_bytes // PAGE), []).append(
                    part
                )
            else:
                self.pending.setdefault(page, []).append(part)

    def _pages(self, offset: int, size_bytes: int) -> range:
        self._check()
        if offset % PAGE or size_bytes % PAGE:
            raise OSError(errno.EINVAL, f"{offset} or {size_bytes} is not in pages", self.name)
        if offset + size_bytes > self.size_bytes:
            raise OSError(errno.EIO, f"the file ends at {self.size_bytes}", self.name)
        return range(offset // PAGE, (offset + size_bytes) // PAGE)

    def _step(self) -> None:
        if self.power_fails_in is not None:
            if not self.power_fails_in:
                raise PowerLossError
            self.power_fails_in -= 1

    def _check(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the file is closed", self.name)
