"""Checks the arguments of index calls, the same for every implementation."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import UsageError
from kvstore.index.base import ANNOUNCEMENT_BYTES_MAX, KeyedRecord
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.record import SIGNED_RECORD_BYTES
from kvstore.types import KEY_BYTES, Key

RECORD_BYTES_MAX = SIGNED_RECORD_BYTES
"""Redis keeps up to 44 bytes, a record that is not signed, in one allocation (0003)."""
ANNOUNCEMENT_TTL_S_MAX = 86_400.0

_KEY_TYPES = {bytes}
_KEY_SIZES = {KEY_BYTES}


def check_keys(keys: Sequence[Key]) -> None:
    """Raise `UsageError` unless `keys` are at most `BATCH_KEYS_MAX` keys of `KEY_BYTES` bytes."""
    if len(keys) > BATCH_KEYS_MAX:
        raise UsageError("keys", f"{len(keys)} keys", f"at most {BATCH_KEYS_MAX} in one call")
    # Two passes in C; a loop in Python would cost more than packing the keys.
    if not keys or (set(map(type, keys)) == _KEY_TYPES and set(map(len, keys)) == _KEY_SIZES):
        return
    wrong = next(key for key in keys if type(key) is not bytes or len(key) != KEY_BYTES)
    raise UsageError("keys", wrong, f"each must be {KEY_BYTES} bytes")


def check_records(records: Sequence[KeyedRecord]) -> None:
    """Raise `UsageError` unless `records` fit into one call and each into Redis' embstr."""
    if len(records) > BATCH_KEYS_MAX:
        raise UsageError("records", f"{len(records)} records", f"at most {BATCH_KEYS_MAX} a call")
    keys, values = list(zip(*records, strict=True)) or ((), ())
    if (
        set(map(type, keys)) | set(map(type, values)) <= _KEY_TYPES
        and set(map(len, keys)) <= _KEY_SIZES
        and max(map(len, values), default=0) <= RECORD_BYTES_MAX
    ):
        return
    for key, record in records:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise UsageError("records.key", key, f"must be {KEY_BYTES} bytes")
        if not isinstance(record, bytes) or len(record) > RECORD_BYTES_MAX:
            raise UsageError("records.record", record, f"at most {RECORD_BYTES_MAX} bytes")


def check_announcement(announcement: bytes, ttl_s: float) -> None:
    """Raise `UsageError` when an announcement is too long or its time to live is out of range."""
    if len(announcement) > ANNOUNCEMENT_BYTES_MAX:
        raise UsageError(
            "announcement", f"{len(announcement)} bytes", f"at most {ANNOUNCEMENT_BYTES_MAX}"
        )
    if not 0.001 <= ttl_s <= ANNOUNCEMENT_TTL_S_MAX:
        raise UsageError("ttl_s", ttl_s, f"from 0.001 to {ANNOUNCEMENT_TTL_S_MAX:.0f} seconds")


def check_node_id(node_id: int) -> None:
    if not 0 <= node_id < 1 << 64:
        raise UsageError("node_id", node_id, "must fit into 64 bits")
