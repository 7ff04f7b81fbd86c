"""Checks what callers give before anything is done with it; each function raises `UsageError`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence, Set
from hashlib import blake2b
from typing import Any, NoReturn, TypeVar

from kvstore.errors import UsageError
from kvstore.keys import Namespace
from kvstore.limits import (
    BLOCK_TOKENS_MAX,
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    TENANT_BYTES_MAX,
    Limits,
)
from kvstore.transport.stream.security import StreamSecurity
from kvstore.types import Value

T = TypeVar("T")

_PAIRS = {tuple, list}


class Uncopied:
    """Is of one process: `pickle` and `copy` say so."""

    def __reduce__(self) -> NoReturn:
        must = "cannot be pickled or copied: make a new one there, with the same arguments"
        raise UsageError(type(self).__name__, "(open)", must)


def is_a(field: str, value: object, kinds: type[T] | tuple[type[T], ...], must: str) -> T:
    """Return `value` if it is of `kinds`, else raise `UsageError`, saying what `field` `must` be.

    True and False are numbers only where `kinds` has `bool`.
    """
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in _all(kinds)):
        raise UsageError(field, value, must)
    return value


def _all(kinds: type | tuple[type, ...]) -> tuple[type, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def whole(field: str, value: object, least: int, most: int) -> None:
    """Check that `value` is a whole number from `least` to `most`."""
    number = is_a(field, value, int, f"must be a whole number from {least} to {most}")
    if not least <= number <= most:
        raise UsageError(field, value, f"must be from {least} to {most}")


def seconds(field: str, value: object) -> float:
    """`value` as seconds: finite and above 0."""
    number: float = is_a(field, value, (int, float), "must be a number of seconds")
    if not 0 < number <= sys.float_info.max:
        raise UsageError(field, value, "must be greater than 0, and finite")
    return float(number)


def text(field: str, value: object, *, secret: bool = False) -> None:
    """Check that `value` is text that can be a name: not empty, without zeros. What may have a
    `secret` in it is not shown."""
    seen = type(value).__name__ if secret else value
    if not isinstance(value, str):
        raise UsageError(field, seen, "must be text")
    if not value or "\0" in value or not _encodes(value):
        raise UsageError(field, seen, "must not be empty, nor have zeros or lone surrogates in it")


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def tenant_id(tenant: object) -> int:
    """Return the 32 bits by which nodes know a tenant. Raises `UsageError` for what cannot be its
    name."""
    raw = is_a("tenant", tenant, str, "must be text").encode("utf-8", "surrogatepass")
    if len(raw) > TENANT_BYTES_MAX:
        raise UsageError("tenant", f"{len(raw)} bytes", f"must be at most {TENANT_BYTES_MAX}")
    return int.from_bytes(blake2b(raw, digest_size=4, person=b"kvstore-tenant").digest(), "little")


def flag(field: str, value: object) -> None:
    """Check that `value` is True or False."""
    if not isinstance(value, bool):
        raise UsageError(field, value, "must be True or False")


def several(field: str, value: Any, of: str) -> Sequence[Any]:
    """Return what has a length and an order, and is no text: a list, a tuple, an array."""
    ordered = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not ordered or isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set):
        raise UsageError(field, value, f"must be a list of {of}")
    try:
        len(value)
    except TypeError as e:  # an array or tensor of no dimension
        raise UsageError(field, value, f"must be a list of {of}") from e
    return value  # type: ignore[no-any-return]


def pairs(items: Any) -> tuple[list[Any], list[Value]]:
    """Return the keys and the values of a mapping, or of pairs as they come."""
    if isinstance(items, Mapping):
        return list(items.keys()), list(items.values())
    must = "must be a mapping, or (key, value) pairs"
    if isinstance(items, str | bytes | bytearray | memoryview):
        raise UsageError("items", type(items).__name__, must)
    try:
        each = iter(items)
    except TypeError as e:
        raise UsageError("items", type(items).__name__, must) from e
    found = list(each)
    if not set(map(type, found)) <= _PAIRS and not all(isinstance(p, tuple | list) for p in found):
        raise UsageError("items", type(items).__name__, must)
    if set(map(len, found)) - {2}:
        raise UsageError("items", type(items).__name__, must)
    keys, values = zip(*found, strict=True) if found else ((), ())
    return list(keys), list(values)


def session_settings(
    *,
    url: object,
    key_prefix: object,
    node: object,
    node_size_bytes: object,
    run_dir: object,
    verify: object,
    limits: object,
    transports: object,
    security: object,
    waits_first: object = False,
    **_: object,
) -> None:
    """What `BlockSession` takes; contacts nobody. Others of its settings are not looked at."""
    flag("waits_first", waits_first)
    if url is not None:
        text("url", url, secret=True)
    text("key_prefix", key_prefix)
    if node is not None:
        text("node", node)
    if node_size_bytes is not None:
        whole("node_size_bytes", node_size_bytes, SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)
    if run_dir is not None:
        kinds: tuple[type, ...] = (str, os.PathLike)
        text("run_dir", os.fspath(is_a("run_dir", run_dir, kinds, "must be a path")))
    if not isinstance(verify, str) or verify not in ("never", "always"):
        raise UsageError("verify", verify, "must be 'never' or 'always'")
    if limits is not None:
        is_a("limits", limits, Limits, "must be kvstore.Limits(...)")
    if transports is not None:
        for name in several("transports", transports, "names"):
            text("transports", name)
    if security is not None:
        # Whoever gives the secret itself finds it in no message.
        given = security if isinstance(security, StreamSecurity) else type(security).__name__
        is_a("security", given, StreamSecurity, "must be kvstore.StreamSecurity(secret=...)")


def client_settings(
    *,
    namespace: object,
    block_tokens: object,
    node_size_bytes: object,
    salt: object,
    **session: object,
) -> None:
    """What `Client` takes, what goes to its `session` included; contacts nobody."""
    is_a("namespace", namespace, (str, Namespace), "must be a name or a kvstore.Namespace")
    if isinstance(namespace, str):
        text("namespace", namespace)
    elif salt is not None:
        raise UsageError("salt", "(given)", "give it to the Namespace")
    whole("block_tokens", block_tokens, 1, BLOCK_TOKENS_MAX)
    whole("node_size_bytes", node_size_bytes, SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)
    session_settings(node_size_bytes=node_size_bytes, **session)
