"""Limits how much of a node the saves of one client host may have reserved at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import DeadlineError


class Shares:
    """The share of each client host, and what of it is taken, in bytes. Thread-safe."""

    def __init__(self, share_bytes: int) -> None:
        self._share_bytes = share_bytes
        self._taken: dict[str, int] = {}
        self._changed = threading.Condition()

    @contextmanager
    def of(self, client: str, size_bytes: int, deadline: float) -> Iterator[None]:
        """Take `size_bytes` of the client's share while this lasts; a save larger than the share
        is taken when the client has no other. Raises `DeadlineError` when its other saves leave no
        room by `deadline` (seconds of `time.monotonic`)."""
        size_bytes = max(size_bytes, 1)  # so that whoever is in `_taken` has some

        def room() -> bool:
            taken = self._taken.get(client, 0)
            return taken == 0 or taken + size_bytes <= self._share_bytes

        with self._changed:
            if not self._changed.wait_for(room, max(deadline - time.monotonic(), 0.0)):
                raise DeadlineError(f"timed out: other saves of {client} take all of its share")
            self._taken[client] = self._taken.get(client, 0) + size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken[client] -= size_bytes
                if not self._taken[client]:
                    del self._taken[client]
                self._changed.notify_all()
