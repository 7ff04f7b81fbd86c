"""What a session's thread does for nodes of other hosts between calls."""

from types import SimpleNamespace

import pytest

from kvstore.client.nodes.remote import RemoteNodes


@pytest.mark.parametrize(("vram", "wanted"), [(False, []), (True, ["vram"])])
def test_memory_of_nodes_in_vram_is_looked_after_where_there_is_any(vram, wanted):
    done = []
    peers = RemoteNodes.__new__(RemoteNodes)
    peers.vram = SimpleNamespace(look=lambda: done.append("vram")) if vram else None
    peers.look_after()
    assert done == wanted
