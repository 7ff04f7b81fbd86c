"""Chooses the node of this host that takes a block, by who has it and who has room."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.saving.link import NodeLink
from kvstore.client.nodes.saving.placement import Home, homes_of
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.segment.header import KEY_PART, fields
from kvstore.types import Key

ROOM_MARGIN_BYTES = 512 << 20
"""A node with less room than that is asked before each save: others can fill it while an answer
of `ROOM_BELIEVED_S` ago is believed. One that is full is not: it evicts, which makes no room."""
ROOM_BELIEVED_S = 0.05
"""How long what nodes said of their room is used, less what was sent there since."""


class Homes:
    """Remembers what room the nodes of this host have. Thread-safe so far as that a save may go to
    a node that has less than another."""

    def __init__(self, nodes: NodeDirectory) -> None:
        self._nodes = nodes
        self._now = nodes.machine.monotonic
        self._free: dict[NodeLink, int] = {}
        """Bytes of room that nodes said they have, less what was sent there since."""
        self._free_until = 0.0

    def of(
        self, keys: Sequence[Key], sizes: Sequence[int], links: Sequence[NodeLink]
    ) -> list[NodeLink]:
        """Return who takes each of the blocks, of these sizes in bytes."""
        by_id = {link.announcement.node_id: link for link in links}
        blocks = list(zip(keys, sizes, strict=True))
        homes = homes_of(blocks, self.holders(keys), self._homes(links, min(sizes, default=0)))
        chosen = [by_id[node_id] for node_id in homes]
        sent: dict[NodeLink, int] = {}
        for link, size_bytes in zip(chosen, sizes, strict=True):
            sent[link] = sent.get(link, 0) + size_bytes
        for link, size_bytes in sent.items():
            self._free[link] = max(self._free.get(link, 0) - size_bytes, 0)
        return chosen

    def _homes(self, links: Sequence[NodeLink], least: int) -> list[Home]:
        """Return the nodes to save to, of blocks of at least `least` bytes."""
        now = self._now()
        if now >= self._free_until or not all(link in self._free for link in links):
            self._free = {link: link.control.directory.room() for link in links}
            self._free_until = now + ROOM_BELIEVED_S
        free = self._free
        for link in links:
            if least <= free.get(link, 0) < ROOM_MARGIN_BYTES:
                # What this client has sent may not have come there yet.
                free[link] = min(free[link], link.control.directory.room())
        return [
            Home(
                link.announcement.node_id,
                link.announcement.size_bytes,
                free.get(link, 0),
                min(link.announcement.size_bytes, VALUE_BYTES_MAX),
            )
            for link in links
        ]

    def holders(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Return ids of the nodes whose tables of hints lead to the block; hints forget some."""
        holders: dict[Key, int] = {}
        for attached in self._nodes.mapped:
            hinted = attached.shm.hinted
            for key in keys:
                image = hinted(key)[1]
                if image[KEY_PART] == key and fields(image) is not None:
                    holders[key] = attached.announcement.node_id
        return holders
