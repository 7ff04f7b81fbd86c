"""Finds out why a block is missing: from the index, the nodes of this host, and what else is there.

Asked by people and by logs, never on the way of a get. It has connections of its
own, so that a node that hangs here costs saves nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvstore.client.base import MissQuery
from kvstore.client.explanation import (
    FieldDifference,
    Missing,
    MissReason,
    ago,
    differences,
    listed,
)
from kvstore.client.nodes.control import ControlChannel
from kvstore.client.nodes.deadlines import in_turn, until
from kvstore.client.nodes.readability import Readability
from kvstore.core.namespaces import namespace_of
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.core.report import (
    ON_DISK_CODE,
    READ_CODE,
    RESERVED_CODE,
    SEALED_CODE,
    UNKNOWN_CODE,
)
from kvstore.errors import IndexUnavailableError, PeerError, UsageError
from kvstore.index.announced import announced_node
from kvstore.index.base import Index, Record
from kvstore.keys import SALT_FIELD, Namespace
from kvstore.nodedir import LOCK, Announcement, NodeDir, stranger
from kvstore.protocol.control import Op, join_keys
from kvstore.protocol.control_replies import InvalidReplyError, explained
from kvstore.record import RecordSigner, unpack_record
from kvstore.system.filelock import is_locked
from kvstore.system.fork import in_each_child
from kvstore.transport.stream.requests import ask
from kvstore.types import Key, Location

NODES_ASKED_MAX = 16
CANDIDATES_MAX = 32
"""Namespaces in which the same tokens are looked for, those with fewest differences first."""
NEAR_FIELDS_MAX = 4
"""A namespace that differs in more fields is another model's, not a mistake."""
SALT_FIELDS = frozenset({"salt", "cache_salt", "hash_seed", SALT_FIELD})
"""Fields that keep equal tokens apart on purpose."""

_GONE: dict[int, tuple[MissReason, str]] = {
    GoneWhy.EVICTED: (MissReason.EVICTED, "evicted it to make room"),
    GoneWhy.DELETED: (MissReason.DELETED, "was asked to delete it"),
    GoneWhy.CLEARED: (MissReason.CLEARED, "was asked to clear its namespace"),
    GoneWhy.EXPIRED: (MissReason.EXPIRED, "wiped it: its namespace bounds its life"),
    GoneWhy.ABORTED: (MissReason.NOT_COMMITTED, "got its slot back unwritten from its writer"),
    GoneWhy.WRITER_DIED: (MissReason.NOT_COMMITTED, "freed its slot: its writer died"),
    GoneWhy.CORRUPT: (MissReason.CORRUPT, "dropped it: its bytes were not those saved"),
    GoneWhy.REFUSED_SPACE: (
        MissReason.REFUSED,
        "refused it: every slot that fits was reserved or pinned",
    ),
    GoneWhy.REFUSED_SIZE: (
        MissReason.REFUSED,
        "refused it: too large for it, or its writer held too many slots",
    ),
}

THERE = frozenset({SEALED_CODE, READ_CODE})
_READ = {READ_CODE: True, GoneWhy.EVICTED: False, GoneWhy.EXPIRED: False}


class _Answer(NamedTuple):
    """What one node says about one key, or several."""

    node: str
    codes: list[int]
    ages_s: list[float]
    reaches_back_s: float | None
    namespaces: list[tuple[int, int, bytes]]


class _Candidate(NamedTuple):
    """The same tokens under other fields."""

    fields: tuple[FieldDifference, ...]
    key: Key | None
    node: str
    """Where a namespace with these fields has blocks; empty when that is not known."""


