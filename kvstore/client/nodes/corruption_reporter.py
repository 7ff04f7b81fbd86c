"""Tells a node that one of its blocks does not have the checksum that was saved with it."""

from __future__ import annotations

from contextlib import suppress

from kvstore.client.nodes.control import ControlChannel
from kvstore.errors import PeerError
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement, NodeDir
from kvstore.protocol.control import Op
from kvstore.types import Key

REPORT_AGAIN_S = 1.0
"""After a report that could not be delivered: a node that hangs must not slow every miss."""


class CorruptionReporter:
    """Tells a node of a damaged block: one message, one way, over a connection of its own, for the
    block may be of any node here, and this is rare. The node looks for itself before it drops
    anything (rule 2)."""

    def __init__(self, timeout_s: float, *, machine: Machine = REAL) -> None:
        self._timeout_s = timeout_s
        self._machine = machine
        self._not_before = 0.0

    def report(self, directory: NodeDir, announcement: Announcement, key: Key) -> None:
        """Never raises for a peer's fault; what could not be said now, the next reader says."""
        now = self._machine.monotonic()
        if now < self._not_before:
            return
        node = (announcement.node_id, announcement.epoch)
        channel = ControlChannel(
            directory, node, self._timeout_s, lambda: ((), ()), machine=self._machine
        )
        try:
            said = channel.say(Op.SUSPECT, key)
        except PeerError:
            said = False
        finally:
            with suppress(PeerError):
                channel.close()
        if not said:
            self._not_before = now + REPORT_AGAIN_S
