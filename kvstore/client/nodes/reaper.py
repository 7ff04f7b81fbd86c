"""Keeps house on a thread for a client that asks nothing meanwhile: dead nodes are let go, and what
nobody has any more is given back to the others."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

EVERY_S = 0.5
log = logging.getLogger("kvstore.client")


class Reaper:
    """Does `job`, a method, every `EVERY_S` from `start` to `close`; an owner that was dropped
    without a `close` is not kept alive by it."""

    def __init__(self, job: Callable[[], None], first_after_s: float = EVERY_S) -> None:
        self._pause_s = first_after_s
        self._job = weakref.WeakMethod(job)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Safe to call again."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                thread = threading.Thread(target=self._run, name="kvstore-reaper", daemon=True)
                with suppress(RuntimeError):  # no more threads: the next call is another try
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        while not self._closed.wait(self._pause_s):
            self._pause_s = EVERY_S
            job = self._job()
            if job is None:
                return
            try:
                job()
            except Exception:  # whatever it is: the next dead node must be let go too
                log.exception(
                    "dead nodes of this host were not let go; tried again in %g s", EVERY_S
                )
            del job

    def close(self) -> None:
        self._closed.set()