class Explainer:
    """Answers why blocks are missing. Thread-safe. A question costs an index lookup, a look for
    nodes, and a request to each."""

    def __init__(
        self,
        index: Index,
        readability: Readability,
        timeout_s: float,
        signer: RecordSigner | None = None,
    ) -> None:
        self._nodes = readability.nodes
        self._machine = self._nodes.machine
        self._now = self._machine.monotonic
        self._signer = signer
        self._readability = readability
        self._index = index
        self._remote = readability.remote
        self._timeout_s = timeout_s
        self._lock = self._machine.lock()
        in_each_child(self)
        self._channels: dict[tuple[int, int], ControlChannel] = {}
        """By node id and epoch."""
        self._closed = False

    def why(self, question: MissQuery) -> Missing:
        """See `BlockStore.why_missing`."""
        block, key = question.block, question.key
        try:
            (record,) = self._index.lookup([key])
        except IndexUnavailableError as e:
            why = self._readability.without_index(e)
            return Missing(block=block, reason=why.reason, detail=why.detail)
        if record is not None:
            unreadable = self._unreadable(question, record)
            if unreadable is not None:
                return unreadable
        answers, silent = self._ask([key])
        told = _told(block, answers, indexed=record is not None)
        if told is not None:
            return told
        if record is not None:
            return Missing(
                block=block,
                reason=MissReason.LOAD_FAILED,
                detail="its record leads to a slot that does not hold it (any more)",
            )
        if silent or not answers:
            who = f"{', '.join(silent)} did not answer" if silent else "there is no node to ask"
            who = "; ".join([who, *map(str, self._nodes.strangers())])
            detail = f"not in the index; {who}, so nobody can say why"
            return Missing(block=block, reason=MissReason.ABSENT, detail=detail)
        different = self._under_other_fields(question, answers) if block == 0 else None
        return different or _never_stored(block, answers)

    def were_read(self, keys: Sequence[Key]) -> list[bool | None]:
        """See `BlockStore.were_read`; of at most `BATCH_KEYS_MAX` keys."""
        answers, _ = self._ask(keys)
        each = zip(*([_READ.get(code) for code in answer.codes] for answer in answers), strict=True)
        return [True if True in said else False if False in said else None for said in each]

    def after_fork_in_child(self) -> None:
        self._lock = self._machine.lock()  # a thread of the parent may have had it

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    # --- nodes --------------------------------------------------------------

    def _living(self) -> Iterator[tuple[NodeDir, Announcement]]:
        for announcement, directory in self._nodes.here():
            if directory.alive():
                yield directory, announcement

    def _ask(self, keys: Sequence[Key]) -> tuple[list[_Answer], list[str]]:
        """Return what each node says, and the names of those that did not answer."""
        said, accept = join_keys(keys), partial(explained, len(keys))
        give_up_at = self._now() + self._timeout_s
        answers: list[_Answer] = []
        silent: list[str] = []
        living = list(self._living())[:NODES_ASKED_MAX]
        channels = [*zip(living, self._channels_of(living), strict=True)]
        for ((directory, announcement), channel), by in in_turn(
            channels, self._timeout_s, self._now
        ):
            try:
                with until(by):
                    answer = channel.request(Op.EXPLAIN, said, accept=accept)
                answers.append(_Answer(announcement.name, *answer))
            except (PeerError, UsageError):
                silent.append(directory.name)  # gone, hung, or of an older version
        here = {announcement.node_id for _, announcement in living}
        for announcement in self._elsewhere(here)[: NODES_ASKED_MAX - len(living)]:
            deadline = self._now() + self._timeout_s / 2
            if self._now() > give_up_at or not self._remote.allows(announcement.node_id):
                silent.append(f"{announcement.name} on {announcement.host}")
                continue
            try:
                body = ask(self._remote.stream, announcement, [Op.EXPLAIN, 1, said], deadline)
                answers.append(_Answer(announcement.name, *accept(body)))
            except (PeerError, InvalidReplyError):
                self._remote.failed(announcement.node_id)
                silent.append(f"{announcement.name} on {announcement.host}")
            else:
                self._remote.succeeded(announcement.node_id)
        return answers, silent

    def _elsewhere(self, here: Container[int]) -> list[Announcement]:
        """Nodes of other hosts that can be asked, those with an id in `here` left out."""
        try:
            words = self._nodes.announcements().values()
        except IndexUnavailableError:
            return []
        now = self._now()
        return [
            announcement
            for announcement in words
            if announcement.node_id not in here
            and self._remote.node(announcement.node_id, announcement.epoch, now) is not None
        ]

    def _channels_of(
        self, living: Sequence[tuple[NodeDir, Announcement]]
    ) -> Iterable[ControlChannel]:
        """Return a channel to each of `living`; those to nodes that are gone are closed."""
        with self._lock:
            if self._closed:
                raise UsageError("client", "closed", "must be open")
            names = {
                (announcement.node_id, announcement.epoch): directory
                for directory, announcement in living
            }
            gone = [self._channels.pop(name) for name in [*self._channels] if name not in names]
            for name, directory in names.items():
                if name not in self._channels:
                    self._channels[name] = ControlChannel(
                        directory, name, self._timeout_s, lambda: ((), ()), machine=self._machine
                    )
            channels = [self._channels[name] for name in names]
        for channel in gone:
            channel.close()
        return channels

    def _unreadable(self, question: MissQuery, record: Record) -> Missing | None:
        """Return why the node that a record names cannot be read; None when it can."""
        block = question.block
        if self._signer is not None and not self._signer.right(question.key, record):
            detail = "its record in the index is not signed, or with another key than ours"
            return Missing(block=block, reason=MissReason.BAD_SIGNATURE, detail=detail)
        location = unpack_record(question.key, record)
        if location is None:
            detail = "its record in the index is damaged"
            return Missing(block=block, reason=MissReason.INDEX_ERROR, detail=detail)
        for _, announcement in self._living():
            if announcement.node_id == location.node_id:
                if announcement.epoch == location.epoch:
                    return self._tried(block, location, announcement, "on this host")
                detail = f"node {announcement.name}, which had it, was started anew since"
                return Missing(
                    block=block, reason=MissReason.NODE_DEAD, detail=detail, node=announcement.name
                )
        node = self._remote.node(location.node_id, location.epoch, self._now())
        if node is not None:
            return self._tried(block, location, node, f"on host {node.host}")
        return self._of_another_host(block, location)

    def _tried(self, block: int, at: Location, node: Announcement, where: str) -> Missing | None:
        """Connect to the node, or open its memory; None when the block can be read there."""
        deadline = self._now() + self._timeout_s / 2
        why = self._readability.why_not_read(node, at, deadline)
        if not why:
            return None
        detail = f"node {node.name} has it, {where}, and this client cannot read it: {why.detail}"
        return Missing(block=block, reason=why.reason, detail=detail, node=node.name)

    def _of_another_host(self, block: int, location: Location) -> Missing:
        """A record of a node that does not live on this host, or not with this run directory."""
        announcement, other = None, None
        with suppress(IndexUnavailableError):
            announcement = announced_node(self._index, location.node_id, self._signer)
            other = stranger(self._index.node(location.node_id) or b"")
        if other is not None:
            return Missing(
                block=block, reason=MissReason.OUT_OF_REACH, detail=str(other), node=other.name
            )
        if announcement is None:
            name = f"{location.node_id:016x}"
            detail = f"node {name}, which had it, does not announce itself any more"
            return Missing(block=block, reason=MissReason.NODE_DEAD, detail=detail, node=name)
        here = announcement.host == socket.gethostname()
        if here and not is_locked(Path(announcement.control_path).parent / LOCK):
            detail = f"node {announcement.name}, which had it, has ended"
            return Missing(
                block=block, reason=MissReason.NODE_DEAD, detail=detail, node=announcement.name
            )
        where = "in another run directory of this host" if here else f"on host {announcement.host}"
        name, reason = announcement.name, MissReason.OUT_OF_REACH
        detail = f"node {name} has it, {where}: it failed lately and answers now"
        said = Missing(block=block, reason=reason, detail=detail, node=name)
        return self._tried(block, location, announcement, where) or said

    # --- other fields -------------------------------------------------------

    def _under_other_fields(self, question: MissQuery, answers: list[_Answer]) -> Missing | None:
        """Return the same tokens in another namespace, or the nearest one when ours has nothing."""
        ours = question.namespace
        candidates = [_Candidate((field,), key, "") for field, key in question.others]
        near: list[_Candidate] = []
        for namespace, node in _namespaces(answers):
            if namespace.id != ours.id:
                fields = differences(ours.fields, namespace.fields)
                near.append(_Candidate(fields, question.key_in(namespace), node))
        near.sort(key=lambda candidate: len(candidate.fields))
        candidates = [*candidates, *near][:CANDIDATES_MAX]
        candidates.sort(key=lambda candidate: len(candidate.fields))
        found = self._present(candidates)
        if found is not None:
            what = "the same tokens are there under other fields"
            return _different(question.block, found, what)
        if any(row[0] == ours.id for answer in answers for row in answer.namespaces):
            return None
        if not near or len(near[0].fields) > NEAR_FIELDS_MAX:
            return None
        what = "nothing is there with these fields; the nearest that is there differs"
        return _different(question.block, near[0], what)

    def _present(self, candidates: Sequence[_Candidate]) -> _Candidate | None:
        keyed = [candidate for candidate in candidates if candidate.key is not None]
        if not keyed:
            return None
        try:
            records = self._index.lookup([c.key for c in keyed if c.key is not None])
        except IndexUnavailableError:
            return None
        there = (c for c, record in zip(keyed, records, strict=True) if record is not None)
        return next(there, None)


