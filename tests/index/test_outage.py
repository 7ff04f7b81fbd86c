from __future__ import annotations

import os
import threading
import time
import timeit

import pytest
from own_python import holds_in_child
from redis_servers import RedisServer, stopped, wait_until

from kvstore.errors import IndexBreakerOpenError, IndexUnavailableError, UsageError
from kvstore.index.base import KeyRecord
from kvstore.index.memory import MemoryIndex
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.index import open_index

KEY = os.urandom(32)


@pytest.fixture
def server():
    with RedisServer() as server:
        yield server


def guarded(server: RedisServer, **options: float) -> GuardedIndex:
    index = open_index(server.url, timeout_s=0.1, publish_timeout_s=0.1)
    return GuardedIndex(index, **{"failures_max": 3, "retry_after_s": 0.1, **options})


def answers(guard: GuardedIndex) -> bool:
    try:
        return guard.match([KEY]) == []
    except IndexUnavailableError:
        return False


def fail(guard: GuardedIndex, times: int) -> None:
    for _ in range(times):
        with pytest.raises(IndexUnavailableError):
            guard.match([KEY])


def test_a_hanging_redis_costs_its_time_out_once_then_less_than_a_millisecond(
    server: RedisServer,
) -> None:
    guard = guarded(server, retry_after_s=5)
    guard.publish([KeyRecord(KEY, b"r")])
    with stopped(server):
        begun = time.monotonic()
        fail(guard, 1)
        assert time.monotonic() - begun < 1.0
        with pytest.raises(IndexBreakerOpenError):
            guard.match([KEY])
        assert min(timeit.repeat(lambda: fail(guard, 1), number=1, repeat=20)) < 1e-3
    guard.close()


def test_it_closes_by_itself_when_redis_is_back_and_no_call_pays_for_the_probe(
    server: RedisServer,
) -> None:
    guard = guarded(server)
    guard.publish([KeyRecord(KEY, b"r")])
    with stopped(server):
        fail(guard, 3)
    wait_until(lambda: not probing(), "the probe ends", 10)
    assert guard.match([KEY]) == [b"r"]
    guard.close()


def probing() -> bool:
    return any(thread.name == "kvstore-index-probe" for thread in threading.enumerate())


def test_there_is_a_probe_thread_only_while_open_and_close_ends_it(server: RedisServer) -> None:
    guard = guarded(server)
    guard.match([KEY])
    assert not probing()
    with stopped(server):
        fail(guard, 3)
        assert probing()
        guard.close()
        wait_until(lambda: not probing(), "the probe ends", 10)


def test_writing_that_fails_does_not_stop_reading() -> None:
    with RedisServer("--maxmemory", "1", "--maxmemory-policy", "noeviction") as full:
        guard = guarded(full, retry_after_s=5)
        for _ in range(3):
            with pytest.raises(IndexUnavailableError, match="OOM"):
                guard.publish([KeyRecord(KEY, b"r")])
        with pytest.raises(IndexUnavailableError, match="breaker open"):
            guard.announce(1, b"", 1)
        assert guard.match([KEY]) == []
        guard.close()


def test_a_usage_error_is_not_a_failure(server: RedisServer) -> None:
    guard = guarded(server, failures_max=1)
    with pytest.raises(UsageError):
        guard.match([b"short"])
    assert guard.match([KEY]) == []
    guard.close()


def test_an_error_that_nobody_foresaw_is_an_unavailable_index_that_is_probed() -> None:
    class Broken(MemoryIndex):
        def match(self, keys):
            raise KeyError(keys)

    guard = GuardedIndex(Broken(), failures_max=2, retry_after_s=60, retry_after_max_s=60)
    fail(guard, 2)
    with pytest.raises(IndexBreakerOpenError):
        guard.match([KEY])
    guard.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_probe_that_could_not_be_started_is_started_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """A signal handler raised just then, or there was no room for a thread."""

    class Away(MemoryIndex):
        away = True

        def match(self, keys):
            if self.away:
                raise IndexUnavailableError("away")
            return super().match(keys)

    index = Away()
    guard = GuardedIndex(index, failures_max=1, retry_after_s=0.01)
    start = threading.Thread.start

    def failing(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise error

    monkeypatch.setattr(threading.Thread, "start", failing)
    with pytest.raises((KeyboardInterrupt, IndexUnavailableError)):
        guard.match([KEY])
    index.away = False
    fail(guard, 1)
    wait_until(lambda: answers(guard), "the breaker closes", 10)
    guard.close()


def test_a_forked_child_starts_with_closed_breakers(server: RedisServer) -> None:
    guard = guarded(server, retry_after_s=60, retry_after_max_s=60)
    with stopped(server):
        fail(guard, 3)
    assert holds_in_child(lambda: guard.match([KEY]) == [])
    with pytest.raises(IndexUnavailableError, match="breaker open"):
        guard.match([KEY])
    guard.close()
