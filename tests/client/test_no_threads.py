"""A host that gives no more threads costs what they would do in passing, and no call."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import NodeProcess
from two_hosts import client_of

from kvstore import Client

VALUE = bytes(range(256)) * 1200


@pytest.fixture
def client(far: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """On the node's host; not even its first threads can be had."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with client_of(far) as client:
            yield client


def test_every_call_works_without_a_thread(client: Client) -> None:
    assert client.put("a", VALUE)
    assert client.get_many(["a", "b"]) == [VALUE, None]
    assert client.exists("a")
    with client.pin("a") as pinned:
        assert pinned.buffer == VALUE
    assert client.stats()["node"]["pinned"] == 0
    assert client.delete("a")
    assert client.clear()
    assert client.health()


def test_blocks_of_another_host_are_read_and_saved_without_a_thread(
    far: NodeProcess, writer: Client, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert writer.put("far", VALUE)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with client_of(far, elsewhere) as reader:
        assert reader.get("far") == VALUE
        assert reader.put("from here", VALUE)
