"""The contract of kvstore/index/base.py, on every implementation and every way to reach Redis."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis
from contract.index import IndexContract, Subject
from redis_servers import RedisCluster, RedisSentinel, RedisServer

from kvstore.index.embedded_redis.server import EmbeddedRedis
from kvstore.index.memory import MemoryIndex
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.index import RedisIndex, open_index

PATIENT_S = 10.0
"""These tests are about answers, not about their speed on a busy machine."""


def patient(url: str) -> RedisIndex:
    prefix = f"kv:{os.urandom(6).hex()}"
    return open_index(url, key_prefix=prefix, timeout_s=PATIENT_S, publish_timeout_s=PATIENT_S)


class TestMemoryIndex(IndexContract):
    @pytest.fixture
    def subject(self) -> Subject:
        index = MemoryIndex()
        return Subject(index, index.lose_everything)


class TestGuardedIndex(IndexContract):
    @pytest.fixture
    def subject(self) -> Subject:
        index = MemoryIndex()
        return Subject(GuardedIndex(index), index.lose_everything)


class TestRedisIndex(IndexContract):
    @pytest.fixture
    def subject(self, redis_server: RedisServer) -> Iterator[Subject]:
        index = patient(redis_server.url)
        yield Subject(index, redis_server.admin().flushall)
        index.close()


class TestRedisIndexOnCluster(IndexContract):
    @pytest.fixture
    def subject(self, redis_cluster: RedisCluster) -> Iterator[Subject]:
        index = patient(redis_cluster.url)
        yield Subject(index, redis_cluster.flush)
        index.close()


class TestRedisIndexThroughSentinel(IndexContract):
    @pytest.fixture
    def subject(self, redis_sentinel: RedisSentinel) -> Iterator[Subject]:
        index = patient(redis_sentinel.url)
        yield Subject(index, redis_sentinel.master.admin().flushall)
        index.close()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.acquire(tmp_path_factory.mktemp("run")) as embedded:
        yield embedded


class TestRedisIndexOnEmbeddedRedis(IndexContract):
    @pytest.fixture
    def subject(self, embedded: EmbeddedRedis) -> Iterator[Subject]:
        index = patient(embedded.url)
        yield Subject(index, redis.Redis(unix_socket_path=str(embedded.socket)).flushall)
        index.close()


@pytest.fixture(scope="module")
def server_without_scripts() -> Iterator[RedisServer]:
    banned = ("--rename-command", "EVALSHA", "", "--rename-command", "SCRIPT", "")
    with RedisServer(*banned) as server:
        yield server


class TestRedisIndexWithoutScripts(IndexContract):
    """EVALSHA is renamed away: compare-and-delete falls back to a transaction."""

    @pytest.fixture
    def subject(self, server_without_scripts: RedisServer) -> Iterator[Subject]:
        index = patient(server_without_scripts.url)
        yield Subject(index, server_without_scripts.admin().flushall)
        index.close()
