"""Listeners that ask a node what they missed, and read slowly, not at all, or go: real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.limits import EVENT_ANSWERS_MAX
from kvstore.node.publishing import block_events, event_answers
from kvstore.node.publishing.block_events import LOOK_EVERY_MS, BlockEvents
from kvstore.protocol.block_events import END, Source, endpoints_of, sequence_bytes
from kvstore.testing.ports import held_ports

zmq = pytest.importorskip("zmq")

PATIENCE_S = 20.0
ASK_AGAIN_S = 0.3
MIB = 1 << 20
MANY_KEYS = [bytes(32)] * 100_000
"""3 MB: more than lies in the buffers of a connection."""


def answers_of(events: BlockEvents) -> event_answers.Answers:
    return events._answers


def given(events: BlockEvents) -> Any:
    return answers_of(events)._going


def waiting(events: BlockEvents) -> Any:
    return answers_of(events)._waiting


@pytest.fixture(params=["tcp", "ipc"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "ipc":
        yield f"ipc://{tmp_path}/events"
        return
    with held_ports(1) as (port,):
        yield str(port)


@asynccontextmanager
async def publishing(place: str, keys: list[bytes]) -> AsyncIterator[BlockEvents]:
    core: Any = SimpleNamespace(
        blocks=SimpleNamespace(listed=SimpleNamespace(keys=lambda: keys), changes=None)
    )
    events = BlockEvents(place, Source("host", "node", 1), core, asyncio.get_running_loop())
    events.start()
    try:
        yield events
    finally:
        events.stop(keep=True)


class Listener:
    """Asks, and reads when it is told to: its own buffers hold next to nothing."""

    def __init__(self, context: Any, place: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.RCVHWM, 1)
        self.socket.set(zmq.RCVBUF, 4096)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(endpoints_of(place)[1])

    def ask(self, times: int = 1) -> None:
        for _ in range(times):
            self.socket.send_multipart([b"", sequence_bytes(0)])

    async def read_answer(self) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            while not self.socket.poll(0):
                assert time.monotonic() < give_up_at
                await asyncio.sleep(0.01)
            if self.socket.recv_multipart()[2] == END:
                return


async def until(true: Callable[[], object], what: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up_at, what
        await asyncio.sleep(0.01)


def run(scenario: Callable[[Any], Awaitable[None]]) -> None:
    async def running() -> None:
        context = zmq.Context()
        try:
            await scenario(context)
        finally:
            context.destroy(0)

    asyncio.run(running())


def test_a_third_question_is_answered_when_the_first_answer_was_taken(place: str) -> None:
    async def scenario(context: Any) -> None:
        async with publishing(place, MANY_KEYS) as events:
            listener = Listener(context, place)
            listener.ask(EVENT_ANSWERS_MAX)
            await until(lambda: len(given(events)) == EVENT_ANSWERS_MAX, "two are given")
            listener.ask()
            await until(lambda: answers_of(events).stuck, "the third waits")
            for _ in range(EVENT_ANSWERS_MAX + 1):
                await listener.read_answer()
            assert not answers_of(events).dropped

    run(scenario)


def test_the_thread_looks_around_only_while_a_question_waits_for_what_is_not_taken(
    place: str,
) -> None:
    seconds = 10 * LOOK_EVERY_MS / 1000

    async def scenario(context: Any) -> None:
        async with publishing(place, MANY_KEYS) as events:
            looks = 0
            give = answers_of(events).give

            def counted(*args: Any) -> None:
                nonlocal looks
                looks += 1
                give(*args)

            answers_of(events).give = counted  # type: ignore[method-assign]
            deaf = Listener(context, place)
            deaf.ask(EVENT_ANSWERS_MAX)
            await until(lambda: len(given(events)) == EVENT_ANSWERS_MAX, "two are given")
            await asyncio.sleep(LOOK_EVERY_MS / 1000)
            before = looks
            await asyncio.sleep(seconds)
            assert looks == before
            deaf.ask()
            await until(lambda: answers_of(events).stuck, "one waits")
            before = looks
            await asyncio.sleep(seconds)
            assert 0 < looks - before < 20, "it spins"

    run(scenario)


def test_listeners_that_never_read_do_not_keep_others_from_being_answered(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """They ask for 3 MB each, again and again. Of 40 a node went from 33 to 302 MiB in 30 s."""
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 16 * MIB)
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_TAKEN_S", 0.5)

    async def scenario(context: Any) -> None:
        async with publishing(place, MANY_KEYS) as events:
            deaf = [Listener(context, place) for _ in range(12)]
            for listener in deaf:
                listener.ask()
            await until(lambda: answers_of(events).stuck, "some wait")
            going = sum(answer.size_bytes for answer in given(events))
            assert 0 < going <= 16 * MIB
            asking = Listener(context, place)
            asking.ask()
            reading = asyncio.ensure_future(asking.read_answer())
            while not reading.done():
                for listener in deaf:
                    listener.ask()
                await asyncio.sleep(ASK_AGAIN_S)
            await reading

    run(scenario)


def test_a_question_whose_listener_is_gone_leaves_its_place(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 1)
    monkeypatch.setattr(block_events, "EVENT_ANSWER_TAKEN_S", 10 * PATIENCE_S)

    async def scenario(context: Any) -> None:
        async with publishing(place, MANY_KEYS) as events:
            deaf, leaving, staying = (Listener(context, place) for _ in range(3))
            deaf.ask()
            await until(lambda: given(events), "the first is answered")
            leaving.ask()
            staying.ask()
            await until(lambda: len(waiting(events)) == 2, "two wait")
            leaving.socket.close()
            await until(lambda: len(waiting(events)) == 1, "one has gone")
            assert answers_of(events).stuck
            assert len(given(events)) == 1

    run(scenario)


def test_requests_of_more_parts_than_any_has_are_not_answered(place: str) -> None:
    """Each message of an answer would have them all, which nobody counts."""

    async def scenario(context: Any) -> None:
        async with publishing(place, []) as events:
            listener = Listener(context, place)
            listener.socket.send_multipart([b"", b"", sequence_bytes(0)])
            listener.socket.send_multipart([b"x", sequence_bytes(0)])
            listener.ask()
            await until(lambda: listener.socket.poll(0), "the last is answered")
            first, topic, *_ = listener.socket.recv_multipart(zmq.NOBLOCK)
            assert (first, topic) == (b"", events._topic)

    run(scenario)
