"""`put_many(replace=True)` where many nodes of other hosts have the values, and are silent."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer  # noqa: TC002  # as in every other test
from stores import announcement
from two_hosts import SECURITY

from kvstore import Client, Limits, PutStatus
from kvstore.client.nodes import remote
from kvstore.client.values import saving
from kvstore.index.base import KeyRecord
from kvstore.index.redis.index import open_index
from kvstore.record import pack_record
from kvstore.types import Location

NODES = 12
TIMEOUT_S = 0.3
NAMES = [f"k{number}" for number in range(NODES)]


@pytest.fixture
def client(redis_server: RedisServer, tmp_path: Path) -> Iterator[Client]:
    """Its values are said to be on nodes that take connections and say nothing."""
    prefix = f"kv:{tmp_path.name}"
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(NODES)]
    index = open_index(redis_server.url, key_prefix=prefix, timeout_s=5.0, publish_timeout_s=5.0)
    limits = Limits(redis_timeout_s=5.0, stream_timeout_s=TIMEOUT_S)
    options = {"key_prefix": prefix, "run_dir": tmp_path, "limits": limits, "security": SECURITY}
    with Client(redis_server.url, **options) as client:  # type: ignore[arg-type]
        for number, listener in enumerate(listeners):
            at = {"stream": f"tcp://127.0.0.1:{listener.getsockname()[1]}"}
            word = announcement(node_id=number, key_prefix=prefix, transports=at)
            index.announce(number, word.pack(), 60.0)
            key = client.namespace.value_key(NAMES[number])
            record = pack_record(key, Location(number, 1, 0, 0, 1, 0, 100, 1))
            index.publish([KeyRecord(key, record)])
        yield client
    index.close()
    for listener in listeners:
        listener.close()


def test_all_that_are_silent_cost_one_deadline_together(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s: list[float] = []
    ask = remote.ask

    def noted(stream, word, message, deadline):  # type: ignore[no-untyped-def]
        waited_s.append(max(deadline - time.monotonic(), 0.0))
        return ask(stream, word, message, deadline)

    monkeypatch.setattr(remote, "ask", noted)
    results = client.put_many(dict.fromkeys(NAMES, b"v"), replace=True)
    assert {result.status for result in results} == {PutStatus.REJECTED}
    assert waited_s
    assert sum(waited_s) <= TIMEOUT_S + saving.DROP_PART_S_MIN
