"""Defines why a request did not hit, as plain data; explain.py finds it out."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.errors import IndexBreakerOpenError, IndexDeadlineError, IndexUnavailableError
from kvstore.keys import Field

ABSENT_FIELD = "(absent)"
"""Stands for a field that one of two namespaces does not have."""
_FIELDS_SHOWN_MAX = 8


class MissReason(enum.StrEnum):
    """Why the first missing block was missing; docs/explain.md says what to do about each."""

    NEVER_STORED = "never-stored"
    EVICTED = "evicted"
    DELETED = "deleted"
    CLEARED = "cleared"
    EXPIRED = "expired"
    """Its namespace bounds the life of its blocks (`ttl_s`)."""
    NOT_COMMITTED = "not-committed"
    """A writer had a slot for it and gave up, or died."""
    REFUSED = "refused"
    """The node had no slot for it."""
    BEING_WRITTEN = "being-written"
    """Its writer has not committed yet, or did so a moment after the lookup."""
    NOT_INDEXED = "not-indexed"
    """A node has it, the index does not say so (yet, or any more)."""
    DIFFERENT_FINGERPRINT = "different-fingerprint"
    SALT = "salt"
    """As above, and only a salt differs; or nothing is there under the request's salt."""
    NODE_DEAD = "node-dead"
    OUT_OF_REACH = "out-of-reach"
    """Its node lives, but cannot be read from here."""
    OTHER_USER = "other-user"
    """Its node is another user's of this host, and lacks what it needs to be read by its stream."""
    UNREADABLE_SECRET = "unreadable-secret"
    """Its node knows another secret than this client, or one of them none."""
    UNREADABLE_TLS = "unreadable-tls"
    """One side uses TLS and the other does not, or a certificate is not accepted."""
    UNREADABLE_TRANSPORTS = "unreadable-transports"
    """Its node offers none of the transports that this client may use."""
    UNREADABLE_REFUSED = "unreadable-refused"
    """Its node does not take this client's connections, for lack of room say."""
    UNREADABLE_UNMAPPED = "unreadable-unmapped"
    """Its node is on this host, and its memory cannot be opened by this process."""
    UNREADABLE_DISK = "unreadable-disk"
    """It is on a disk that this process cannot read, and its node serves no stream to it."""
    UNREADABLE_NO_CHECKSUM = "unreadable-no-checksum"
    """It was saved without a checksum, and this client reads nothing without."""
    DEADLINE = "deadline"
    BREAKER_OPEN = "breaker-open"
    INDEX_ERROR = "index-error"
    LOAD_FAILED = "load-failed"
    """It was found, and was another block or none when it was read."""
    BAD_SIGNATURE = "bad-signature"
    """Its record in the index is not signed, or not with this client's key."""
    CORRUPT = "corrupt"
    """Its bytes are not those whose checksum was saved with it."""
    ABSENT = "absent"
    """The index does not have it, and nobody could say (or was asked) why."""
    TOO_SHORT = "too-short"
    """The request does not fill one block."""
    TOO_BUSY = "too-busy"
    """Too many lookups were waiting."""
    NOT_TAKEN = "not-taken"
    """It was offered, and the engine made no room for it."""
    SKIPPED = "skipped"
    """The request wanted no more of it loaded."""
    SLOWER = "slower"
    """It was found, and loading it would take longer than computing it."""
    NO_STORE = "no-store"
    """The store could not be opened."""

    @property
    def unreadable(self) -> bool:
        """Return whether it is there, and this client cannot read it."""
        reasons = (MissReason.OUT_OF_REACH, MissReason.OTHER_USER)
        return self in reasons or self.startswith("unreadable-")


