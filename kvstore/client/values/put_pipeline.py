"""Saves values to the nodes of this host.

One value goes straight: asked for, copied, committed. Of many, what one request asks for is a part,
which goes the same way; while one is copied, nodes work on the parts before and after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import TypeVar, cast

import xxhash

from kvstore.batches import in_batches
from kvstore.client.base import Later, Reservation, ReserveAnswer
from kvstore.client.nodes.deadlines import connecting, in_turn
from kvstore.client.nodes.saving.host_writer import HostWriter, Share
from kvstore.client.nodes.saving.link import Grants, NodeLink
from kvstore.client.payloads.tensors import Payload
from kvstore.errors import DeadlineError, NodeUnavailableError, PeerError
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.machine import Machine
from kvstore.protocol.control_requests import Wants
from kvstore.segment import batch_read
from kvstore.types import NO_SPACE, Key, Kind, PutResult, rejected

WINDOW_BYTES = 128 << 20
"""Bytes reserved at a time at one node: a large batch must not hold all slots at once."""
INLINE_PART_BYTES = 1 << 20
"""Bytes that travel inside the request of a part at most."""
LONE_INLINE_FACTOR = 2
"""A value that is saved alone travels in the request up to so many times the size that the node
says: what that saves, a request and a wake-up, is worth copying it more often. In a batch it saves
no request, and from about three times on it costs both sides more than it saves."""
PARTS = 2
"""Of what is reserved at a time: half of the node's work is then done while a client copies. More
parts are more messages, and on a busy machine each may cost the sender its core for a while."""
PART_BYTES_MIN = 4 << 20
"""Copying it takes about as long as the node needs for a request."""

COPY_BYTES = 32 << 20
"""Copied in one call, in which nobody is asked whether the save is wanted; some milliseconds."""

NO_SPACE_TRIES = 6
NO_SPACE_WAIT_S = 0.002
"""Before the second try; doubles with each further one."""

_GONE = (NodeUnavailableError, DeadlineError)
R = TypeVar("R")
_stopped: ContextVar[Callable[[], bool]] = ContextVar("stopped", default=lambda: False)


class StoppedError(Exception):
    """Saves were given up by their caller: what is not complete is not stored."""


def unless(stopped: Callable[[], bool], call: Callable[[], R]) -> R:
    """`call()`, whose saves are given up once `stopped()`: they raise `StoppedError`."""
    before = _stopped.set(stopped)
    try:
        return call()
    finally:
        _stopped.reset(before)


def check_wanted() -> None:
    """Raise `StoppedError` if this thread's caller wants its saves no more."""
    if _stopped.get()():
        raise StoppedError


@dataclass(slots=True)
class _Values:
    """What one call saves, column by column, and what became of each."""

    namespace_id: int
    keys: Sequence[Key]
    datas: Sequence[memoryview]
    metas: Sequence[bytes]
    kinds: Sequence[Kind]
    sizes: Sequence[int]
    """In bytes, with the description."""
    checksums: bool
    results: list[PutResult | None]
    """None where that is not known, as the node went away or hangs: what it may still take is saved
    elsewhere too."""


def save(
    host: HostWriter,
    namespace_id: int,
    keys: Sequence[Key],
    payloads: Sequence[Payload],
    *,
    checksums: bool,
) -> list[PutResult]:
    """Put `payloads` under `keys`. What the node that it was meant for could not be asked goes
    to another; where none can be reached any more, that is rejected.

    Raises `NodeUnavailableError` when there is no node on this host: then nothing was saved.
    """
    if not keys:
        return []
    datas, metas, kinds = zip(*payloads, strict=True)
    sizes = list(map(add, map(len, datas), map(len, metas)))
    results: list[PutResult | None] = [None] * len(keys)
    values = _Values(namespace_id, keys, datas, metas, kinds, sizes, checksums, results)
    way = _straight if len(keys) == 1 else _side_by_side
    for i, failure in host.spread(keys, sizes, partial(way, host, values)).items():
        results[i] = rejected(str(failure))
    if len(keys) > 1 and sum(sizes) >= PART_BYTES_MIN:
        # What went in several requests was sealed head first: the end of a run would outlive it.
        host.touch(keys, host.machine.monotonic(), at_once=True, saved=True)
    return cast("list[PutResult]", results)


