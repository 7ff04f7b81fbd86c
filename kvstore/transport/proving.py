"""Keeps, for each node, whether reading from it by a transport that may not work was proved.

untried -> proving    a thread reads known bytes; others read by another way meanwhile
        -> proved     the node is read like this, until anything goes wrong
        -> left alone for a while that grows with each failure; then it is tried again
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from kvstore.circuit_breaker import Breaker
from kvstore.errors import DeviceError, PeerError
from kvstore.machine import REAL
from kvstore.nodedir import Announcement

log = logging.getLogger("kvstore.client")

RETRY_AFTER_S = 1.0
RETRY_AFTER_MAX_S = 60.0


class ProvedPeer:
    """What is known of one start of one node. The lock is its transport's; its callers hold it."""

    def __init__(self, epoch: int, lock: threading.Lock) -> None:
        self.epoch = epoch
        self.reason = "it has not been tried"
        """Why this peer is not read in this way, for people."""
        self._lock = lock
        self._proving: threading.Event | None = None
        """Set when the attempt under way has ended."""
        self._breaker = Breaker(
            failures_max=1, retry_after_s=RETRY_AFTER_S, retry_after_max_s=RETRY_AFTER_MAX_S
        )

    def prove_soon(
        self, prove: Callable[[], None], give_up: Callable[[str], None], name: str
    ) -> threading.Event | None:
        """Return the attempt that is under way, or start one when it is time; else None. `prove`
        runs in a thread called `name`, raises `PeerError` or `DeviceError` where it fails, and ends
        by deadlines of its own; `give_up` is told why and calls `failed`. The caller has the
        lock."""
        if self._proving is not None:
            return self._proving
        if not self._breaker.allows(time.monotonic()):
            return None
        self._proving = proving = threading.Event()
        try:
            REAL.start_thread(partial(self._prove, prove, give_up, proving), name)
        except RuntimeError as e:  # this host has no more threads to give
            self._proving, self.reason = None, str(e)
            self._breaker.failed(time.monotonic())
        return self._proving

    def _prove(
        self, prove: Callable[[], None], give_up: Callable[[str], None], proving: threading.Event
    ) -> None:
        try:
            prove()
        except (PeerError, DeviceError) as e:
            give_up(str(e))
        except Exception as e:
            # Our bug, but without a pause every read would start the next attempt.
            log.error("an attempt to read from a node raised an unexpected error", exc_info=e)
            give_up(repr(e))
        finally:
            with self._lock:
                self._proving = None
            proving.set()

    def succeeded(self) -> None:
        """Note that it was proved. The caller has the lock."""
        self._breaker.succeeded()

    def failed(self, reason: str) -> int:
        """Leave it alone for a while, and return the level at which that is worth a line in the
        log: the same reason once more is not. The caller has the lock."""
        known, self.reason = self.reason, reason
        self._breaker.failed(time.monotonic())
        return logging.DEBUG if reason == known else logging.WARNING


def say_failed(log: logging.Logger, level: int, node: Announcement, way: str, reason: str) -> None:
    """Log that `node` is not read by `way`, such as "over NVLink"."""
    log.log(level, "node %s on %s is not read %s for now: %s", node.name, node.host, way, reason)
