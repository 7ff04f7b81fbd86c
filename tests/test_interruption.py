"""What a handler of signals raises in a call of ours is its user's: no miss, no peer's failure."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from redis_servers import RedisServer  # noqa: TC002  # as in every other test
from stores import NodeProcess  # noqa: TC002

from kvstore import Client
from kvstore.circuit_breaker import BreakerState
from kvstore.client.local.control import ControlChannel
from kvstore.errors import IndexUnavailableError
from kvstore.index.guarded import GuardedIndex
from kvstore.index.memory import MemoryIndex
from kvstore.index.redis.connection import Link
from kvstore.index.redis.index import open_index
from kvstore.interruption import interruption

KEY = os.urandom(32)


class SignalledError(Exception):
    pass


SAID = re.compile("^by the handler$")
ERRORS = [SignalledError, TimeoutError, ConnectionResetError, ValueError]


@contextmanager
def handling(handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def raising(error: type[Exception]) -> Callable[..., object]:
    def handler(*_: object) -> None:
        deeper()

    def deeper() -> None:
        raise error("by the handler")

    return handler


def signals_in(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """The signal arrives in that call, once."""
    real = getattr(owner, name)

    def signalled(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(owner, name, real)
        signal.raise_signal(signal.SIGUSR1)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, signalled)


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
    owner: type,
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
