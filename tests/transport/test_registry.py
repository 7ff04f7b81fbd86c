"""What registers a transport: its own file, and a line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_parts import remote_nodes
from stores import announcement

from kvstore.client.nodes.readability import Readability
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.errors import UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.nodedir import Announcement
from kvstore.transport.base import Read, Transport, Wanted
from kvstore.transport.registry import TRANSPORTS, Registered, allowed, counters
from kvstore.types import Location

PIGEON = '''
from kvstore.transport.base import Outcome, Read, Transport

MADE = []


class Pigeon(Transport):
    """Answers as the address says that the node announces."""

    name = "pigeon"

    def __init__(self, stream, layout_of, device):
        MADE.append(self)
        self.prepared, self.closed = [], False

    def usable(self, node):
        return node.transports["pigeon"] != "lost"

    def ready(self, node):
        self.prepared.append(node)
        return node.transports["pigeon"] != "tired"

    def read(self, node, wanted, deadline):
        for one in wanted:
            one.into[0][:] = b"p" * one.location.length
        said = node.transports["pigeon"].replace("tired", "hit")
        return [Outcome(Read(said), in_vram=True) for _ in wanted]

    def close(self):
        self.closed = True
'''
CHECKED, UNCHECKED = 1, 0


@pytest.fixture
def pigeon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that a new transport takes: its file, and one line."""
    (tmp_path / "pigeon.py").write_text(PIGEON)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(TRANSPORTS)
    TRANSPORTS.clear()
    TRANSPORTS.update({"pigeon": Registered("pigeon", "Pigeon")} | before)
    yield
    TRANSPORTS.clear()
    TRANSPORTS.update(before)
    sys.modules.pop("pigeon", None)


def reading(**ways: str) -> tuple[RemoteNodes, Announcement]:
    """A reader that may use all there are, and a node that it hears of."""
    word = announcement(node_id=7, transports=ways)
    index = MemoryIndex()
    index.announce(7, word.pack(), 600.0)
    return remote_nodes(index, 0.3, allowed(None)), word


def wanted(checksum: int = CHECKED) -> Wanted:
    location = Location(7, 1, 0, 0, 1, 0, 5, checksum)
    return Wanted(b"k" * 32, location, (memoryview(bytearray(5)),))


def made() -> list[object]:
    return sys.modules["pigeon"].MADE if "pigeon" in sys.modules else []


@pytest.mark.usefixtures("pigeon")
class TestOneMore:
    """A transport that nothing but its file and its line knows of."""

    def test_it_is_read_by_counted_and_closed(self) -> None:
        nodes, _ = reading(pigeon="hit")
        block = wanted()
        (outcome,) = nodes.read([block])
        assert (outcome.read, bytes(block.into[0])) == (Read.HIT, b"ppppp")
        counted = {name: count for name, count in nodes.counts.items() if count}
        assert counted == {"pigeon_hits": 1, "pigeon_bytes": 5}
        nodes.close()
        (one,) = made()
        assert one.closed

    @pytest.mark.parametrize("answer", ["miss", "failed"])
    def test_what_it_did_not_bring_is_counted_as_what_it_says(self, answer: str) -> None:
        nodes, _ = reading(pigeon=answer)
        assert nodes.read([wanted()])[0].read is Read(answer)
        assert nodes.counts[f"pigeon_{'misses' if answer == 'miss' else answer}"] == 1
        nodes.close()

    def test_where_it_makes_no_checksum_a_block_without_one_is_not_read_by_it(self) -> None:
        nodes, word = reading(pigeon="hit")
        readability = Readability(nodes.directory, nodes, verifies=False)
        assert nodes.read([wanted(UNCHECKED)])[0].read is Read.MISS
        assert readability.find(7, word.epoch, 0.0).needs_checksum
        sys.modules["pigeon"].Pigeon.checks_bytes = True
        assert nodes.read([wanted(UNCHECKED)])[0].read is Read.HIT
        assert not readability.find(7, word.epoch, 0.0).needs_checksum
        nodes.close()

    def test_a_node_is_read_by_the_next_until_it_is_ready(self) -> None:
        nodes, word = reading(pigeon="tired", stream="tcp://127.0.0.1:1")
        assert nodes.read([wanted()])[0].read is Read.FAILED
        assert nodes.counts["stream_failed"] == 1
        (one,) = made()
        assert one.prepared == [word]
        alone, word = reading(pigeon="tired")
        assert alone.read([wanted()])[0].read is Read.HIT
        nodes.close()
        alone.close()

    def test_a_node_that_offers_it_in_vain_is_out_of_reach(self) -> None:
        nodes, word = reading(pigeon="lost")
        assert nodes.node(7, word.epoch, time.monotonic()) is None
        nodes.close()

    def test_settings_know_its_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVSTORE_TRANSPORTS", "stream,pigeon")
        assert allowed(None) == ("pigeon", "stream")
        with pytest.raises(UsageError, match="must be some of pigeon, shm"):
            allowed(["dove"])
        without = remote_nodes(MemoryIndex(), 0.3)
        assert without.transports.of(announcement(node_id=7, transports={"pigeon": "hit"})) == []
        without.close()

    def test_its_file_is_not_imported_before_a_node_offers_it(self) -> None:
        nodes, word = reading(stream="tcp://127.0.0.1:1")
        assert nodes.node(7, word.epoch, time.monotonic()) is not None
        assert "pigeon" not in sys.modules
        nodes.close()

    def test_none_is_made_after_close(self) -> None:
        nodes, word = reading(pigeon="hit")
        nodes.close()
        assert nodes.transports.of(word) == []
        assert made() == []


def test_each_is_what_its_line_says() -> None:
    for name, registered in TRANSPORTS.items():
        if registered.file:
            __import__(registered.file)
            made_by = getattr(sys.modules[registered.file], registered.made_by)
            assert Transport in made_by.__mro__
            assert made_by.name == name


def test_counters_are_there_before_anything_is_read() -> None:
    assert set(counters()) == {
        f"{way}_{what}"
        for way in ("disk", "nixl", "stream")
        for what in ("hits", "bytes", "misses", "failed", "checksum")
    } | {"nixl_vram_hits", "nixl_vram_bytes"}


def test_a_client_of_streams_alone_imports_neither_nixl_nor_cuda() -> None:
    code = """
import sys
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.index.memory import MemoryIndex
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.segment.layout import Layout
from kvstore.transport.registry import TRANSPORTS, Transports
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import StreamTransport
ways = Transports(tuple(TRANSPORTS), StreamTransport(StreamSecurity()), Layout)
RemoteNodes(NodeDirectory(None, MemoryIndex(), "kv:t"), ways, 1.0).close()
print([name for name in sys.modules if ".nixl." in name or ".cuda" in name])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n", run.stderr


def test_the_environment_allows_in_the_order_of_nearness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORTS", "stream, nixl")
    assert allowed(None) == ("nixl", "stream")
    assert allowed(["stream", "shm"]) == ("shm", "stream"), "an argument counts more"
    monkeypatch.delenv("KVSTORE_TRANSPORTS")
    assert allowed(None) == tuple(TRANSPORTS) == ("shm", "cuda_ipc", "disk", "nixl", "stream")
    with pytest.raises(UsageError, match="transports="):
        allowed(["pigeon"])
