"""Reads the announcements of nodes in the index and checks them before anybody uses them."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.index.base import Index
from kvstore.nodedir import Announcement, Stranger, stranger
from kvstore.record import RecordSigner


def announced_node(
    index: Index, node_id: int, signer: RecordSigner | None = None
) -> Announcement | None:
    """Return the announcement of `node_id`; None when there is none that counts: of this version,
    whole and under its own id.

    With a `signer`, only what it signed counts: who can write into the index could name another
    address. Raises `IndexUnavailableError`.
    """
    return _believed(node_id, index.node(node_id), signer)


def announced_nodes(index: Index, signer: RecordSigner | None = None) -> dict[int, Announcement]:
    """Return the announcements of all nodes that count, by node id; as `announced_node`
    otherwise."""
    return nodes_among(index.nodes(), signer)


def nodes_among(
    raws: Mapping[int, bytes], signer: RecordSigner | None = None
) -> dict[int, Announcement]:
    """Return those announcements of `raws`, the answer of `Index.nodes`, that `announced_node`
    accepts."""
    believed = {node_id: _believed(node_id, raw, signer) for node_id, raw in raws.items()}
    return {node_id: word for node_id, word in believed.items() if word is not None}


def strangers_among(raws: Mapping[int, bytes]) -> list[Stranger]:
    """Return the nodes in the answer `raws` of `Index.nodes` that are of another version: to be
    named, not used."""
    return [other for raw in raws.values() if (other := stranger(raw)) is not None]


def _believed(node_id: int, raw: bytes | None, signer: RecordSigner | None) -> Announcement | None:
    if raw is None or not (signer is None or signer.announced(raw)):
        return None
    word = Announcement.unpack(raw)
    return word if word is not None and word.node_id == node_id else None
