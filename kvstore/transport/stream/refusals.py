"""Remembers which nodes answer and do not serve this client: secrets or certificates differ.

Such a node is not silent, and may well serve other clients of this host.
"""

from __future__ import annotations

import ssl

from kvstore.nodedir import Announcement
from kvstore.protocol.stream import WireError

REFUSALS_MAX = 1024
"""Nodes that are remembered; beyond, all are forgotten."""


class Refusals:
    """By node and epoch. Thread-safe so far as that something may be forgotten."""

    def __init__(self) -> None:
        self._nodes: set[tuple[int, int]] = set()

    def __contains__(self, node: Announcement) -> bool:
        return (node.node_id, node.epoch) in self._nodes

    def heard(self, node: Announcement, error: Exception) -> None:
        """A connection to that start of `node` has failed like this."""
        if isinstance(error, WireError | ssl.SSLError):
            if len(self._nodes) >= REFUSALS_MAX:
                self._nodes.clear()
            self._nodes.add((node.node_id, node.epoch))

    def over(self, node: Announcement) -> None:
        """That start of `node` serves this client."""
        self._nodes.discard((node.node_id, node.epoch))
