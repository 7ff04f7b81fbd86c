"""Encodes a node's answers, and decodes them: what cannot be one is an `InvalidReplyError`.

A node is of the same user and trusted, but it may be broken, or of another version. Each
part is looked at before it is taken, and nothing is caught: what Python raises here is a bug of
ours.
"""

from __future__ import annotations

from itertools import chain
from typing import cast

from kvstore.core.answers import (
    Answer,
    BlockRow,
    Counters,
    NamespaceRow,
    PinAnswer,
)
from kvstore.errors import shown
from kvstore.protocol.stream import KINDS
from kvstore.record import RECORD_BYTES, SIGNED_RECORD_BYTES
from kvstore.types import EXISTS, IN_PROGRESS, NO_SPACE, STORED, Kind, PutResult, Retained, rejected

OUTCOMES = (STORED, EXISTS, IN_PROGRESS, NO_SPACE)
"""What became of a block is one byte on the wire: its position in here. Anything else is a
rejection and travels as its reason."""


_RETAINED = frozenset(map(int, Retained))
_INTEGERS = {int}
"""The type of integers on the wire; bool, a subtype, does not count."""


class InvalidReplyError(ValueError):
    """Raised for a node's answer that does not fit its request: the node is broken, or it is no
    node."""


def encoded(answer: Answer) -> object:
    """Return an answer of the core as what msgpack encodes."""
    if not isinstance(answer, list):
        return answer
    return [encoded_outcome(one) if type(one) is PutResult else one for one in answer]


def encoded_outcome(result: PutResult) -> int | str:
    """Return what became of a block: its code, or why it was rejected."""
    return OUTCOMES.index(result) if result in OUTCOMES else result.reason


def outcome(answer: object) -> PutResult:
    """Return what became of a block, by its code or by its text."""
    if type(answer) is int and 0 <= answer < len(OUTCOMES):
        return OUTCOMES[answer]
    if type(answer) is not str:
        raise InvalidReplyError(f"expected an outcome, got {shown(answer, 40)}")
    return rejected(answer)


def _items(body: object, count: int | None = None, what: str = "items") -> list[object]:
    """Return a list, of `count` items when that is known."""
    if type(body) is not list:
        raise InvalidReplyError(f"expected a list, got {shown(body, 40)}")
    if count is not None and len(body) != count:
        raise InvalidReplyError(f"expected {count} {what}, got {len(body)}")
    return body


def whole(value: object) -> int:
    """Return a whole number of at least 0; CLEAR is answered by one."""
    if type(value) is not int or value < 0:
        raise InvalidReplyError(f"expected a number, got {shown(value, 40)}")
    return value


def _kind(value: object) -> Kind:
    if type(value) is not int or value not in KINDS:
        raise InvalidReplyError(f"expected a kind, got {shown(value, 40)}")
    return Kind(value)


def _seconds(value: object) -> float:
    if type(value) is not int and type(value) is not float:
        raise InvalidReplyError(f"expected a time, got {shown(value, 40)}")
    return float(value)


def _seconds_or_none(value: object) -> float | None:
    return None if value is None else _seconds(value)


def grants(count: int, body: object) -> list[list[int] | PutResult]:
    """Read the answer to RESERVE: for each of `count` blocks [slot, generation, offset], or what
    became of it."""
    items = _items(body, count, "answers")
    rows = cast("list[list[object]]", [item for item in items if type(item) is list])
    granted = cast("list[list[int] | PutResult]", items)
    if len(rows) < count:
        granted = [one if type(one) is list else outcome(one) for one in granted]
    # Looked at in C: a batch has hundreds.
    if wrong := set(map(len, rows)) - {3}:
        raise InvalidReplyError(f"expected 3 items, got {wrong.pop()}")
    numbers = list(chain.from_iterable(rows))
    if numbers and (set(map(type, numbers)) != _INTEGERS or min(cast("list[int]", numbers)) < 0):
        for number in numbers:
            whole(number)
    return granted


