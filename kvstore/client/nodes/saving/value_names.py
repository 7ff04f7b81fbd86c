"""Tells the nodes of this host what values are called, so that `kvstore ls` can show it."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.batches import in_batches
from kvstore.limits import NAME_BYTES_MAX, NAMES_MESSAGE_BYTES_MAX, NAMES_WAITING_MAX
from kvstore.protocol.control import Op, join_keys
from kvstore.types import KEY_BYTES, Key

if TYPE_CHECKING:
    from kvstore.client.nodes.saving.host_writer import HostWriter


class ValueNames:
    """Tells nodes what users call their values. Thread-safe. A put costs an entry in a queue: nodes
    are told by the reaper and at the end, one way. What cannot be said now is said the next time,
    and is lost without harm."""

    def __init__(self, writer: HostWriter) -> None:
        self._writer = writer
        # Without a lock: each use of it is one call.
        self.waiting: deque[tuple[Key, str | bytes]] = deque(maxlen=NAMES_WAITING_MAX)
        """Keys that were saved, with their names; those above `NAME_BYTES_MAX` are not told."""

    def tell(self) -> None:
        """Tell every node of this host what waits; each ignores what it does not have."""
        names: dict[Key, bytes] = {}
        with suppress(IndexError):  # another thread was here
            for _ in range(len(self.waiting)):
                key, name = self.waiting.popleft()
                raw = name.encode() if isinstance(name, str) else name
                if len(raw) <= NAME_BYTES_MAX:
                    names[key] = raw
        if not names:
            return
        links = self._writer.links()
        for part in in_batches(
            list(names),
            NAMES_WAITING_MAX,
            lambda key: KEY_BYTES + len(names[key]),
            NAMES_MESSAGE_BYTES_MAX,
        ):
            told = join_keys(part), [names[key] for key in part]
            if not all(link.control.say(Op.NAMES, *told) for link in links):
                self.waiting.extend(zip(part, told[1], strict=True))