def _straight(host: HostWriter, values: _Values, shares: Sequence[Share]) -> dict[int, PeerError]:
    """Save a value that is alone: ask for a slot, copy, commit. Return why, if the node failed."""
    ((link, which),) = shares
    for attempt in range(1 + NO_SPACE_TRIES):
        if attempt:
            host.machine.sleep(NO_SPACE_WAIT_S * 2 ** (attempt - 1))
        wants = _wants(values, which, link.inline_bytes)
        granted = Grants()
        try:
            try:
                answers = link.reserve_later(wants, values.namespace_id, granted)()
                written, outcomes = _write(link, values, which, answers)
            finally:
                granted.close()
            for i, outcome in zip(written, outcomes(), strict=True):
                values.results[i] = outcome
        except _GONE as e:
            return {0: e}
        if values.results[0] is not NO_SPACE:
            break
    return {}


def _wants(values: _Values, which: Sequence[int], inline_max: int) -> Wants:
    """Return what is asked of the node for some of the values; the small ones travel in it."""
    check_wanted()  # what travels in the request is then stored
    metas = [values.metas[i] for i in which]
    wants = Wants(
        [values.keys[i] for i in which],
        sizes := [values.sizes[i] for i in which],
        [values.kinds[i] for i in which],
        list(map(len, metas)) if any(metas) else 0,
    )
    alone, room = len(which) == 1, INLINE_PART_BYTES
    if alone or min(sizes) <= inline_max:
        inline: list[bytes | None] = []
        lone_max = inline_max * LONE_INLINE_FACTOR if alone else 0
        for i, meta, size_bytes in zip(which, metas, sizes, strict=True):
            data = values.datas[i]
            small = size_bytes <= inline_max or 0 < data.nbytes <= lone_max
            fits = small and size_bytes <= room
            room -= size_bytes if fits else 0
            inline.append(data.tobytes() + meta if fits else None)
        wants.values = inline
        if values.checksums:
            digest = xxhash.xxh3_64_intdigest
            wants.checksums = [0 if value is None else digest(value) for value in inline]
    return wants


def _write(
    link: NodeLink, values: _Values, which: Sequence[int], answers: Sequence[ReserveAnswer]
) -> tuple[Sequence[int], Later[PutResult]]:
    """Copy into the slots that were granted and send the commit on its way. Return which of the
    values it is for; what became of the others is noted."""
    slots: list[Reservation] = []
    written: list[int] = []
    targets: list[memoryview] = []
    sources: list[memoryview] = []
    for i, answer in zip(which, answers, strict=True):
        if not isinstance(answer, Reservation):
            values.results[i] = answer
            continue
        slots.append(answer)
        written.append(i)
        buffer, data, meta = answer.buffer, values.datas[i], values.metas[i]
        sources.append(data)
        if meta:
            targets += buffer[: data.nbytes], buffer[data.nbytes :]
            sources.append(memoryview(meta))
        else:
            targets.append(buffer)
    if not slots:
        return [], list
    lengths = list(map(len, sources))
    every: Sequence[int] = range(len(sources))
    copies: Iterable[Sequence[int]] = [every]
    if len(sources) > 1:
        copies = in_batches(every, BATCH_KEYS_MAX, lengths.__getitem__, COPY_BYTES)
    for some in copies:
        batch_read.READER.copy_each([targets[n] for n in some], [sources[n] for n in some])
        check_wanted()
    return written, link.commit_later(slots)


def _side_by_side(
    host: HostWriter, values: _Values, shares: Sequence[Share]
) -> dict[int, PeerError]:
    """Save to each node its share, a part at a time: all are asked before any answer is waited for.
    Return why, of those values whose node failed."""
    saves = [_ShareSave(link, which, values, host.machine) for link, which in shares]
    try:
        left: list[_ShareSave] = []
        for one, by in in_turn(saves, host.timeout_s, host.machine.monotonic):
            # Of one alone nobody else needs the time.
            with connecting(by) if len(saves) > 1 else nullcontext():
                left += [one] * one.step()
        while left:
            left = [one for one in left if one.step()]
    finally:
        for one in saves:
            one.close()
    failed = [(one, i) for one in saves for i in one.which if values.results[i] is None]
    return {i: one.failure for one, i in failed if one.failure is not None}


