"""Keeps objects made of files (secrets, certificates), and remakes them when the files change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from kvstore.errors import UsageError

log = logging.getLogger("kvstore")
T_co = TypeVar("T_co", covariant=True)
LOOK_EVERY_S = SETTLED_S = 1.0
"""A file that was written less than this time ago may be half written."""
WARNED_EVERY_S = 30.0


class Renewed(Generic[T_co]):
    """Holds what `make` makes of `files`. It raises what `make` raises the first time. Files that
    cannot be used later leave the old value in place, with a warning now and then."""

    def __init__(self, files: Sequence[Path], make: Callable[[], T_co]) -> None:
        self._files, self._make = files, make
        self._look_at = self._warn_at = float("-inf")
        self._seen: object = None
        with suppress(OSError):  # `make` says it better
            self._seen, _ = self._stamps()
        self._value = make()

    def get(self) -> T_co:
        """Return what is made of the files as they were `LOOK_EVERY_S` ago, or are now."""
        now = time.monotonic()
        if now < self._look_at:
            return self._value
        self._look_at = now + LOOK_EVERY_S
        try:
            seen, age_s = self._stamps()
            if seen != self._seen and not 0 <= age_s < SETTLED_S:
                self._value, self._seen = self._make(), seen
        except (OSError, UsageError) as e:
            if now >= self._warn_at:
                self._warn_at = now + WARNED_EVERY_S
                names = ", ".join(map(str, self._files))
                log.warning("%s changed; what it was before is used on: %s", names, e)
        return self._value

    def _stamps(self) -> tuple[object, float]:
        """Return what tells these files from others, and how long ago one was written to."""
        found = [file.stat() for file in self._files]
        stamps = [(s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in found]
        return stamps, time.time() - max(s.st_ctime for s in found)
