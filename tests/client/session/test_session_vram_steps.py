"""Blocks in VRAM as a session views them, without a device: which node is asked, and when."""

from types import SimpleNamespace

import pytest

from kvstore.client.base import BlockRef
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.client.session import BlockSession
from kvstore.types import Location

NOW = 100.0
REF = BlockRef(b"k" * 32, b"r")
OPEN = frozenset({(7, 1), (8, 2)})
PLACE = Location(7, 1, 0, 3, 1, 0, 3, 0)


class Vram:
    """In the place of `VramNodes`: which nodes there are, and when that was asked."""

    def __init__(self, *nodes):
        self.nodes = set(nodes)
        self.watched = False
        self.asked_at = []

    def opened(self):
        return OPEN if self.watched else frozenset()

    def node(self, node_id, epoch, now):
        self.asked_at.append(now)
        return f"node {node_id}" if (node_id, epoch) in self.nodes else None

    def view(self, announcement, key, location):
        return (announcement, key, location)


def session_of(vram, location=None):
    session = object.__new__(BlockSession)
    session.remote = object.__new__(RemoteNodes)
    session.remote.vram = vram
    session.reader = SimpleNamespace(remote_location=lambda key, record: location)
    session._now = lambda: NOW
    return session


def test_who_asks_what_is_open_has_it_opened_from_then_on():
    vram = Vram()
    assert session_of(vram).open_vram() == OPEN
    assert vram.watched
    assert session_of(None).open_vram() == frozenset()


@pytest.mark.parametrize(
    ("vram", "location"), [(Vram((7, 1)), None), (Vram((8, 1)), PLACE), (None, PLACE)]
)
def test_no_block_is_viewed_whose_place_or_node_is_unknown(vram, location):
    assert session_of(vram, location).device_view(REF) is None


def test_a_block_is_viewed_in_the_memory_of_its_node():
    vram = Vram((7, 1))
    assert session_of(vram, PLACE).device_view(REF) == ("node 7", REF.key, PLACE)
    assert vram.asked_at == [NOW]
