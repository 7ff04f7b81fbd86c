"""Holds a call that asks several nodes of this host, one after another, to one deadline."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from kvstore.machine import Clock

T = TypeVar("T")


class _Call(threading.local):
    """What the calls of this thread may use; changed by `until` and the like alone."""

    give_up_at = math.inf
    """When a request must have its answer."""
    connected_by = math.inf
    """When a node must have answered HELLO."""
    each_s = math.inf
    """How long one request may take."""


call = _Call()


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
    before = getattr(call, bound)
    try:
        setattr(call, bound, min(before, value))
        yield
    finally:
        setattr(call, bound, before)


def in_turn(nodes: Sequence[T], timeout_s: float, now: Clock) -> Iterator[tuple[T, float]]:
    """Yield each of `nodes`, and until when it may be asked: one that hangs leaves the others their
    equal part of `timeout_s`, one that answers leaves them what it did not need."""
    over_at = now() + timeout_s
    for i, node in enumerate(nodes):
        began = now()
        yield node, began + max(over_at - began, 0.0) / (len(nodes) - i)
