"""Tells the nodes of this host what values are called, so that `kvstore ls` can show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.batches import in_batches
from kvstore.limits import NAME_BYTES_MAX, NAMES_MESSAGE_BYTES_MAX, NAMES_WAITING_MAX
from kvstore.protocol.control import Op, join_keys
from kvstore.types import KEY_BYTES, Key

if TYPE_CHECKING:
    from kvstore.client.local.host_writer import HostWriter


class ValueNames:
    """Tells nodes what users call their values. Thread-safe. A put costs an entry in a dictionary:
    nodes are told by the reaper and at the end, one way. What cannot be said now is said the next
    time, and is lost without harm."""

    def __init__(self, writer: HostWriter) -> None:
        self._writer = writer
        # Without a lock: a key has one name, and each use of the dictionary is one call.
        self._waiting: dict[Key, bytes] = {}

    def note(self, keys: Sequence[Key], names: Sequence[str | bytes]) -> None:
        """Note the names of values that were saved; those above `NAME_BYTES_MAX` are not told."""
        for key, name in zip(keys, names, strict=True):
            if len(self._waiting) >= NAMES_WAITING_MAX:
                return
            raw = name.encode() if isinstance(name, str) else name
            if len(raw) <= NAME_BYTES_MAX:
                self._waiting[key] = raw

    def tell(self) -> None:
        """Tell every node of this host what waits; each ignores what it does not have."""
        if not self._waiting:
            return
        waiting = self._waiting.copy()
        links = self._writer.links()
        for part in in_batches(
            list(waiting),
            NAMES_WAITING_MAX,
            lambda key: KEY_BYTES + len(waiting[key]),
            NAMES_MESSAGE_BYTES_MAX,
        ):
            names = [waiting[key] for key in part]
            if all(link.control.say(Op.NAMES, join_keys(part), names) for link in links):
                for key in part:
                    self._waiting.pop(key, None)
