"""What a node's answers must look like; whatever does not is a `NonsenseError`.

A node is of the same user and trusted, but it may be broken, or of another version. What such
bytes can make Python raise is caught here, where they are decoded, and nowhere else: the same
classes from anything else are a bug of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from kvstore.record import RECORD_BYTES, SIGNED_RECORD_BYTES
from kvstore.types import EXISTS, IN_PROGRESS, STORED, Key, Kind, PutResult, rejected

NO_SPACE = rejected("no space: every slot that fits is reserved or pinned")
CODES: dict[int, PutResult] = {0: STORED, 1: EXISTS, 2: IN_PROGRESS, 3: NO_SPACE}


P = ParamSpec("P")
R = TypeVar("R")


class NonsenseError(ValueError):
    """An answer that is none: the node is broken, or no node."""


def decoder(decode: Callable[P, R]) -> Callable[P, R]:
    """For functions that do nothing but look at an answer."""

    @wraps(decode)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return decode(*args, **kwargs)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as e:
            raise NonsenseError(str(e)) from e

    return checked


@decoder
def whole(value: Any) -> int:
    """A number from 0."""
    if type(value) is not int or value < 0:
        raise ValueError(f"no number: {str(value)[:40]!r}")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"no time: {str(value)[:40]!r}")
    return float(value)


def _seconds_or_none(value: Any) -> float | None:
    return None if value is None else _seconds(value)


@decoder
def outcome(answer: Any) -> PutResult:
    """RESERVE and COMMIT: what became of a block, by its code or in words."""
    if type(answer) is int and answer in CODES:
        return CODES[answer]
    if type(answer) is not str:
        raise ValueError(f"no outcome: {str(answer)[:40]!r}")
    return rejected(answer)


@decoder
def grants(count: int, body: Any) -> list[tuple[int, int, int] | PutResult]:
    """RESERVE: (slot, generation, offset), or what became of it, for each of `count` blocks."""
    if len(body) != count:
        raise ValueError(f"{len(body)} answers of {count}")
    found: list[tuple[int, int, int] | PutResult] = []
    for answer in body:
        if type(answer) is list:
            slot, generation, offset = map(whole, answer)
            found.append((slot, generation, offset))
        else:
            found.append(outcome(answer))
    return found


@decoder
def outcomes(count: int, body: Any) -> list[PutResult]:
    """COMMIT: one for each of `count` blocks."""
    if len(body) != count:
        raise ValueError(f"{len(body)} outcomes of {count}")
    return [outcome(answer) for answer in body]


@decoder
def counters(body: Any) -> dict[str, int | float]:
    """STAT: numbers by name."""
    numbers = dict(body)
    if any(type(k) is not str or type(v) not in (int, float) for k, v in numbers.items()):
        raise ValueError("no counters")
    return numbers


@decoder
def flags(body: Any) -> list[bool]:
    """DROP: what was there."""
    if type(body) is not list or any(type(flag) is not bool for flag in body):
        raise ValueError("no list of true and false")
    return body


@decoder
def pins(body: Any) -> list[bytes | str | None]:
    """PIN: a record, None where there is no such block, or why it is not pinned."""
    if type(body) is not list or not all(
        answer is None
        or type(answer) is str
        or (type(answer) is bytes and len(answer) in (RECORD_BYTES, SIGNED_RECORD_BYTES))
        for answer in body
    ):
        raise ValueError("no pins")
    return body


class BlockRow(NamedTuple):
    """One block as LIST tells of it."""

    key: Key
    size_bytes: int
    namespace_id: int
    pins: int
    kind: Kind
    age_s: float | None
    """Since it was saved; None when that was before the node's start."""
    idle_s: float | None
    """Since it was last used; None when that was before the node's start."""
    name: bytes
    """What its user calls it; empty when the node does not know."""


@decoder
def block_rows(body: Any) -> list[BlockRow]:
    """LIST: one row for each block."""
    rows = []
    for key, length, namespace_id, pins, kind, age_s, idle_s, name in body:
        if type(key) is not bytes or type(name) is not bytes:
            raise ValueError("no key")
        rows.append(
            BlockRow(
                key,
                whole(length),
                whole(namespace_id),
                whole(pins),
                Kind(whole(kind)),
                _seconds_or_none(age_s),
                _seconds_or_none(idle_s),
                name,
            )
        )
    return rows


def namespaces(body: Any) -> dict[int, bytes]:
    """EXPLAIN of no key: the fields of namespaces that have blocks there, by id; empty where no
    client has told."""
    _, _, rows = body
    found = {}
    for namespace_id, _, raw in rows:
        if type(raw) is not bytes:
            raise ValueError("no fields")
        found[whole(namespace_id)] = raw
    return found


Explained = tuple[int, float, float | None, list[tuple[int, int, bytes]]]
"""(code, age in seconds, how far back the node remembers, (namespace id, blocks, fields) ...)"""


@decoder
def explained(body: Any) -> Explained:
    """EXPLAIN of one key."""
    fates, reaches_back_s, namespaces = body
    ((code, age_s),) = fates
    if type(code) is not int:
        raise ValueError("no code")
    back = None if reaches_back_s is None else _seconds(reaches_back_s)
    rows = []
    for namespace_id, count, raw in namespaces:
        if type(raw) is not bytes:
            raise ValueError("no fields")
        rows.append((whole(namespace_id), whole(count), raw))
    return code, _seconds(age_s), back, rows


@decoder
def reset_number(body: Any) -> int:
    """RESET: the number that the node has got to."""
    number, _ = body
    return whole(number)
