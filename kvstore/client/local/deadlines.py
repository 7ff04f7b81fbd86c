"""One deadline for a call that asks several nodes of this host, one after another."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
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


@contextlib.contextmanager
def until(when: float) -> Iterator[None]:
    """Requests of this thread in here end then, or when the call around them has to."""
    before = _call.give_up_at
    try:
        _call.give_up_at = min(before, when)
        yield
    finally:
        _call.give_up_at = before


@contextlib.contextmanager
def connecting(when: float) -> Iterator[None]:
    """Requests of this thread in here are sent by then."""
    before = _call.connected_by
    try:
        _call.connected_by = min(before, when)
        yield
    finally:
        _call.connected_by = before


@contextlib.contextmanager
def each_within(seconds: float) -> Iterator[None]:
    """Each request of this thread in here takes that long at most: others are to be tried when
    a node hangs."""
    before = _call.each_s
    try:
        _call.each_s = min(before, seconds)
        yield
    finally:
        _call.each_s = before


def in_turn(
    nodes: Sequence[T], timeout_s: float, now: Clock = REAL.monotonic
) -> Iterator[tuple[T, float]]:
    """Each of `nodes`, and until when it may be asked: one that hangs leaves the others their
    equal part of `timeout_s`, one that answers leaves them what it did not need."""
    over_at = now() + timeout_s
    for i, node in enumerate(nodes):
        began = now()
        yield node, began + max(over_at - began, 0.0) / (len(nodes) - i)
