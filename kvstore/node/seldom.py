"""Warns of what happens again and again once in a while, and says how often it was held back."""

from __future__ import annotations

import logging
import threading
import time

WARNED_EVERY_S = 30.0
"""Between two warnings of the same kind: each tells of the trouble, and a log has to last."""
KINDS_MAX = 64
"""Kinds of warnings that one remembers; beyond it the first of them is forgotten."""


class Seldom:
    """Logs each kind of warning seldom, with how many there were. Thread-safe. A kind is a text
    before the arguments are put in."""

    def __init__(self, log: logging.Logger, every_s: float = WARNED_EVERY_S) -> None:
        self._log = log
        self._every_s = every_s
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}
        """By kind when it was said last, and how often it was held back since."""

    def warning(self, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Warn, unless the same was said less than `every_s` ago: then it is counted."""
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
