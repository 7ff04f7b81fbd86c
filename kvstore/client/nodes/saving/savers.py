"""Commits and aborts what was reserved at several savers, at all of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.client.base import AnyReservation, DeviceReservation, Later, Saver
from kvstore.client.nodes.deadlines import connecting, in_turn, until
from kvstore.errors import DeadlineError, NodeUnavailableError, PeerError
from kvstore.machine import Clock
from kvstore.types import PutResult, rejected

if TYPE_CHECKING:
    from kvstore.cuda.checksum import DeviceChecksums

T = TypeVar("T")


def commit(reservations: Sequence[AnyReservation], timeout_s: float, now: Clock) -> list[PutResult]:
    """See `BlockStore.commit`."""
    shares = _by_saver(reservations)
    posts = [
        partial(saver.commit_later, [reservations[i] for i in which])
        for saver, which in shares.items()
    ]
    failures: list[PeerError] | None = None
    try:
        asked = ask_all(posts, timeout_s, now)
        failures = [answer for answer in asked if isinstance(answer, PeerError)]
    finally:
        if failures != []:
            abort(reservations, timeout_s, now)  # passed over for those that were committed
    if failures and len(failures) == len(asked):
        raise failures[0]
    results: dict[int, PutResult] = {}
    for which, answer in zip(shares.values(), asked, strict=True):
        if isinstance(answer, PeerError):
            answer = [rejected(str(answer))] * len(which)
        results.update(zip(which, answer, strict=True))
    return [results[i] for i in range(len(reservations))]


def abort(answers: Iterable[AnyReservation | PutResult], timeout_s: float, now: Clock) -> None:
    """Give back the reservations among `answers`; what cannot be said now is said by the next
    reconnect."""
    granted = [one for one in answers if not isinstance(one, PutResult)]
    for (saver, which), by in in_turn([*_by_saver(granted).items()], timeout_s, now):
        with until(by):
            saver.abort([granted[i] for i in which])


def _by_saver(reservations: Sequence[AnyReservation]) -> dict[Saver[Any], list[int]]:
    """Their numbers. Which kind a saver takes is the kind that it grants."""
    which: dict[Saver[Any], list[int]] = {}
    for i, reservation in enumerate(reservations):
        which.setdefault(reservation.saver, []).append(i)
    return which


def ask_all(
    posts: Sequence[Callable[[], Later[T]]], timeout_s: float, now: Clock
) -> list[list[T] | PeerError]:
    """Answers to requests that are all sent before any answer is waited for, or what failed.
    `timeout_s` is what it may take to reach all nodes."""
    if len(posts) == 1:  # nobody else needs the time
        return [_or_failure(lambda: posts[0]()())]
    laters: list[Later[T] | PeerError] = []
    for post, by in in_turn(posts, timeout_s, now):
        with connecting(by):
            laters.append(_or_failure(post))
    return [_collected(later) for later in laters]


def _collected(later: Later[T] | PeerError) -> list[T] | PeerError:
    return later if isinstance(later, PeerError) else _or_failure(later)


def _or_failure(call: Callable[[], T]) -> T | NodeUnavailableError | DeadlineError:
    try:
        return call()
    except (NodeUnavailableError, DeadlineError) as e:
        return e


def answered(call: Callable[[], list[T]]) -> Later[T]:
    """An answer that is there already, for what is not asked in two steps."""
    answers = call()
    return lambda: answers


def device_items(
    reservations: Sequence[DeviceReservation], checksums: DeviceChecksums | None
) -> list[tuple[int, int, int]]:
    """Return what a commit says of slots in VRAM: (slot, generation, checksum), without `checksums`
    0.

    Raises `DeviceError` when the bytes cannot be looked at.
    """
    seen = [0] * len(reservations)
    if checksums is not None:
        seen = checksums.of([[(r.buffer.address, r.buffer.size_bytes)] for r in reservations])
    return [(r.slot, r.generation, one) for r, one in zip(reservations, seen, strict=True)]
