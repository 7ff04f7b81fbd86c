"""One deadline for a call that asks several nodes of this host, one after another."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from kvstore.machine import REAL, Clock

T = TypeVar("T")


class _Call(threading.local):
    """What the calls of this thread may use."""

    give_up_at = math.inf
    connected_by = math.inf
    each_s = math.inf


_call = _Call()


def give_up_at() -> float:
    """When a request of this thread must have its answer; infinity outside `until`."""
    return _call.give_up_at


def connected_by() -> float:
    """When a node must have answered this thread's HELLO; infinity outside `connecting`."""
    return _call.connected_by


def each_s() -> float:
    """How long one request of this thread may take; infinity outside `each_within`."""
    return _call.each_s


def until(when: float) -> AbstractContextManager[None]:
    """Requests of this thread in here end then, or when the call around them has to."""
    return _at_most("give_up_at", when)


def connecting(when: float) -> AbstractContextManager[None]:
    """Requests of this thread in here are sent by then."""
    return _at_most("connected_by", when)


def each_within(seconds: float) -> AbstractContextManager[None]:
    """Each request of this thread in here takes that long at most: others are to be tried when
    a node hangs."""
    return _at_most("each_s", seconds)


@contextlib.contextmanager
def _at_most(bound: str, value: float) -> Iterator[None]:
    before = getattr(_call, bound)
    try:
        setattr(_call, bound, min(before, value))
        yield
    finally:
        setattr(_call, bound, before)


def in_turn(
    nodes: Sequence[T], timeout_s: float, now: Clock = REAL.monotonic
) -> Iterator[tuple[T, float]]:
    """Each of `nodes`, and until when it may be asked: one that hangs leaves the others their
    equal part of `timeout_s`, one that answers leaves them what it did not need."""
    over_at = now() + timeout_s
    for i, node in enumerate(nodes):
        began = now()
        yield node, began + max(over_at - began, 0.0) / (len(nodes) - i)
