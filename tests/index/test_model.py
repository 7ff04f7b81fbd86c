"""RedisIndex and MemoryIndex give the same answers to the same calls, whatever these are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index.base import KeyRecord
from kvstore.index.memory import MemoryIndex
from kvstore.index.redis.index import RedisIndex, open_index

if TYPE_CHECKING:
    from redis_servers import RedisCluster, RedisServer

# Few keys, tags and records, so that calls meet; tags repeat and alternate.
KEYS = [bytes([tag]) * 8 + bytes([digest]) * 24 for tag in range(4) for digest in range(5)]
keys = st.sampled_from(KEYS)
key_lists = st.lists(keys, max_size=12)
record_lists = st.lists(
    st.builds(KeyRecord, keys, st.sampled_from([b"", b"a", b"b", b"\r\n" * 22])), max_size=12
)
node_ids = st.integers(0, 3)
calls = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["match", "lookup"]), st.tuples(key_lists)),
        st.tuples(st.sampled_from(["publish", "publish", "remove"]), st.tuples(record_lists)),
        st.tuples(st.just("announce"), st.tuples(node_ids, st.binary(max_size=9), st.just(60.0))),
        st.tuples(st.sampled_from(["withdraw", "node"]), st.tuples(node_ids)),
        st.tuples(st.just("nodes"), st.just(())),
    ),
    min_size=1,
    max_size=25,
)


def indexes(url: str) -> Iterator[RedisIndex]:
    made: list[RedisIndex] = []

    def fresh() -> RedisIndex:
        prefix = f"kv:{os.urandom(6).hex()}"
        made.append(open_index(url, key_prefix=prefix, timeout_s=10, publish_timeout_s=10))
        return made[-1]

    yield fresh
    for index in made:
        index.close()


@pytest.fixture(scope="module")
def on_one_server(redis_server: RedisServer) -> Iterator[object]:
    yield from indexes(redis_server.url)


@pytest.fixture(scope="module")
def on_cluster(redis_cluster: RedisCluster) -> Iterator[object]:
    yield from indexes(redis_cluster.url)


def agree(redis_index: RedisIndex, sequence: list[tuple[str, tuple]]) -> None:
    model = MemoryIndex()
    for name, arguments in sequence:
        expected = getattr(model, name)(*arguments)
        assert getattr(redis_index, name)(*arguments) == expected, (name, arguments)
    assert redis_index.lookup(KEYS) == model.lookup(KEYS)
    redis_index.close()


@settings(max_examples=80)
@given(sequence=calls)
def test_one_server_agrees_with_the_model(on_one_server, sequence) -> None:
    agree(on_one_server(), sequence)


@settings(max_examples=40)
@given(sequence=calls)
def test_a_cluster_agrees_with_the_model(on_cluster, sequence) -> None:
    agree(on_cluster(), sequence)


def test_announcements_follow_the_clock_that_was_given() -> None:
    now = [100.0]
    index = MemoryIndex(now=lambda: now[0])
    index.announce(1, b"short", 2.0)
    index.announce(2, b"long", 5.0)
    now[0] = 101.9
    assert index.nodes() == {1: b"short", 2: b"long"}
    now[0] = 102.0
    assert index.nodes() == {2: b"long"}
