"""Saving to other hosts while the index is slow to say which nodes there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from remote_parts import remote_nodes
from stores import announcement

from kvstore.client.nodes.directory import LISTED_EVERY_S
from kvstore.client.nodes.saving.remote_writer import NOBODY, RemoteWriter
from kvstore.errors import NodeUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.transport.stream.transport import NAME as STREAM


class SlowIndex(MemoryIndex):
    """It says which nodes there are once `answer` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Semaphore(0)
        self.questions = 0
        self.answer = threading.Event()

    def nodes(self) -> dict[int, bytes]:
        self.questions += 1
        self.asked.release()
        assert self.answer.wait(60)
        return super().nodes()


@pytest.fixture
def index() -> SlowIndex:
    index = SlowIndex()
    word = announcement(transports={STREAM: "tcp://there:7400"})
    index.announce(word.node_id, word.pack(), 600.0)
    return index


@pytest.fixture
def writer(index: SlowIndex) -> Iterator[RemoteWriter]:
    remote = remote_nodes(index, 0.2)
    yield RemoteWriter(remote, lambda keys: [None] * len(keys), {})
    index.answer.set()
    remote.close()


def begin_to_save(writer: RemoteWriter) -> threading.Thread:
    thread = threading.Thread(target=writer.reserve, args=([], 1, 0), daemon=True)
    thread.start()
    return thread


def test_who_knows_of_a_node_does_not_wait_for_another_thread_that_looks_around(
    index: SlowIndex, writer: RemoteWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.answer.set()
    writer.reserve([], 1, 0)
    index.answer.clear()
    assert index.asked.acquire(timeout=60)
    monkeypatch.setattr(writer._directory, "looked_at", time.monotonic() - LISTED_EVERY_S)
    first = begin_to_save(writer)
    assert index.asked.acquire(timeout=60)
    assert writer.reserve([], 1, 0) == []
    assert first.is_alive(), "it is still being told"
    assert index.questions == 2


def test_who_knows_of_none_waits_for_the_thread_that_looks_around_until_its_deadline(
    index: SlowIndex, writer: RemoteWriter
) -> None:
    first = begin_to_save(writer)
    assert index.asked.acquire(timeout=60)
    with pytest.raises(NodeUnavailableError, match=NOBODY.split(":", maxsplit=1)[0]):
        writer.reserve([], 1, 0)
    assert first.is_alive(), "it is still being told"
    assert index.questions == 1


def test_those_who_wait_take_what_the_first_one_finds(
    index: SlowIndex, writer: RemoteWriter
) -> None:
    writer._remote._timeout_s = 60.0
    first = begin_to_save(writer)
    assert index.asked.acquire(timeout=60)
    others = [begin_to_save(writer) for _ in range(3)]
    for other in others:
        other.join(0.05)
        assert other.is_alive(), "it knows of no node"
    index.answer.set()
    for thread in (first, *others):
        thread.join(60)
        assert not thread.is_alive()
    assert index.questions == 1
