"""Holds a call that asks several nodes of this host, one after another, to one deadline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from kvstore.machine import Clock
from kvstore.system.scoped import Giving, Scoped

T = TypeVar("T")


class CallBounds(NamedTuple):
    """What the requests of a call may use."""

    give_up_at: float = math.inf
    """When a request must have its answer."""
    connected_by: float = math.inf
    """When a node must have answered HELLO."""
    each_s: float = math.inf
    """How long one request may take."""


NO_BOUNDS = CallBounds()
bounds: Scoped[CallBounds] = Scoped()


def until(when: float) -> Giving[CallBounds]:
    """Requests of this thread in here end then, or when the call around them has to."""
    return bounds.giving(CallBounds(give_up_at=when))


def connecting(when: float) -> Giving[CallBounds]:
    """Requests of this thread in here are sent by then."""
    return bounds.giving(CallBounds(connected_by=when))


def each_within(seconds: float) -> Giving[CallBounds]:
    """Each request of this thread in here takes that long at most: others are to be tried when
    a node hangs."""
    return bounds.giving(CallBounds(each_s=seconds))


def in_force() -> CallBounds:
    """Return the tightest bounds of the functions that run in this thread."""
    return CallBounds(*map(min, zip(NO_BOUNDS, *bounds.in_force(), strict=True)))


def in_turn(nodes: Sequence[T], timeout_s: float, now: Clock) -> Iterator[tuple[T, float]]:
    """Yield each of `nodes`, and until when it may be asked: one that hangs leaves the others their
    equal part of `timeout_s`, one that answers leaves them what it did not need."""
    over_at = now() + timeout_s
    for i, node in enumerate(nodes):
        began = now()
        yield node, began + max(over_at - began, 0.0) / (len(nodes) - i)