class _ShareSave:
    """Saves to one node, part by part; the next is asked for before one is written."""

    def __init__(
        self, link: NodeLink, which: Sequence[int], values: _Values, machine: Machine
    ) -> None:
        self.which = which
        """The numbers of its values in the call."""
        self.failure: PeerError | None = None
        self._link = link
        self._values = values
        self._machine = machine
        self._attempt = 0
        self._trying = which
        self._left = self._divided(which)
        self._granted = Grants()
        self._asked: tuple[Sequence[int], int, Later[ReserveAnswer]] | None = None
        """A part that is not written yet, its bytes, and the answer to come."""
        self._committed: tuple[Sequence[int], Later[PutResult]] | None = None

    def _divided(self, which: Sequence[int]) -> deque[tuple[Sequence[int], int]]:
        """Return the parts, each with its bytes."""
        parts: deque[tuple[Sequence[int], int]] = deque()
        sizes = self._values.sizes
        for window in in_batches(which, BATCH_KEYS_MAX, sizes.__getitem__, WINDOW_BYTES):
            size_bytes = sum(map(sizes.__getitem__, window))
            count = max(1, min(PARTS, len(window), size_bytes // PART_BYTES_MIN))
            for part in in_batches(window, -(-len(window) // count)):
                parts.append((part, sum(map(sizes.__getitem__, part))))
        return parts

    def step(self) -> bool:
        """Ask for the next part, and write the one that was asked for before. False when nothing is
        left."""
        asked, self._asked = self._asked, None
        try:
            if asked is None:
                self._ask(0)
            else:
                which, size_bytes, answers = asked
                granted = answers()
                self._ask(size_bytes)
                written = _write(self._link, self._values, which, granted)
                before, self._committed = self._committed, written
                self._note(before)
        except _GONE as e:
            self._failed(e)
        if self._asked is not None or self._left:
            return True
        before, self._committed = self._committed, None
        try:
            self._note(before)
        except _GONE as e:
            self._failed(e)
        return self._again()

    def _ask(self, beside_bytes: int) -> None:
        """Ask for the next part, if it may be reserved beside so many bytes."""
        if self._left and (not beside_bytes or beside_bytes + self._left[0][1] <= WINDOW_BYTES):
            which, size_bytes = self._left.popleft()
            wants = _wants(self._values, which, self._link.inline_bytes)
            namespace_id = self._values.namespace_id
            answers = self._link.reserve_later(wants, namespace_id, self._granted)
            self._asked = which, size_bytes, answers

    def _note(self, committed: tuple[Sequence[int], Later[PutResult]] | None) -> None:
        if committed is not None:
            which, outcomes = committed
            for i, outcome in zip(which, outcomes(), strict=True):
                self._values.results[i] = outcome

    def _failed(self, error: PeerError) -> None:
        """Leave the rest to other nodes."""
        self.failure = error
        self._left.clear()
        self.close()
        self._granted = Grants()

    def _again(self) -> bool:
        """Try again what found every slot reserved: reservations are short, and some were ours."""
        results = self._values.results
        again = [i for i in self._trying if results[i] is NO_SPACE]
        if not again or self._attempt == NO_SPACE_TRIES:
            return False
        if len(again) == len(self._trying):
            self._machine.sleep(NO_SPACE_WAIT_S * 2**self._attempt)
        self._attempt += 1
        for i in again:
            results[i] = None
        self._trying, self._left = again, self._divided(again)
        return True

    def close(self) -> None:
        """Give back what was asked for and not committed."""
        asked, self._asked = self._asked, None
        try:
            if asked is not None:
                with suppress(PeerError):
                    asked[2]()
        finally:
            self._granted.close()
