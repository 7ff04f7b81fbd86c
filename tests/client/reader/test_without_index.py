"""While Redis is away a node's own host misses nothing: lookups fall back on the hint tables."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis_servers import RedisServer, stopped, wait_until
from stores import NodeProcess

from kvstore import Client, Limits, MissReason
from kvstore.client.block_lookup import found_here
from kvstore.spi import BlockRef, BlockSession

BLOCK_BYTES = 20_000
QUICK = Limits(redis_timeout_s=1.0, request_timeout_s=10.0)
SIGNING_KEY = "thirty-two random characters.."


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def signing_key(request: pytest.FixtureRequest) -> str | None:
    key: str | None = getattr(request, "param", None)
    return key


@pytest.fixture
def near(redis: RedisServer, signing_key: str | None) -> Iterator[NodeProcess]:
    with NodeProcess(redis, environment={"KVSTORE_SIGNING_KEY": signing_key or ""}) as node:
        yield node


def session_of(node: NodeProcess, signing_key: str | None = None, **more: Any) -> BlockSession:
    options: dict[str, Any] = {**node.client_options, "limits": QUICK, "signing_key": signing_key}
    return BlockSession(**{**options, **more})


@contextmanager
def away(redis: RedisServer, how: str) -> Iterator[None]:
    """No answer from Redis inside."""
    with ExitStack() as stack:
        if how == "stopped":
            stack.enter_context(stopped(redis))
        else:
            redis.kill()
        yield


def save(node: NodeProcess, count: int) -> tuple[list[bytes], list[bytes]]:
    """(keys, blocks) of a prompt that is saved and in the index."""
    tokens = list(range(8 * count))
    blocks = [os.urandom(BLOCK_BYTES) for _ in range(count)]
    with Client(**node.client_options, block_tokens=8) as writer:
        assert all(writer.put_blocks(tokens, blocks))
        return writer.namespace.block_keys(tokens, 8), blocks


def read(session: BlockSession, found: list[BlockRef]) -> list[bytes]:
    views = list(session.views(found, None, 10.0))
    assert all(view is not None for view in views)
    return [bytes(view.buffer) for view in views if view is not None]


@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize(
    "signing_key", [None, SIGNING_KEY], ids=["unsigned", "signed"], indirect=True
)
def test_what_is_on_this_host_is_found_while_redis_is_away(
    redis: RedisServer, near: NodeProcess, signing_key: str | None, how: str
) -> None:
    """By a process that has seen the node before, and by one that starts then."""
    keys, blocks = save(near, 5)
    with (
        closing(session_of(near, signing_key)) as before,
        closing(session_of(near, signing_key)) as after,
        closing(session_of(near, signing_key)) as worker,
    ):
        indexed = list(before.match(keys))
        assert read(before, indexed) == blocks
        with away(redis, how):
            for session in (before, after) * 2:
                run = session.match(keys)
                assert list(run) == indexed, "the node's own records"
                assert run.short is None
                answers = session.lookup([keys[3], b"?" * 32, keys[0]])
                assert [one and one.key for one in answers] == [keys[3], None, keys[0]]
                assert answers.short is not None
                assert answers.short is not MissReason.ABSENT
                assert read(worker, run) == blocks, "in a process that has not looked for them"
        for session in (before, after):
            # Nobody asks for what is here, but a reader that has a signing key and has not seen
            # a genuine record of the node yet.
            asked = 2 if signing_key is None or session is before else 4
            assert session.reader.index_failures == asked
            assert sum(session.reader.miss_reasons.values()) == 2, "the lookups that lacked one"


def test_a_run_ends_at_the_first_block_that_is_not_here(
    redis: RedisServer, near: NodeProcess
) -> None:
    keys, blocks = save(near, 5)
    with closing(session_of(near)) as session:
        assert session.writer.drop([keys[2]]) == [True]
        with away(redis, "killed"):
            run = session.match(keys)
            assert read(session, run) == blocks[:2]
            assert run.short is MissReason.INDEX_ERROR
            assert [one is not None for one in session.lookup(keys)] == [True] * 2 + [
                False,
                True,
                True,
            ]


def test_values_are_found_by_a_client_that_starts_while_redis_is_away(
    redis: RedisServer, near: NodeProcess
) -> None:
    with Client(**near.client_options) as writer:
        assert writer.put("k", b"v" * 1000)
    with away(redis, "killed"), Client(**near.client_options) as client:
        assert client.get("k") == b"v" * 1000
        assert client.exists("k")
        assert not client.exists("absent")


def test_a_client_that_starts_finds_what_is_here_and_an_emptied_index_has_lost(
    redis: RedisServer, near: NodeProcess
) -> None:
    with Client(**near.client_options) as writer:
        assert writer.put("here", b"v" * 5000)
    near.signal(signal.SIGSTOP)  # it does not publish again
    try:
        redis.admin().flushall()
        with Client(**near.client_options) as reader:
            assert reader.get("here") == b"v" * 5000
        with Client(**near.client_options) as reader:
            assert reader.exists("here")
    finally:
        near.signal(signal.SIGCONT)


def test_nodes_of_another_key_prefix_and_dead_ones_are_not_searched(
    redis: RedisServer, near: NodeProcess
) -> None:
    keys, _ = save(near, 2)
    with away(redis, "killed"):
        with closing(session_of(near, key_prefix="kv:another")) as stranger:
            assert stranger.match(keys) == []
        with closing(session_of(near, transports=("stream",))) as without_shm:
            assert without_shm.match(keys) == []
        with closing(session_of(near)) as session:
            assert len(session.match(keys)) == 2
            near.kill()
            wait_until(lambda: session.match(keys) == [], "its death is noticed")
        with closing(session_of(near)) as late:
            assert late.match(keys) == []


def test_the_search_keeps_to_the_deadline_of_the_lookup(
    redis: RedisServer, near: NodeProcess
) -> None:
    keys, _ = save(near, 5)
    with closing(session_of(near)) as session, away(redis, "stopped"):
        # The deadline has gone by while Redis was waited for; what is here does not depend on it.
        run = session.match([*keys, b"?" * 32], timeout_s=QUICK.redis_timeout_s / 4)
        assert len(run) == 5
        assert run.short is MissReason.DEADLINE
        answers = session.lookup([*keys, b"?" * 32], timeout_s=0.0)
        assert [one is not None for one in answers] == [True] * 5 + [False]
        run = session.match(keys, timeout_s=0.0)
        assert (len(run), run.short) == (5, None)
        # And none of it is spent on keys beyond the deadline, however many there are.
        many = (keys * 1000)[:4096]
        assert list(found_here(session.nodes, None, many, time.monotonic())) == []
        assert len(list(found_here(session.nodes, None, many, time.monotonic() + 60))) == 4096


@pytest.mark.parametrize(("how", "writer", "reader"), [("stopped", 2, 2), ("killed", 1, 4)])
def test_engines_of_any_size_match_and_load_while_redis_is_away(
    redis: RedisServer, near: NodeProcess, how: str, writer: int, reader: int
) -> None:
    pytest.importorskip("torch")
    from tp_engine import Model, TpEngine

    tokens = [7 * i % 1000 for i in range(3 * 8 + 3)]
    one = TpEngine(session_of(near), Model(), writer, seed=1)
    one.save(tokens)
    one.close()
    with away(redis, how):
        other = TpEngine(session_of(near), Model(), reader, seed=2)
        offered, tables, _, report = other.load(tokens)
        assert offered == 3 * 8
        assert report.failed_requests == set()
        assert report.invalid_block_ids == set()
        other.check(tokens, offered, tables)
        other.close()


def test_a_segment_that_cannot_be_mapped_is_passed_over(
    redis: RedisServer, near: NodeProcess
) -> None:
    keys, _ = save(near, 2)
    head: Path = near.segment_files()[1]
    with away(redis, "killed"), closing(session_of(near)) as session:
        head.rename(head.with_suffix(".away"))
        assert session.match(keys) == []
        head.with_suffix(".away").rename(head)
        wait_until(lambda: len(session.match(keys)) == 2, "it is looked for again")
