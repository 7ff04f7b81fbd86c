"""Opens the store on a helper thread when it is first needed, and again later if that fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from connector.copiers.base import Holding, nothing_held
from connector.limits import STORE_RETRY_S, Clock
from kvstore import KVStoreError, Namespace, UsageError
from kvstore.spi import BlockStore, PoolMapping

log = logging.getLogger(f"kvstore.{__name__}")

Opener = Callable[[], BlockStore]


class LazyStore:
    """Opens the store on first use and keeps it.

    `get` may take as long as the store's own deadlines, so only helper threads
    call it; an engine thread uses `opened`. A store that cannot be opened is
    left alone for `STORE_RETRY_S`, then tried again: an engine that starts
    before its memory node must come to use it without a restart.
    """

    def __init__(self, opener: Opener, clock: Clock = time.monotonic) -> None:
        self.device: int | None = None
        """Ordinal of the device whose memory copiers take; see `KVMemory`."""
        self.holding: Holding = nothing_held
        """See `KVMemory.holding`."""
        self._opener = opener
        self._clock = clock
        self._lock = threading.Lock()
        self._store: BlockStore | None = None
        self._not_before = float("-inf")
        self._closed = False
        self._logged = False
        self._logged_bug = False

    def get(self) -> BlockStore | None:
        """Return the store, None while it cannot be opened or after `close`."""
        if self._store is not None or self._closed:
            return None if self._closed else self._store
        with self._lock:
            if self._store is None and not self._closed and self._clock() >= self._not_before:
                self._store = self._open()
            return None if self._closed else self._store

    def warm_up(self, namespace: Namespace, *, connect: bool = False) -> None:
        """Open the store, map this host's memory and ask the index for what is not there: else the
        first request waits for all that. With `connect`, connect to this host's nodes as well.

        Takes as long as `get`, and never raises.
        """
        try:
            store = self.get()
            if store is not None:
                store.match([namespace.value_key("warm-up")])
                if connect:
                    store.touch([])
        except Exception:
            log.exception("warm-up failed")

    def mappings(self) -> Sequence[PoolMapping]:
        """See `BlockStore.mappings`; opens the store like `get`. Also while it is being closed:
        what goes down to host memory then is copied there."""
        store = self._store if self._closed else self.get()
        return () if store is None else store.mappings()

    @property
    def opened(self) -> BlockStore | None:
        """Return the store when it is open already; never waits."""
        return self._store

    def _open(self) -> BlockStore | None:
        try:
            store = self._opener()
        except UsageError:
            log.exception("the store's settings are wrong; nothing is loaded or saved")
            self._not_before = float("inf")
            return None
        except (KVStoreError, OSError) as e:
            if not self._logged:
                log.warning(
                    "the store cannot be opened, trying again every %g s: %s", STORE_RETRY_S, e
                )
            self._logged = True
            self._not_before = self._clock() + STORE_RETRY_S
            return None
        except Exception:  # a bug, of ours or of a package: not one more at every load
            if not self._logged_bug:
                log.exception(
                    "opening the store failed in a way that nobody expected, trying again every "
                    "%g s",
                    STORE_RETRY_S,
                )
            self._logged_bug = True
            self._not_before = self._clock() + STORE_RETRY_S
            return None
        log.info("store opened")
        return store

    def close(self) -> None:
        """Close the store if it was opened. Safe to call twice."""
        with self._lock:
            closing, self._closed = not self._closed, True
            store = self._store
        if store is not None and closing:
            store.close()
            self._store = None
