"""Compare and delete as a transaction, where the server bans scripts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from redis_servers import RedisServer

from kvstore.index.base import KeyRecord
from kvstore.index.redis.connection import Link
from kvstore.index.redis.index import open_index

RECORD = KeyRecord(b"k" * 32, b"record")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    banned = ("--rename-command", "EVALSHA", "", "--rename-command", "SCRIPT", "")
    with RedisServer(*banned) as server:
        yield server


def test_an_interrupted_transaction_leaves_no_connection_that_still_watches(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next transaction would fail because of a key that is none of its business."""

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with closing(open_index(server.url, timeout_s=5, publish_timeout_s=5)) as index:
        assert index.publish([RECORD]) == []
        with monkeypatch.context() as patch:
            patch.setattr(Link, "run_here", interrupted)
            with pytest.raises(KeyboardInterrupt):
                index.remove([RECORD])
        watching = [one["watch"] for one in server.admin().client_list()]
        assert set(watching) == {"0"}
        assert index.remove([RECORD]) == 1
