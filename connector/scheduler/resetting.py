"""Carries out a reset that an engine's user asked for, in the background if it takes longer.

It never fails. Until every node has confirmed it, the engine that asked loads nothing, so
that nothing from before is loaded by it whatever the store does (docs/decisions/0029-reset.md).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from connector.limits import RESET_RETRY_S, RESET_WAIT_S, SAY_EVERY_S, SHUTDOWN_TIMEOUT_S
from kvstore import KVStoreError

if TYPE_CHECKING:
    from connector.scheduler.lazy_store import LazyStore

log = logging.getLogger(f"kvstore.{__name__}")


class Resetter:
    """Carries out resets of one engine's namespaces, on one thread that the first one starts."""

    def __init__(self, store: LazyStore, namespace_ids: Sequence[int]) -> None:
        self._store = store
        self._namespace_ids = namespace_ids
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._asked = self._done = self._tries = 0
        self._saves: set[int] = set()
        """Save jobs from before the last reset: what they save may come after the nodes dropped
        it."""
        self._thread: threading.Thread | None = None
        self._closing = False
        self._said_at = float("-inf")

    @property
    def pending(self) -> bool:
        """Return whether something from before may still be found."""
        return bool(self._saves) or self._done != self._asked

    def ask(self, saves: Iterable[int] = (), wait_s: float = RESET_WAIT_S) -> bool:
        """Reset, and once more when `saves`, jobs in flight, have ended. Waits up to `wait_s` for
        a first try. Return whether the reset is complete then."""
        self._saves |= set(saves)
        with self._lock:
            self._asked += 1
            tries = self._tries
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-reset", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._tries != tries, wait_s)
        return not self.pending

    def in_flight(self, jobs: Iterable[int]) -> None:
        """Take note of the save jobs in flight, from time to time; never waits."""
        if self._saves:
            self._saves.intersection_update(jobs)
            if not self._saves:
                self.ask(wait_s=0.0)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closing or self._done != self._asked)
                if self._closing:
                    return
                asked = self._asked
            complete = self._try()
            with self._lock:
                self._tries += 1
                if complete:
                    self._done = asked
                self._changed.notify_all()
                if not complete:
                    self._changed.wait_for(lambda: self._closing, RESET_RETRY_S)

    def _try(self) -> bool:
        try:
            store = self._store.get()
            if store is None:
                self._say("there is no store")
                return False
            result = store.reset(self._namespace_ids)
        except KVStoreError as e:
            self._say(e)
            return False
        except Exception:
            log.exception("a reset failed")
            return False
        if not result:
            self._say(result)
            return False
        log.info("reset of the store: %s", result)
        return True

    def _say(self, why: object) -> None:
        now = time.monotonic()
        if now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            log.warning(
                "the reset of the store is not complete: %s. It is tried again; until then this "
                "engine loads nothing, but others may find what nodes have not dropped yet",
                why,
            )

    def close(self) -> None:
        """Give up what is not done; waits at most `SHUTDOWN_TIMEOUT_S`."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(SHUTDOWN_TIMEOUT_S)
