"""What a node's answers must look like; whatever does not is a `ValueError`.

A node is of the same user and trusted, but it may be broken, or of another version.
"""

from __future__ import annotations

from typing import Any

from kvstore.core.record import RECORD_BYTES, SIGNED_RECORD_BYTES
from kvstore.types import EXISTS, IN_PROGRESS, STORED, Key, PutResult, rejected

NO_SPACE = rejected("no space: every slot that fits is reserved or pinned")
CODES: dict[int, PutResult] = {0: STORED, 1: EXISTS, 2: IN_PROGRESS, 3: NO_SPACE}
"""RESERVE and COMMIT: what became of a block; a string says why it is rejected."""


def whole(value: Any) -> int:
    """A number from 0."""
    if type(value) is not int or value < 0:
        raise ValueError(f"no number: {str(value)[:40]!r}")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"no time: {str(value)[:40]!r}")
    return float(value)


def counters(body: Any) -> dict[str, int | float]:
    """STAT: numbers by name."""
    numbers = dict(body)
    if any(type(k) is not str or type(v) not in (int, float) for k, v in numbers.items()):
        raise ValueError("no counters")
    return numbers


def outcomes(count: int, body: Any) -> list[PutResult]:
    """COMMIT of so many blocks."""
    if len(body) != count:
        raise ValueError(f"{len(body)} outcomes of {count}")
    return [CODES[a] if type(a) is int else rejected(a) for a in body]


def flags(body: Any) -> list[bool]:
    """DROP: what was there."""
    if type(body) is not list or any(type(flag) is not bool for flag in body):
        raise ValueError("no list of true and false")
    return body


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


def block_rows(body: Any) -> list[tuple[Key, int, int, int]]:
    """LIST: (key, length, namespace id, pins) of each block."""
    rows = []
    for key, *numbers in body:
        length, namespace_id, pins = map(whole, numbers)
        if type(key) is not bytes:
            raise ValueError("no key")
        rows.append((key, length, namespace_id, pins))
    return rows


Explained = tuple[int, float, float | None, list[tuple[int, int, bytes]]]
"""(code, age in seconds, how far back the node remembers, (namespace id, blocks, fields) ...)"""


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
