"""The node of the own host is found without Redis: starved, away, or asked by all at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis_servers import RedisServer, free_port, stopped, wait_until
from stores import MIB, NodeProcess
from warm_processes import WarmProcess, program

from kvstore import Client
from kvstore.index.embedded_redis.server import EmbeddedRedis
from kvstore.index.open import open_guarded
from kvstore.limits import Limits
from kvstore.spi import BlockSession
from kvstore.testing.stopping import stop
from kvstore.types import PutStatus

FIRST_PUTS = """
import sys, threading
from pathlib import Path
from kvstore import Client
url, run_dir, key_prefix, process, count = sys.argv[1:]
said, together = [], threading.Barrier(int(count))
def first_put(i):
    with Client(url, run_dir=Path(run_dir), key_prefix=key_prefix) as client:
        together.wait()
        result = client.put(f"{process}/{i}", b"v" * 5000)
        got = client.get(f"{process}/{i}")
        said.append(result.status if got == b"v" * 5000 else f"lost: {result}")
threads = [threading.Thread(target=first_put, args=(i,)) for i in range(int(count))]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(*said)
"""
PROCESSES, CLIENTS = 4, 8


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvn-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def options(node: NodeProcess) -> dict[str, object]:
    """With the deadlines that users have."""
    return {**node.client_options, "limits": Limits()}


def test_many_clients_that_start_at_once_lose_no_first_put(redis: RedisServer) -> None:
    """However slow Redis is: here it does not answer at all. (Nodes that get no processor, as
    where hundreds start: test_starved.py.)"""
    with NodeProcess(redis) as node, stopped(redis):
        workers = [
            WarmProcess(
                program,
                *(FIRST_PUTS, redis.url, str(node.run_dir), node.key_prefix),
                *(str(i), str(CLIENTS)),
                stdout=subprocess.PIPE,
            )
            for i in range(PROCESSES)
        ]
        said = [worker.stdout.read().split() for worker in workers if worker.stdout is not None]
        for worker in workers:
            assert worker.wait(60) == 0
    assert said == [["stored"] * CLIENTS] * PROCESSES


def test_a_node_whose_announcement_has_expired_is_written_to(redis: RedisServer) -> None:
    """As that of a node which gets no processor: Redis is there and knows no node."""
    with NodeProcess(redis) as node, Client(**options(node)) as client:
        index = client.session.index
        asked: list[int] = []
        index.node = asked.append  # type: ignore[assignment, method-assign]  # None: it knows none
        assert client.put("k", b"v" * 5000)
        assert client.get("k") == b"v" * 5000
        assert asked == [], "nobody is asked"


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_node_and_client_that_start_while_redis_is_away_work_and_publish_later(
    redis: RedisServer, run_dir: Path, how: str
) -> None:
    with stopped(redis):
        if how == "killed":
            redis.kill()
        with NodeProcess(redis, run_dir=run_dir, key_prefix="kv:away") as node:
            tokens = list(range(64))
            with Client(**options(node), block_tokens=8) as client:
                values = {f"k{i}": os.urandom(5000) for i in range(4)}
                assert [r.status for r in client.put_many(values)] == [PutStatus.STORED] * 4
                assert all(client.put_blocks(tokens, [os.urandom(5000)] * 8))
                keys = client.namespace.block_keys(tokens, 8)
            with Client(**options(node), block_tokens=8) as other:
                assert other.get_many(list(values)) == list(values.values())
                assert other.match_prefix(tokens).tokens == 64
            if how == "killed":
                redis.start()
            else:
                redis.signal(signal.SIGCONT)
            opened = open_guarded(
                redis.url, key_prefix="kv:away", run_dir=run_dir, limits=Limits(redis_timeout_s=5.0)
            )
            with closing(opened):
                wait_until(lambda: len(opened.index.match(keys)) == 8, "the node publishes", 20)


def test_clients_without_a_url_work_on_their_host_while_the_embedded_redis_hangs(
    run_dir: Path,
) -> None:
    """Those that start meanwhile too, and the node that the first of them starts."""
    redis = EmbeddedRedis.acquire(run_dir)
    stop(redis.pid)
    options = {"run_dir": run_dir, "node_size_bytes": 8 * MIB, "block_tokens": 8}
    tokens = list(range(64))
    with Client(**options) as client, Client(**options) as other:
        assert client.put("k", b"v" * 5000).status is PutStatus.STORED
        assert other.get("k") == b"v" * 5000
        assert all(client.put_blocks(tokens, [os.urandom(5000)] * 8))
        assert other.match_prefix(tokens).tokens == 64
        assert "did not answer" in client.health().index
        os.kill(redis.pid, signal.SIGCONT)
        wait_until(client.health, "all is well", 20)
        keys = client.namespace.block_keys(tokens, 8)
        wait_until(lambda: len(client.session.index.match(keys)) == 8, "the node publishes", 20)
    redis.close()
    wait_until(lambda: not (run_dir / "redis").exists(), "Redis ends with its last user", 20)


def test_a_node_that_names_its_index_otherwise_is_asked_for(redis: RedisServer) -> None:
    """One Redis, by its socket and by its port."""
    with NodeProcess(redis) as node:
        alias = {**options(node), "url": f"redis://127.0.0.1:{redis.port}"}
        with closing(BlockSession(**alias)) as session:  # type: ignore[arg-type]
            words = [word for word, _ in session.nodes.writables()]
            assert [word.name for word in words] == [node.name]
            assert words[0].index != session.index.identity()
        other_db = {**alias, "url": f"redis://127.0.0.1:{redis.port}/1"}
        with Client(**other_db) as stranger:  # type: ignore[arg-type]
            assert stranger.put("k", b"v").status is PutStatus.REJECTED
        redis.kill()
        with Client(**alias) as client:  # type: ignore[arg-type]
            result = client.put("k", b"v")
            assert result.status is PutStatus.REJECTED
            assert "index cannot be asked" in (result.reason or "")