class Unreadable(NamedTuple):
    """Why this client cannot read a node, or one of its blocks."""

    reason: MissReason
    detail: str
    """For people: what is said of "the node" or "the block"."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def of_other_user(uid: int, remedy: str) -> Unreadable:
    """Return why a node of this host that belongs to user `uid` cannot be read, and what to do."""
    detail = f"it belongs to user {uid}, this process to user {os.geteuid()}"
    return Unreadable(
        MissReason.OTHER_USER, f"{detail}, so its blocks come by its stream alone: {remedy}"
    )


class FieldDifference(NamedTuple):
    """One field in which the namespace that was asked for and one that is there differ."""

    field: str
    asked: Field
    there: Field

    def __str__(self) -> str:
        return f"{self.field}: {self.asked!r} asked, {self.there!r} there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The first block of a request that could not be read, and why."""

    block: int
    """Its index: it covers tokens `block * block_tokens` and on."""
    reason: MissReason
    detail: str
    """For people; everything below is in it."""
    node: str = ""
    """Name of the node that the reason is about, empty when it is about none."""
    age_s: float | None = None
    """How long ago it happened, when that is known."""
    differing_fields: tuple[FieldDifference, ...] = ()

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a request could have got from the store, what it got, and why not the rest."""

    possible_tokens: int
    """Tokens in full blocks: the most that can hit."""
    hit_tokens: int
    """Tokens of the leading blocks that were (or can now be) read from the store."""
    first_missing: Missing | None = None
    """None when everything that was possible was hit."""
    local_tokens: int = 0
    """Tokens that the engine had in its own cache, so that the store was not needed."""
    request_id: str = ""
    trace_id: str = ""
    """Id of the request's trace (W3C), where it is part of one."""
    events: tuple[str, ...] = ()
    """What happened to the request, the last of it, in order."""
    disk_blocks: int = 0
    """Of the blocks that can be read, those on disks, of this host or another one."""
    key: str = ""
    """Whose value it is about, which has no tokens; empty when it is about tokens."""

    @property
    def reason(self) -> MissReason | None:
        """Why the first missing block is missing; None for a hit."""
        return None if self.first_missing is None else self.first_missing.reason

    def __str__(self) -> str:
        if self.key:
            hit = "hit, on a disk" if self.disk_blocks else "hit"
            return f"{self.key}: {self.first_missing or hit}"
        trace = f" (trace {self.trace_id})" if self.trace_id else ""
        whose = f"request {self.request_id}{trace}: " if self.request_id else ""
        local = f", {self.local_tokens} more were in the engine" if self.local_tokens else ""
        disk = f", {self.disk_blocks} blocks of them on disks" if self.disk_blocks else ""
        line = f"{whose}{self.hit_tokens} of {self.possible_tokens} tokens hit{disk}{local}"
        if self.first_missing is None:
            return line
        return f"{line}; block {self.first_missing.block}: {self.first_missing}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        missing = self.first_missing
        return {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "possible_tokens": self.possible_tokens,
            "hit_tokens": self.hit_tokens,
            "local_tokens": self.local_tokens,
            "disk_blocks": self.disk_blocks,
            "events": list(self.events),
            "first_missing": None if missing is None else missing_as_dict(missing),
        }


def missing_as_dict(missing: Missing) -> dict[str, Any]:
    """Plain data, for JSON."""
    return {
        "block": missing.block,
        "reason": str(missing.reason),
        "detail": missing.detail,
        "node": missing.node,
        "age_s": missing.age_s,
        "differing_fields": {
            field: {"asked": asked, "there": there}
            for field, asked, there in missing.differing_fields
        },
    }


def differences(
    asked: Mapping[str, Field], there: Mapping[str, Field]
) -> tuple[FieldDifference, ...]:
    """Return the fields in which two namespaces differ, in name order."""
    return tuple(
        FieldDifference(name, asked.get(name, ABSENT_FIELD), there.get(name, ABSENT_FIELD))
        for name in sorted({*asked, *there})
        if name not in asked or name not in there or asked[name] != there[name]
    )


def listed(fields: tuple[FieldDifference, ...]) -> str:
    """Return the differences as text, the first few of many."""
    shown = "; ".join(map(str, fields[:_FIELDS_SHOWN_MAX]))
    more = len(fields) - _FIELDS_SHOWN_MAX
    return f"{shown}; and {more} more" if more > 0 else shown


def ago(age_s: float) -> str:
    """`3.2 s`, `5 min`, `2 h` or `4 d`."""
    for unit_s, name in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if age_s >= 2 * unit_s:
            return f"{age_s / unit_s:.0f} {name}"
    return f"{age_s:.1f} s"


def reason_of(error: IndexUnavailableError) -> MissReason:
    """Return what an index that cannot be asked means for a lookup."""
    if isinstance(error, IndexBreakerOpenError):
        return MissReason.BREAKER_OPEN
    late = (IndexDeadlineError, TimeoutError)
    if isinstance(error, late) or isinstance(error.__cause__, late):
        return MissReason.DEADLINE
    return MissReason.INDEX_ERROR
