"""A host that gives no more threads costs what they would do in passing, and no call."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import NodeProcess, node_stats
from two_hosts import PATIENT, SECURITY, client_of

from kvstore import AsyncClient, Client, PeerError

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
    assert node_stats(client)["pinned"] == 0
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


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_the_first_call_of_an_async_client_says_what_to_do(
    far: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk() -> None:
        c = AsyncClient(**{**far.client_options, "limits": PATIENT, "security": SECURITY})
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for call in (c.put("a", VALUE), c.get("a"), c.pin("a"), c.health()):
                with pytest.raises(PeerError, match="ulimit -u"):
                    await call
        assert await c.get("a") is None, "what was refused was not done later"
        assert await c.put("a", VALUE)
        await c.close()

    asyncio.run(talk())


def test_an_async_client_goes_on_with_the_threads_that_it_has(
    far: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk() -> None:
        async with AsyncClient(**far.client_options) as c:
            monkeypatch.setattr(threading.Thread, "start", refuse)
            assert all(await asyncio.gather(*(c.put(f"{i}", VALUE) for i in range(8))))
            assert await asyncio.gather(*(c.get(f"{i}") for i in range(8))) == [VALUE] * 8

    asyncio.run(talk())


def test_an_async_client_that_never_had_a_thread_is_closed_without_one(
    far: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    asyncio.run(AsyncClient(**far.client_options).close())
