"""Remembers the fields behind the namespace ids of a node's blocks, as sent by clients."""

from __future__ import annotations

import json
from collections import OrderedDict

from kvstore.errors import UsageError
from kvstore.keys import Namespace
from kvstore.limits import NAMESPACE_BYTES_MAX, NAMESPACE_FIELDS_MAX


def namespace_of(raw: object) -> Namespace:
    """Return the namespace in its canonical JSON; `UsageError` when it is none or too large."""
    if not isinstance(raw, bytes) or len(raw) > NAMESPACE_BYTES_MAX:
        size = len(raw) if isinstance(raw, bytes) else type(raw).__name__
        raise UsageError("fields", size, f"must be binary, at most {NAMESPACE_BYTES_MAX} bytes")
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise UsageError("fields", raw, "must be JSON") from e
    if not isinstance(fields, dict) or len(fields) > NAMESPACE_FIELDS_MAX:
        raise UsageError("fields", raw, f"must be an object of at most {NAMESPACE_FIELDS_MAX}")
    for value in fields.values():
        if value is not None and not isinstance(value, str | int | float):
            raise UsageError("fields", value, "must be text, a number, true, false or null")
    try:
        return Namespace(fields)
    except (ValueError, RecursionError) as e:  # lone surrogates, numbers without an end
        raise UsageError("fields", raw, f"cannot be read: {e}") from e


class Namespaces:
    """The last `namespaces_max` namespaces that clients described, the least recently described
    first."""

    __slots__ = ("_by_id", "_namespaces_max")

    def __init__(self, namespaces_max: int) -> None:
        self._namespaces_max = namespaces_max
        self._by_id: OrderedDict[int, Namespace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    def told(self, namespace: Namespace) -> None:
        self._by_id[namespace.id] = namespace
        self._by_id.move_to_end(namespace.id)
        if len(self._by_id) > self._namespaces_max:
            self._by_id.popitem(last=False)

    def all(self) -> list[Namespace]:
        return list(self._by_id.values())
