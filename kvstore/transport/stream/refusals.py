"""Remembers which nodes answer and do not serve this client, and why: secrets or certificates
differ, or the node takes no more connections.

Such a node is not silent, and may well serve other clients of this host.
"""

from __future__ import annotations

import ssl

from kvstore.nodedir import Announcement
from kvstore.protocol.stream import WireError
from kvstore.protocol.stream_handshake import SecretError

REFUSALS_MAX = 1024
"""Nodes that are remembered; beyond, all are forgotten."""


class Refusals:
    """Refusals by node and epoch. Threads may use it at once; at worst an entry is forgotten."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], tuple[str, str]] = {}

    def __contains__(self, node: Announcement) -> bool:
        return self.why(node) is not None

    def why(self, node: Announcement) -> tuple[str, str] | None:
        """Return why that start of `node` did not serve this client when it was last asked
        (`secret`, `tls` or `refused`), and the text about it."""
        return self._nodes.get((node.node_id, node.epoch))

    def heard(self, node: Announcement, error: Exception) -> None:
        """Note that a connection to that start of `node` has failed like this."""
        if isinstance(error, SecretError):
            cause = "secret"
        elif isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            cause = "tls"
        elif isinstance(error, WireError | ssl.SSLError):
            cause = "refused"
        else:
            return
        if len(self._nodes) >= REFUSALS_MAX:
            self._nodes.clear()
        self._nodes[node.node_id, node.epoch] = (cause, str(error))

    def over(self, node: Announcement) -> None:
        """Forget the refusals of that start of `node`: it serves this client, or cannot be reached
        at all."""
        self._nodes.pop((node.node_id, node.epoch), None)
