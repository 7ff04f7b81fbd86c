"""Defines what an index has to do. One suite (tests/contract/index.py) runs against each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvstore.limits import PATIENT_TIMEOUT_S
from kvstore.system.scoped import Giving, Scoped
from kvstore.types import Key

Record = bytes
"""44 bytes, 60 when signed, see record.py. The index neither reads nor checks them."""

ANNOUNCEMENT_BYTES_MAX = 16 << 10


Place = tuple[int, int]
"""How far a scan has come: a part of the index, and a position in it; (0, 0) at both ends."""


class KeyRecord(NamedTuple):
    key: Key
    record: Record


KeyedRecord = tuple[Key, Record]
"""The plain form of a `KeyRecord`, which a batch may contain."""


_patience: Scoped[float] = Scoped()


def patient(timeout_s: float = PATIENT_TIMEOUT_S) -> Giving[float]:
    """Let this thread's calls inside the block take `timeout_s` where an index's own deadline is
    shorter."""
    return _patience.giving(timeout_s)


def allowed_s(timeout_s: float) -> float:
    """Return what a call may take now whose own deadline is `timeout_s`. The innermost block
    counts."""
    return max([timeout_s, *_patience.in_force()[-1:]]) if _patience.entries else timeout_s


@runtime_checkable
class Index(Protocol):
    """Maps keys to records. A hint, never the truth: any answer may be stale or gone.

    Every call ends within its own deadline and raises `IndexUnavailableError`
    when the index cannot answer. Of an index in several parts (shards) the keys of a
    part that is away are absent while another part answers. Batches are at most
    `BATCH_KEYS_MAX` long (`UsageError` otherwise) and cost one round trip a call, on a
    cluster one per shard touched. Safe to call from several threads.
    """

    def match(self, keys: Sequence[Key]) -> list[Record]:
        """Return the records of the longest leading run of `keys` that is present, in order."""
        ...

    def lookup(self, keys: Sequence[Key]) -> list[Record | None]:
        """Return a record or None for each of `keys`, in order."""
        ...

    def publish(self, records: Sequence[KeyedRecord]) -> Sequence[KeyedRecord]:
        """Set every record, replacing what was there. All or some may be lost on error.

        Returns those whose part of the index is away while others took theirs: none,
        but for a cluster that lost a shard.
        """
        ...

    def remove(self, records: Sequence[KeyedRecord]) -> int:
        """Compare and delete: drop each key only while it still holds that record.

        Returns how many were dropped.
        """
        ...

    def announce(self, node_id: int, announcement: bytes, ttl_s: float) -> None:
        """Publish what readers need to reach a node; it vanishes after `ttl_s` seconds."""
        ...

    def renew(self, node_id: int, ttl_s: float) -> bool:
        """Let the announcement of `node_id` vanish `ttl_s` seconds from now; False when there is
        none. A full index does this too, where it raises `IndexRefusedError` for `announce`."""
        ...

    def withdraw(self, node_id: int) -> None:
        """Take the announcement of `node_id` back; there need not be one."""
        ...

    def node(self, node_id: int) -> bytes | None:
        """Return the announcement of `node_id`, None when there is none."""
        ...

    def nodes(self) -> dict[int, bytes]:
        """Return all announcements, by node id."""
        ...

    def scan(self, place: Place) -> tuple[Place, list[KeyRecord]]:
        """Return some of the records, and the place to continue from. A scan from (0, 0) to (0, 0)
        contains each record that was there all the time, unless the parts of the index changed
        meanwhile."""
        ...

    def ping(self) -> None:
        """Return when the index answers, raise `IndexUnavailableError` when it does not."""
        ...

    def identity(self) -> str:
        """Return which index this is, as far as that can be told without asking it.

        Two that say the same are one index; of two that differ nobody knows. Empty where
        nothing can be told. Names no user and no password.
        """
        ...

    def incarnation(self) -> str:
        """Return a value that changes whenever keys may have been lost (restart, flush,
        failover)."""
        ...

    def close(self) -> None:
        """Give connections back. Safe to call twice."""
        ...
