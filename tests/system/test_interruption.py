"""What a handler of signals raises in a call of ours is its user's: no miss, no peer's failure."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing

import pytest
from redis_servers import RedisServer  # noqa: TC002  # as in every other test
from signal_handlers import ERRORS, SAID, SignalledError, handling, raising, signals_in
from stores import NodeProcess  # noqa: TC002

from kvstore import Client, nodedir
from kvstore.circuit_breaker import BreakerState
from kvstore.client.local.control import ControlChannel
from kvstore.errors import IndexUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.connection import Link
from kvstore.index.redis.index import open_index
from kvstore.system.interruption import Suppressed, interruption

KEY = os.urandom(32)


@pytest.mark.parametrize("error", ERRORS)
def test_what_a_handler_raises_in_a_call_to_redis_is_no_failure_of_it(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    inner = open_index(redis_server.url, timeout_s=5.0, publish_timeout_s=5.0)
    with closing(GuardedIndex(inner, failures_max=1)) as guard:
        signals_in(monkeypatch, Link, "_exchange")
        with handling(raising(error)), pytest.raises(error, match=SAID):
            guard.lookup([KEY])
        assert guard.reading.state is BreakerState.CLOSED
        assert guard.reading.failures == 0
        assert guard.lookup([KEY]) == [None]


def get(client: Client) -> None:
    client.get("not there")


def put(client: Client) -> None:
    assert client.put(os.urandom(8).hex(), b"v")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Link, "_exchange", get),
        (ControlChannel, "_messages", put),
        (ControlChannel, "_accept", put),
    ],
)
def test_what_a_handler_raises_comes_out_of_the_clients_call(
    node: NodeProcess,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    call: Callable[[Client], None],
    error: type[Exception],
) -> None:
    with Client(**node.client_options) as client:
        put(client)
        signals_in(monkeypatch, owner, name)
        with handling(raising(error)), pytest.raises(error, match=SAID):
            call(client)
        assert client.stats()["client"]["index_failures"] == 0
        put(client)  # the node is asked again at once


@pytest.mark.parametrize("error", ERRORS)
def test_what_a_handler_raises_does_not_hide_the_node(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with Client(**node.client_options) as client, monkeypatch.context() as patched:
        signals_in(patched, nodedir, "read_small")
        with handling(raising(error)), pytest.raises(error, match=SAID):
            put(client)
        put(client)


@pytest.mark.parametrize("error", [TimeoutError, SignalledError])
def test_what_is_suppressed_is_not_what_a_handler_raised(error: type[Exception]) -> None:
    with Suppressed(OSError):
        raise FileNotFoundError
    with handling(raising(error)), pytest.raises(error, match=SAID), Suppressed(OSError):
        signal.raise_signal(signal.SIGUSR1)


class Broken(MemoryIndex):
    def match(self, keys):  # type: ignore[no-untyped-def]
        signal.raise_signal(signal.SIGUSR1)
        raise KeyError("our bug")


def test_in_an_event_loop_it_is_a_failure_of_the_index_and_what_beats_there_goes_on() -> None:
    async def beat(guard: GuardedIndex) -> None:
        with pytest.raises(IndexUnavailableError, match="by the handler"):
            guard.match([KEY])

    with closing(GuardedIndex(Broken())) as guard, handling(raising(SignalledError)):
        asyncio.run(beat(guard))
        assert guard.reading.failures == 1


def test_our_own_bug_is_no_interruption_whatever_handlers_there_are() -> None:
    with closing(GuardedIndex(Broken())) as guard, handling(lambda *_: None):
        with pytest.raises(IndexUnavailableError, match="our bug"):
            guard.match([KEY])
        assert guard.reading.failures == 1


class Handler:
    def __call__(self, *_: object) -> None:
        raise SignalledError

    def method(self, *_: object) -> None:
        raise SignalledError


@pytest.mark.parametrize(
    "handler",
    [Handler(), Handler().method, functools.partial(raising(SignalledError), 1)],
    ids=["an object", "a method", "a partial"],
)
def test_a_handler_of_any_kind_is_told(handler: Callable[..., object]) -> None:
    with handling(handler):
        with pytest.raises(SignalledError) as caught:
            signal.raise_signal(signal.SIGUSR1)
        error = caught.value
        assert interruption(error) is error
        further = ValueError()
        further.__cause__ = error
        assert interruption(further) is error
        others: list[object] = []
        thread = threading.Thread(target=lambda: others.append(interruption(error)))
        thread.start()
        thread.join()
        assert others == [None], "handlers run in the main thread alone"
    assert interruption(SignalledError()) is None
