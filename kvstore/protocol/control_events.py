"""Decodes requests to a node into events of its core (control.py says what travels).

Clients do not import it: they know nothing of a node's decisions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import gt
from typing import Any, TypeGuard, cast

from kvstore.core.events import (
    Abort,
    Clear,
    Commit,
    Drop,
    EngineCounts,
    Event,
    Explain,
    Introduce,
    Listing,
    Named,
    Pin,
    Reserve,
    Reset,
    Retain,
    Stat,
    Suspect,
    Touch,
    Unpin,
)
from kvstore.core.namespaces import namespace_of
from kvstore.core.outgoing.watched import REPORTED_NAMES_MAX
from kvstore.errors import UsageError
from kvstore.limits import (
    BATCH_KEYS_MAX,
    HELD_MAX,
    LIST_ROWS_MAX,
    META_BYTES_MAX,
    NAME_BYTES_MAX,
    RESET_NAMESPACES_MAX,
    RETAINED_S_MAX,
)
from kvstore.protocol.control import PROTOCOL_VERSION, Op
from kvstore.types import KEY_BYTES, Key, Kind

_CLIENT_ID = re.compile("[0-9a-f]{32}")
_COUNTER = re.compile("[a-z_]{1,32}(:[a-z-]{1,32})?")
_INTEGERS = {int}
"""The type of integers on the wire; bool, a subtype, does not count."""
_LISTS = {list}


def _fail(field: str, value: object, must: str) -> UsageError:
    return UsageError(field, value, must)


def _split_keys(raw: object) -> list[Key]:
    if not isinstance(raw, bytes) or len(raw) % KEY_BYTES:
        raise _fail("keys", type(raw).__name__, f"must be binary, {KEY_BYTES} bytes a key")
    if len(raw) > BATCH_KEYS_MAX * KEY_BYTES:
        raise _fail("keys", len(raw) // KEY_BYTES, f"at most {BATCH_KEYS_MAX} a message")
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]


def _ints(field: str, raw: object, count: int, below: int) -> Sequence[int]:
    """Return a list of `count` integers from 0 to below - 1; one integer stands for all."""
    if type(raw) is int and 0 <= raw < below:
        return [raw] * count
    values = [raw] * count if isinstance(raw, int) else raw
    if not isinstance(values, list) or len(values) != count:
        raise _fail(field, raw, f"must be an integer or a list of {count}")
    if not _whole_below(values, below):
        wrong = next(value for value in values if not _whole_below([value], below))
        raise _fail(field, wrong, f"must be an integer from 0 to {below - 1}")
    return values


def _whole_below(values: Sequence[object], below: int) -> TypeGuard[Sequence[int]]:
    """Return whether all are integers from 0 to below - 1. Looked at in C: a batch has hundreds."""
    if not values:
        return True
    if set(map(type, values)) != _INTEGERS:
        return False
    whole = cast("Sequence[int]", values)
    return 0 <= min(whole) <= max(whole) < below


def _int(field: str, raw: object, below: int) -> int:
    """Return an integer from 0 to below - 1."""
    return raw if type(raw) is int and 0 <= raw < below else _ints(field, [raw], 1, below)[0]


def _rows(field: str, raw: object, at_most: int) -> list[object]:
    if not isinstance(raw, list) or len(raw) > at_most:
        raise _fail(field, type(raw).__name__, f"must be a list of at most {at_most}")
    return raw


def _tuples(field: str, raw: object, width: int) -> list[Any]:
    """Return a list of integer tuples of one width."""
    rows = _rows(field, raw, BATCH_KEYS_MAX)
    if not _are_rows(rows, width):
        wrong = next(item for item in rows if not _are_rows([item], width))
        raise _fail(field, wrong, f"must be {width} integers from 0 to 2**64 - 1")
    return list(map(tuple, rows))


def _are_rows(raw: Sequence[object], width: int) -> TypeGuard[Sequence[list[int]]]:
    if not raw:
        return True
    if set(map(type, raw)) != _LISTS:
        return False
    rows = cast("Sequence[list[object]]", raw)
    return set(map(len, rows)) == {width} and _whole_below(list(chain.from_iterable(rows)), 1 << 64)


def _values(raw: object, sizes: Sequence[int]) -> Sequence[bytes | None]:
    if raw is None:
        return [None] * len(sizes)
    if not isinstance(raw, list) or len(raw) != len(sizes):
        raise _fail("values", type(raw).__name__, f"must be None or a list of {len(sizes)}")
    for value, size in zip(raw, sizes, strict=True):
        if value is not None and (not isinstance(value, bytes) or len(value) != size):
            raise _fail("values", type(value).__name__, f"must be None or {size} bytes")
    return raw


def decode(session: int, message: object) -> Event:
    """Return the event in a request of a known client.

    Raises `UsageError` that names the field; nothing was changed.
    """
    if not isinstance(message, list) or len(message) < 2:
        raise _fail("message", type(message).__name__, "must be an array [op, request, ...]")
    op, request, *args = message
    if type(request) is not int or not 0 <= request < 1 << 63:
        raise _fail("request", request, "must be an integer from 0 to 2**63 - 1")
    decoder = _DECODERS.get(op) if type(op) is int else None
    if decoder is None:
        raise _fail("op", op, f"must be one of {[int(known) for known in _DECODERS]}")
    width, decode_args = decoder
    if len(args) != width:
        raise _fail("message", len(args), f"op {op} takes {width} arguments")
    return decode_args(session, request, *args)


def _reserve(
    session: int,
    request: int,
    namespace_id: object,
    raw_keys: object,
    raw_sizes: object,
    raw_kinds: object,
    raw_metas: object,
    raw_values: object,
    raw_checksums: object,
) -> Reserve:
    keys = _split_keys(raw_keys)
    sizes = _ints("size_bytes", raw_sizes, len(keys), 1 << 32)
    metas = _ints("meta_length", raw_metas, len(keys), META_BYTES_MAX + 1)
    if any(map(gt, metas, sizes)):
        longer = next(meta for meta, size in zip(metas, sizes, strict=True) if meta > size)
        raise _fail("meta_length", longer, "must be at most the block's size_bytes")
    return Reserve(
        session,
        request,
        keys,
        sizes,
        _int("namespace_id", namespace_id, 1 << 32),
        _ints("kind", raw_kinds, len(keys), len(Kind)),
        metas,
        _values(raw_values, sizes),
        _ints("checksum", raw_checksums, len(keys), 1 << 64),
    )


def _listing(session: int, request: int, after: object, at_most: object) -> Listing:
    if not isinstance(after, bytes) or len(after) not in (0, KEY_BYTES):
        raise _fail("after", after, "must be a key or empty")
    return Listing(session, request, after, _int("at_most", at_most, LIST_ROWS_MAX + 1))


def _introduce(session: int, request: int, namespace_id: object, fields: object) -> Introduce:
    namespace = namespace_of(fields)
    if namespace_id != namespace.id:
        raise _fail("namespace_id", namespace_id, f"these fields have the id {namespace.id}")
    return Introduce(session, namespace)


def _reset(session: int, request: int, number: object, namespace_ids: object) -> Reset:
    if not isinstance(namespace_ids, list) or not 0 < len(namespace_ids) <= RESET_NAMESPACES_MAX:
        raise _fail(
            "namespace_ids", namespace_ids, f"must be a list of 1 to {RESET_NAMESPACES_MAX}"
        )
    ids = _ints("namespace_id", namespace_ids, len(namespace_ids), 1 << 32)
    return Reset(session, request, _int("number", number, 1 << 63), ids)


def _retain(session: int, request: int, keys: object, ttl_s: object, tenant: object) -> Retain:
    return Retain(
        session,
        request,
        _split_keys(keys),
        _int("ttl_s", ttl_s, RETAINED_S_MAX + 1),
        _int("tenant", tenant, 1 << 32),
    )


def _named(session: int, request: int, raw_keys: object, raw_names: object) -> Named:
    keys = _split_keys(raw_keys)
    if not isinstance(raw_names, list) or len(raw_names) != len(keys):
        raise _fail("names", type(raw_names).__name__, f"must be a list of {len(keys)}")
    for name in raw_names:
        if not isinstance(name, bytes) or not 0 < len(name) <= NAME_BYTES_MAX:
            raise _fail("names", type(name).__name__, f"must be binary, 1 to {NAME_BYTES_MAX}")
    return Named(session, keys, raw_names)


def _report(session: int, request: int, raw_names: object, raw_counts: object) -> EngineCounts:
    names = _rows("names", raw_names, REPORTED_NAMES_MAX)
    for name in names:
        if not isinstance(name, str) or not _COUNTER.fullmatch(name):
            raise _fail("names", name, "must be letters, a colon and a reason")
    counts = _ints("counts", raw_counts, len(names), 1 << 63)
    return EngineCounts(session, dict(zip(cast("list[str]", names), counts, strict=True)))


_DECODERS: dict[int, tuple[int, Callable[..., Event]]] = {
    Op.RESERVE: (7, _reserve),
    Op.COMMIT: (1, lambda s, r, items: Commit(s, r, _tuples("items", items, 3))),
    Op.ABORT: (1, lambda s, r, items: Abort(s, r, _tuples("items", items, 2))),
    Op.PIN: (1, lambda s, r, keys: Pin(s, r, _split_keys(keys))),
    Op.UNPIN: (1, lambda s, r, items: Unpin(s, r, _tuples("items", items, 2))),
    Op.RETAIN: (3, _retain),
    Op.TOUCH: (1, lambda s, r, keys: Touch(s, _split_keys(keys))),
    Op.SAVED: (1, lambda s, r, keys: Touch(s, _split_keys(keys), saved=True)),
    Op.LEFT: (1, lambda s, r, keys: Touch(s, _split_keys(keys), left=True)),
    Op.REPORT: (2, _report),
    Op.DROP: (1, lambda s, r, keys: Drop(s, r, _split_keys(keys))),
    Op.CLEAR: (1, lambda s, r, ns: Clear(s, r, _int("namespace_id", ns, 1 << 32))),
    Op.RESET: (2, _reset),
    Op.STAT: (0, lambda s, r: Stat(s, r)),
    Op.LIST: (2, _listing),
    Op.EXPLAIN: (1, lambda s, r, keys: Explain(s, r, _split_keys(keys))),
    Op.NAMESPACE: (2, _introduce),
    Op.NAMES: (2, _named),
    Op.SUSPECT: (1, lambda s, r, keys: Suspect(s, _split_keys(keys))),
}


class Hello:
    """The first message of a connection: `[HELLO, request, version, client_id, reserved, pinned]`.

    `client_id` names the lease file whose lock says that the process lives. What it holds is
    said as (slot, generation) and, of pins, how many times; `claims` reads it.
    """

    __slots__ = ("_rows", "client_id", "pinned", "request", "reserved")

    def __init__(self, message: object) -> None:
        if not isinstance(message, list) or len(message) != 6 or message[0] != Op.HELLO:
            raise _fail("message", type(message).__name__, "the first must be HELLO")
        _, request, version, client_id, reserved, pinned = message
        if version != PROTOCOL_VERSION:
            raise _fail("version", version, f"this node speaks version {PROTOCOL_VERSION}")
        if not isinstance(client_id, str) or not _CLIENT_ID.fullmatch(client_id):
            raise _fail("client_id", client_id, "must be 32 hexadecimal digits")
        self.request = _int("request", request, 1 << 63)
        self.client_id = client_id
        self._rows = _rows("reserved", reserved, HELD_MAX), _rows("pinned", pinned, HELD_MAX)
        self.reserved: dict[int, int] = {}
        """Slot -> its generation."""
        self.pinned: dict[int, int] = {}
        """Slot -> how many times it is pinned."""

    def claims(self, at_most: int) -> Iterator[int]:
        """Read what it says it holds, so many at a time: yields how many were read while there is
        more. Raises `UsageError`."""
        reserved, pinned = self._rows
        for start in range(0, len(reserved), at_most):
            self.reserved.update(_tuples("reserved", reserved[start : start + at_most], 2))
            if pinned or start + at_most < len(reserved):
                yield at_most
        for start in range(0, len(pinned), at_most):
            rows = _tuples("pinned", pinned[start : start + at_most], 3)
            self.pinned.update((slot, times) for slot, _, times in rows)
            if start + at_most < len(pinned):
                yield at_most
