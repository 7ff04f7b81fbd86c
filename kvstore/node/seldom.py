"""Logs a recurring warning at most once per interval, with the number suppressed."""

from __future__ import annotations

import logging
import threading
import time

WARNED_EVERY_S = 30.0
"""Pause between two warnings of the same kind."""
KINDS_MAX = 64
"""Kinds of warnings that are remembered; beyond it the oldest is forgotten."""


class Seldom:
    """Logs a recurring warning at most once per interval, with the number suppressed. Thread-safe.
    The kind of a warning is its text before the arguments are put in."""

    def __init__(self, log: logging.Logger, every_s: float = WARNED_EVERY_S) -> None:
        self._log = log
        self._every_s = every_s
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}
        """Kind -> when it was logged last, and how many were suppressed since."""

    def warning(self, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log the warning, unless the same was logged less than `every_s` ago: then it is
        counted."""
        now = time.monotonic()
        with self._lock:
            said_at, held = self._kinds.get(text, (float("-inf"), 0))
            if now < said_at + self._every_s:
                self._kinds[text] = said_at, held + 1
                return
            self._kinds.pop(text, None)
            if len(self._kinds) >= KINDS_MAX:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[text] = now, 0
        more = f" ({held} more like this since the last such line)" if held else ""
        self._log.warning(text + more.replace("%", "%%"), *args, exc_info=exc_info)
