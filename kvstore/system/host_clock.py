"""Moments that one host compares later, perhaps in another process: how long ago was that?

The wall clock cannot say: it is set, by hours too. What a process wrote down it compares with
clocks of the kernel, which nobody sets and which all processes of one boot share:

    ran      CLOCK_MONOTONIC: the time that the host ran, less what it was suspended. A node that
             could give no sign of life for eight hours since the machine slept is not long dead
    passed   CLOCK_BOOTTIME: all the time, for what happens meanwhile on other hosts

Both begin anew with each boot, so a moment has the boot's id. Of another boot, and where the
kernel does not say which boot it is, only the wall clock is left: `wall_age_s`.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import uuid
from functools import cache
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOMENT = struct.Struct("<16sQQ")
MOMENT_BYTES = _MOMENT.size
UNKNOWN_BOOT = bytes(16)
SLACK_S = 1.0
"""A file's time may be ahead of the clock by this much, because file systems count in coarse
steps."""


class Moment(NamedTuple):
    """A moment of one boot of one host."""

    boot: bytes
    ran_ms: int
    passed_ms: int

    def pack(self) -> bytes:
        return _MOMENT.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes) -> Moment | None:
        """Return the moment in `raw`; None when it has none that can be compared."""
        if len(raw) != MOMENT_BYTES:
            return None
        found = cls(*_MOMENT.unpack(raw))
        return found if found.boot != UNKNOWN_BOOT else None


def now() -> Moment:
    """Return this moment."""
    passed_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return Moment(_boot(), time.monotonic_ns() // 10**6, passed_ns // 10**6)


@cache
def _boot() -> bytes:
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return UNKNOWN_BOOT


def ran_s(since: Moment | None, until: Moment) -> float | None:
    """Return how long the host ran from `since` to `until`; None when that cannot be told. A moment
    in the future is not believed."""
    if since is None or since.boot != until.boot or since.ran_ms > until.ran_ms:
        return None
    return (until.ran_ms - since.ran_ms) / 1e3


def passed_s(since: Moment | None, until: Moment) -> float | None:
    """Return how much time passed from `since` to `until`; None when that cannot be told."""
    if since is None or since.boot != until.boot or since.passed_ms > until.passed_ms:
        return None
    return (until.passed_ms - since.passed_ms) / 1e3


def wall_age_s(changed_at: float) -> float:
    """Return how old a file is by the wall clock, for want of better: 0 when its time is in the
    future, since the clock was set back then."""
    return max(time.time() - changed_at, 0.0)


def age_s(written: Moment | None, changed_at: float) -> float:
    """Return how long the host has run since somebody left a sign of life: the moment that is
    `written` there, or where that says nothing the time of the file."""
    ran = ran_s(written, now())
    return wall_age_s(changed_at) if ran is None else ran


def set_right(path: Path) -> None:
    """Set the time of a file of this user's to now if it is in the future: the clock was set back,
    and for as long as that the file would be new."""
    with contextlib.suppress(OSError):
        if path.lstat().st_mtime > time.time() + SLACK_S:
            os.utime(path, follow_symlinks=False)
