"""Tells the nodes of this host what values are called, so that `kvstore ls` can show it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.batches import in_batches
from kvstore.limits import NAME_BYTES_MAX, NAMES_MESSAGE_BYTES_MAX, NAMES_WAITING_MAX
from kvstore.protocol.control import Op, join_keys
from kvstore.system.fork import in_each_child
from kvstore.types import KEY_BYTES, Key

if TYPE_CHECKING:
    from kvstore.client.local.host_writer import HostWriter


class ValueNames:
    """Tells nodes what users call their values. Thread-safe. A put costs an entry in a dictionary:
    nodes are told by the reaper and at the end, one way. What cannot be said now is said the next
    time, and is lost without harm."""

    def __init__(self, writer: HostWriter) -> None:
        self._writer = writer
        self._lock = threading.RLock()
        in_each_child(self)
        self._waiting: dict[Key, str | bytes] = {}

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()  # a thread of the parent may have had it

    def note(self, keys: Sequence[Key], names: Sequence[str | bytes]) -> None:
        """Note the names of values that were saved; those above `NAME_BYTES_MAX` are not told."""
        noted: Iterator[tuple[Key, str | bytes]] = zip(keys, names, strict=True)
        if max(map(len, names), default=0) > NAME_BYTES_MAX:
            noted = ((key, name) for key, name in noted if len(name) <= NAME_BYTES_MAX)
        with self._lock:
            room = max(NAMES_WAITING_MAX - len(self._waiting), 0)
            self._waiting.update(islice(noted, room))

    def tell(self) -> None:
        """Tell every node of this host what waits; each ignores what it does not have."""
        if not self._waiting:
            return
        with self._lock:
            noted, self._waiting = self._waiting, {}
        named = [(key, n.encode() if isinstance(n, str) else n) for key, n in noted.items()]
        waiting = {key: raw for key, raw in named if len(raw) <= NAME_BYTES_MAX}
        links = [link for link in self._writer.links() if not link.reads_only]
        for part in in_batches(
            list(waiting),
            NAMES_WAITING_MAX,
            lambda key: KEY_BYTES + len(waiting[key]),
            NAMES_MESSAGE_BYTES_MAX,
        ):
            names = [waiting[key] for key in part]
            if not all(link.control.say(Op.NAMES, join_keys(part), names) for link in links):
                with self._lock:
                    again: dict[Key, str | bytes] = dict(zip(part, names, strict=True))
                    self._waiting = again | self._waiting