def outcomes(count: int, body: object) -> list[PutResult]:
    """Read the answer to COMMIT: one result for each of `count` blocks."""
    codes = _items(body, count, "outcomes")
    if set(map(type, codes)) == _INTEGERS:
        known = cast("list[int]", codes)
        if 0 <= min(known) <= max(known) < len(OUTCOMES):
            return list(map(OUTCOMES.__getitem__, known))
    return [outcome(answer) for answer in codes]


def counters(body: object) -> Counters:
    """Read the answer to STAT: numbers by name."""
    if type(body) is not dict or any(
        type(k) is not str or type(v) not in (int, float) for k, v in body.items()
    ):
        raise InvalidReplyError("expected counters")
    return body


def flags(body: object) -> list[bool]:
    """Read the answer to DROP: which blocks were there."""
    if type(body) is not list or any(type(flag) is not bool for flag in body):
        raise InvalidReplyError("expected a list of true and false")
    return body


def pins(body: object) -> list[PinAnswer]:
    """Read the answer to PIN: for each block a record, None where there is no such block, or why it
    is not pinned."""
    if type(body) is not list or not all(
        answer is None
        or type(answer) is str
        or (type(answer) is bytes and len(answer) in (RECORD_BYTES, SIGNED_RECORD_BYTES))
        for answer in body
    ):
        raise InvalidReplyError("expected pins")
    return body


def retained(count: int, body: object) -> list[Retained]:
    """Read the answer to RETAIN: one result for each of `count` blocks."""
    codes = [whole(code) for code in _items(body, count, "answers")]
    if any(code not in _RETAINED for code in codes):
        raise InvalidReplyError(f"expected what became of {count} wishes, got {codes[:8]}")
    return [Retained(code) for code in codes]


def block_rows(body: object) -> list[BlockRow]:
    """Read the answer to LIST: one row for each block."""
    rows = []
    for row in _items(body):
        key, length, namespace_id, pins, kind, age_s, idle_s, name = _items(row, 8, "columns")
        if type(key) is not bytes or type(name) is not bytes:
            raise InvalidReplyError("expected a key")
        rows.append(
            BlockRow(
                key,
                whole(length),
                whole(namespace_id),
                whole(pins),
                _kind(kind),
                _seconds_or_none(age_s),
                _seconds_or_none(idle_s),
                name,
            )
        )
    return rows


def namespaces(body: object) -> dict[int, bytes]:
    """Read the answer to EXPLAIN of no key: the fields of namespaces that have blocks there, by id;
    empty where no client has sent them."""
    _, _, rows = _items(body, 3)
    found = {}
    for row in _items(rows):
        namespace_id, _, raw = _items(row, 3)
        if type(raw) is not bytes:
            raise InvalidReplyError("expected fields")
        found[whole(namespace_id)] = raw
    return found


Explained = tuple[list[int], list[float], float | None, list[NamespaceRow]]
"""(code of each key, its age in seconds, how far back the node remembers, (namespace id, blocks,
fields) ...)"""


def explained(count: int, body: object) -> Explained:
    """Read the answer to EXPLAIN of `count` keys."""
    told, reaches_back_s, namespaces = _items(body, 3)
    fates = [_items(fate, 2) for fate in _items(told, count)]
    codes = [code for code, _ in fates if type(code) is int]
    if len(codes) < count:
        raise InvalidReplyError("expected a code")
    back = None if reaches_back_s is None else _seconds(reaches_back_s)
    rows = []
    for row in _items(namespaces):
        namespace_id, blocks, raw = _items(row, 3)
        if type(raw) is not bytes:
            raise InvalidReplyError("expected fields")
        rows.append((whole(namespace_id), whole(blocks), raw))
    return codes, [_seconds(age_s) for _, age_s in fates], back, rows


def reset_number(body: object) -> int:
    """Read the answer to RESET: the number that the node has reached."""
    number, _ = _items(body, 2)
    return whole(number)
