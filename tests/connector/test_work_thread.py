"""connector/work_thread.py: in order, one at a time, and nothing that was taken is dropped."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from connector_parts import PATIENCE_S

from connector.work_thread import WorkThread

if TYPE_CHECKING:
    import pytest


def test_items_are_handled_in_order_and_one_that_raises_costs_only_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done: list[object] = []

    def handle(item: int) -> None:
        if item == 1:
            raise RuntimeError("no")
        done.append(item)

    thread = WorkThread("t", handle, 8)
    assert all(thread.put(item) for item in range(3))
    thread.start(lambda: done.append("first"))
    thread.end()
    assert thread.join(PATIENCE_S)
    assert done == ["first", 0, 2]
    assert "t: something was not done" in caplog.text


def test_one_too_many_is_refused_and_an_end_is_not() -> None:
    thread: WorkThread[int] = WorkThread("t", lambda item: None, 2)
    assert [thread.put(item) for item in range(3)] == [True, True, False]
    thread.end()
    thread.start()
    assert thread.join(PATIENCE_S)


def test_trap_an_end_that_is_met_on_the_way_still_ends() -> None:
    together: list[list[int]] = []

    def handle(item: int) -> None:
        items = [item]
        while (more := thread.next_waiting()) is not None:
            items.append(more)
        together.append(items)

    thread = WorkThread("t", handle, 8)
    for item in range(3):
        thread.put(item)
    thread.end()
    thread.start()
    assert thread.join(PATIENCE_S)
    assert together == [[0, 1, 2]]


def test_a_thread_that_hangs_or_never_began_keeps_nobody_waiting() -> None:
    gate = threading.Event()
    thread: WorkThread[int] = WorkThread("t", lambda item: (gate.wait(PATIENCE_S), None)[1], 8)
    assert thread.join(0.0)
    thread.put(0)
    thread.end()
    thread.start()
    assert not thread.join(0.01)
    gate.set()
    assert thread.join(PATIENCE_S)
