"""Several nodes of one host hang: a call has one deadline, however many it asks."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from each_input import each
from redis_servers import RedisServer  # noqa: TC002  # as in every other test
from stores import MIB, NodeProcess

from kvstore import Client, Limits
from kvstore.client.nodes import deadlines
from kvstore.client.nodes.control import ControlChannel
from kvstore.client.nodes.saving.writer import Writer
from kvstore.errors import DeadlineError, PeerError
from kvstore.index.base import allowed_s, patient

TIMEOUT_S = 0.6
ATTEMPTS_MAX = 100
NAMES = [f"k{number}" for number in range(40)]


@pytest.fixture(scope="module")
def nodes(redis_server: RedisServer) -> Iterator[list[NodeProcess]]:
    with NodeProcess(redis_server, size=16 * MIB) as one:
        same = {"size": 16 * MIB, "key_prefix": one.key_prefix, "run_dir": one.run_dir}
        with (
            NodeProcess(redis_server, name="second", **same) as two,
            NodeProcess(redis_server, name="third", **same) as three,
        ):
            with Client(**one.client_options) as client:
                assert all(client.put_many(dict.fromkeys(NAMES, b"v" * 50_000)))
            yield [one, two, three]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """When each request began to be sent, and until when it could be."""
    seen: list[tuple[float, float]] = []
    connect = ControlChannel._connect

    def noted(channel: ControlChannel, give_up_at: float) -> None:
        seen.append((time.monotonic(), give_up_at))
        connect(channel, give_up_at)

    monkeypatch.setattr(ControlChannel, "_connect", noted)
    return seen


def answered(writer: Writer) -> None:
    """Have `writer` connected, however late a busy machine lets its node answer."""
    for attempt in range(ATTEMPTS_MAX):
        try:
            writer.stats()
            return
        except DeadlineError:
            if attempt == ATTEMPTS_MAX - 1:
                raise


CALLS: dict[str, Callable[[Client], object]] = {
    "put_many": lambda c: c.put_many({os.urandom(8).hex(): b"v" * 50_000 for _ in range(40)}),
    "pin": lambda c: c.pin("k1"),
    "pin of many": lambda c: c.session.pin([os.urandom(32)]),
    "delete": lambda c: c.delete("nothing"),
    "stats": lambda c: c.stats(),
    "health": lambda c: c.health(),
    "explain": lambda c: c.explain_key("nothing"),
    "clear": lambda c: c.session.clear(c.namespace.id),
    "reset": lambda c: c.clear(TIMEOUT_S),
    "listing": lambda c: c.session.writer.listing(b"", 10),
}


@each("connected", [True, False], ids=["connected", "fresh"])
@each("call", CALLS.values(), ids=CALLS)
def test_all_nodes_that_hang_cost_one_deadline_together(
    nodes: list[NodeProcess],
    asked: list[tuple[float, float]],
    call: Callable[[Client], object],
    connected: bool,
) -> None:
    limits = Limits(redis_timeout_s=5.0, request_timeout_s=TIMEOUT_S)
    with Client(**{**nodes[0].client_options, "limits": limits}) as client:
        if connected:
            for writer in client.session.writer.writers():
                answered(writer)
        asked.clear()
        for node in nodes:
            node.signal(signal.SIGSTOP)
        try:
            with suppress(PeerError):
                call(client)
        finally:
            for node in nodes:
                node.signal(signal.SIGCONT)
        assert asked
        began = asked[0][0]
        assert max(give_up_at for _, give_up_at in asked) <= began + TIMEOUT_S + 0.01


def test_who_hangs_leaves_the_others_their_part() -> None:
    now = [100.0]
    parts = []
    for hangs, by in deadlines.in_turn([True, False, True, True], 4.0, lambda: now[0]):
        parts.append(by - now[0])
        now[0] = by if hangs else now[0] + 0.1
    assert parts == pytest.approx([1.0, 1.0, 1.45, 1.45])
    assert now == pytest.approx([104.0])


def test_a_deadline_inside_another_is_not_later() -> None:
    with deadlines.until(10.0):
        with deadlines.until(20.0):
            assert deadlines.in_force().give_up_at == 10.0
        with pytest.raises(ValueError, match="x"), deadlines.until(5.0):
            raise ValueError("x")
        assert deadlines.in_force().give_up_at == 10.0
    assert deadlines.in_force().give_up_at > 1e9


class StruckError(BaseException):
    """What a handler of signals raises."""


def bounded() -> None:
    with deadlines.until(1.0), patient(3.0), deadlines.each_within(2.0):
        assert deadlines.in_force() == deadlines.CallBounds(1.0, each_s=2.0)
        assert allowed_s(0.1) == 3.0
    assert nothing_counts()


def nothing_counts() -> bool:
    return deadlines.in_force() == deadlines.NO_BOUNDS and allowed_s(0.1) == 0.1


def struck_at(number: int, kept: list[BaseException]) -> bool:
    """Raise at the so manieth instruction of contexts with bounds; return whether there is one."""
    left = number

    def watch(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        file = frame.f_code.co_filename
        # contextlib's too: a context may be a generator.
        in_them = file.endswith(("deadlines.py", "scoped.py", "index/base.py", "contextlib.py"))
        if frame.f_code is not bounded.__code__ and not in_them:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if event == "opcode" and left == 0:
            raise StruckError
        return watch

    sys.settrace(watch)
    try:
        bounded()
    except StruckError as error:
        kept.append(error)
    finally:
        sys.settrace(None)
    return left <= 0


def test_a_context_that_a_handler_of_signals_kept_from_leaving_bounds_nothing_more() -> None:
    kept: list[BaseException] = []
    number = 1
    while struck_at(number, kept):
        assert nothing_counts(), f"instruction {number}"
        number += 1
    assert number > 100
    bounded()
    kept.clear()
    gc.collect()
    assert nothing_counts()