def _namespaces(answers: Iterable[_Answer]) -> Iterator[tuple[Namespace, str]]:
    """Yield those with blocks whose fields are known, each with one node that has some."""
    seen: set[int] = set()
    for answer in answers:
        for namespace_id, _, raw in answer.namespaces:
            if raw and namespace_id not in seen:
                seen.add(namespace_id)
                with suppress(UsageError):
                    yield namespace_of(raw), answer.node


def _told(block: int, answers: Sequence[_Answer], *, indexed: bool) -> Missing | None:
    """Return what a node knows about the block itself: what is there now before what is gone."""
    for answer in answers:
        if answer.codes[0] in THERE and indexed:
            return Missing(
                block=block,
                reason=MissReason.BEING_WRITTEN,
                detail=f"node {answer.node} has it now: it was stored after the lookup",
                node=answer.node,
            )
        if answer.codes[0] in (*THERE, ON_DISK_CODE):
            where = " on a disk" if answer.codes[0] == ON_DISK_CODE else ""
            return Missing(
                block=block,
                reason=MissReason.NOT_INDEXED,
                detail=f"node {answer.node} has it{where}, but the index does not know of it (yet)",
                node=answer.node,
            )
        if answer.codes[0] == RESERVED_CODE:
            return Missing(
                block=block,
                reason=MissReason.BEING_WRITTEN,
                detail=f"a writer got a slot at node {answer.node} {ago(answer.ages_s[0])} ago "
                "and has not committed it",
                node=answer.node,
                age_s=answer.ages_s[0],
            )
    gone = [answer for answer in answers if answer.codes[0] in _GONE]
    if not gone:
        return None
    last = min(gone, key=lambda answer: answer.ages_s[0])
    reason, what = _GONE[last.codes[0]]
    detail = f"node {last.node} {what}, {ago(last.ages_s[0])} ago"
    return Missing(block=block, reason=reason, detail=detail, node=last.node, age_s=last.ages_s[0])


def _different(block: int, candidate: _Candidate, what: str) -> Missing:
    fields = candidate.fields
    salted = {difference.field for difference in fields} <= SALT_FIELDS
    at = f" (node {candidate.node})" if candidate.node else ""
    return Missing(
        block=block,
        reason=MissReason.SALT if salted else MissReason.DIFFERENT_FINGERPRINT,
        detail=f"{what}{at}: {listed(fields)}",
        node=candidate.node,
        differing_fields=fields,
    )


def _never_stored(block: int, answers: Sequence[_Answer]) -> Missing:
    """Say that nobody has stored it, as surely as the nodes' memories reach back."""
    unsure = [a for a in answers if a.codes[0] != UNKNOWN_CODE or a.reaches_back_s is not None]
    names = ", ".join(answer.node for answer in answers)
    if unsure:
        back_s = min(a.reaches_back_s or 0.0 for a in unsure)
        detail = f"not stored at {names} in the last {ago(back_s)}, as far back as they remember; "
        detail += "whether it was evicted before is not known any more"
    else:
        detail = f"never stored at {names} since it started"
    return Missing(block=block, reason=MissReason.NEVER_STORED, detail=detail)
