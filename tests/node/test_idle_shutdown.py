from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig, idle_shutdown
from kvstore.spi import BlockSession


class Sessions:
    """As much of the real ones as the watch looks at."""

    def __init__(self) -> None:
        self.now = self.admitted = 0

    def __len__(self) -> int:
        return self.now


async def ended_after_s(sessions: Sessions, at_most_s: float) -> float | None:
    ended = asyncio.Event()
    started = time.monotonic()
    watch = asyncio.ensure_future(idle_shutdown.wait_for_last_client(sessions, ended.set))
    try:
        await asyncio.wait_for(ended.wait(), at_most_s)
    except TimeoutError:
        return None
    finally:
        watch.cancel()
    return time.monotonic() - started


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_shutdown, "FIRST_CLIENT_TIMEOUT_S", 0.6)
    monkeypatch.setattr(idle_shutdown, "EMPTY_S", 0.1)
    monkeypatch.setattr(idle_shutdown, "POLL_S", 0.01)


def test_it_ends_when_no_client_comes() -> None:
    assert asyncio.run(ended_after_s(Sessions(), 5)) >= 0.6


def test_it_does_not_end_while_there_is_a_client() -> None:
    sessions = Sessions()
    sessions.now = sessions.admitted = 1
    assert asyncio.run(ended_after_s(sessions, 0.4)) is None


def test_it_ends_soon_after_a_client_that_came_and_went_between_two_looks() -> None:
    sessions = Sessions()
    sessions.admitted = 1
    assert 0.1 <= asyncio.run(ended_after_s(sessions, 5)) < 0.6


def test_a_client_that_lost_its_connection_but_lives_keeps_the_node(tmp_path: Path) -> None:
    config = NodeConfig(run_dir=tmp_path, name="n", size_bytes=1 << 20, end_with_last_client=True)
    with Node(config, MemoryIndex()) as node:
        directory = node.dir
        session = BlockSession("redis://127.0.0.1:1", run_dir=tmp_path)
        session.nodes._index = node.index
        session.writer.stats()
        session.writer.link().control._disconnect()
        time.sleep(0.5)
        assert directory.socket.exists()
        session.writer.stats()
        session.close()
        give_up_at = time.monotonic() + 5
        while directory.socket.exists():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
