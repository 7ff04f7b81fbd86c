"""The first contact, and who asks how the index is, may take longer than a lookup."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer, wait_until

from kvstore import AsyncClient, Client, MissReason
from kvstore.index.base import patient
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.index import open_index
from kvstore.keys import Namespace
from kvstore.limits import PATIENT_TIMEOUT_S
from kvstore.spi import BlockSession, IndexUnavailableError
from kvstore.testing.proxy import FaultyProxy

SLOW_S = 0.15
"""For a chunk, each way: an answer takes six times as long as a lookup may."""
KEY = Namespace.named("x").value_key("k")


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[FaultyProxy]:
    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(redis_server.socket))
        return connection

    with FaultyProxy(connect) as proxy:
        yield proxy


def url(proxy: FaultyProxy) -> str:
    host, port = proxy.address
    return f"redis://{host}:{port}"


def test_the_first_contact_has_its_own_deadline_and_no_later_call(proxy: FaultyProxy) -> None:
    proxy.delay_s = SLOW_S
    index = GuardedIndex(open_index(url(proxy)), waits_first=True)
    assert index.lookup([KEY]) == [None]
    began = time.monotonic()
    with pytest.raises(IndexUnavailableError, match="within 50 ms"):
        index.lookup([KEY])
    assert time.monotonic() - began < SLOW_S
    index.close()


def test_a_first_contact_that_nobody_answers_ends_and_is_said(proxy: FaultyProxy) -> None:
    proxy.silent = True
    index = GuardedIndex(open_index(url(proxy)), waits_first=True)
    began = time.monotonic()
    with pytest.raises(IndexUnavailableError, match="within 1000 ms"):
        index.lookup([KEY])
    assert time.monotonic() - began < 3 * PATIENT_TIMEOUT_S
    index.close()


def test_a_client_waits_for_its_first_contact(proxy: FaultyProxy, tmp_path: Path) -> None:
    proxy.delay_s = SLOW_S
    with Client(url(proxy), run_dir=tmp_path) as client:
        assert client.match_prefix(list(range(256))).found.short is MissReason.ABSENT  # type: ignore[attr-defined]


def test_an_engines_thread_never_waits_for_the_first_contact_which_another_makes(
    proxy: FaultyProxy, tmp_path: Path
) -> None:
    proxy.delay_s = SLOW_S
    session = BlockSession(url(proxy), run_dir=tmp_path)
    began = time.monotonic()
    session.match([KEY])
    assert time.monotonic() - began < SLOW_S
    wait_until(lambda: proxy.accepted > 0, "another thread's contact")
    proxy.delay_s = 0.0
    wait_until(lambda: session.match([KEY]).short is MissReason.ABSENT, "its answer")
    session.close()


def test_patience_is_of_one_thread_and_one_block(proxy: FaultyProxy) -> None:
    proxy.delay_s = SLOW_S
    index = open_index(url(proxy))
    with patient():
        index.ping()
        with patient(0.01), pytest.raises(IndexUnavailableError, match="within 50 ms"):
            index.ping()
        index.ping()
    with pytest.raises(IndexUnavailableError, match="within 50 ms"):
        index.ping()
    index.close()


def test_who_asks_how_it_is_waits_a_second(proxy: FaultyProxy, tmp_path: Path) -> None:
    proxy.delay_s = SLOW_S / 2  # of many answers
    with Client(url(proxy), run_dir=tmp_path) as client:
        for _ in range(2):
            client.ping()
            assert client.health(), client.health()
            assert client.explain(list(range(256))).reason is MissReason.ABSENT
            assert client.explain_key("k").reason is MissReason.ABSENT

    async def ask() -> None:
        async with AsyncClient(url(proxy), run_dir=tmp_path) as c:
            await c.ping()
            assert await c.health()
            assert (await c.explain_key("k")).reason is MissReason.ABSENT

    asyncio.run(ask())
