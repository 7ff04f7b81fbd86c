"""Saves many values: while one part is copied, nodes work on the parts before and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from itertools import zip_longest
from operator import add
from typing import TypeVar, cast

import xxhash

from kvstore.batches import in_batches, picked
from kvstore.client.base import Later, Reservation, ReserveAnswer
from kvstore.client.local.deadlines import connecting, each_within, in_turn
from kvstore.client.local.host_writer import HostWriter
from kvstore.client.local.host_writers import ROUNDS
from kvstore.client.local.link import Grants, NodeLink
from kvstore.client.local.writer import Writer
from kvstore.client.values.tensors import Payload
from kvstore.errors import DeadlineError, NodeUnavailableError, PeerError
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.machine import Machine
from kvstore.protocol.control_requests import Wants
from kvstore.segment import batch_read
from kvstore.types import IN_PROGRESS, NO_SPACE, Key, PutResult, rejected

WINDOW_BYTES = 128 << 20
"""Bytes reserved at a time by one put_many: a large batch must not hold all slots at once."""
INLINE_WINDOW_BYTES = 1 << 20
"""Bytes that travel inside the reserve requests of a window at most."""
LONE_INLINE_FACTOR = 2
"""A value that is saved alone travels in the request up to so many times the size that the node
says: what that saves, a request and a wake-up, is worth copying it more often. In a batch it saves
no request, and from about three times on it costs both sides more than it saves."""
PARTS = 2
"""Of a window: half of the node's work is then done while a client copies. More parts are
more messages, and on a busy machine each may cost the sender its core for a while."""
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
    values = _Values(keys, payloads)
    results: list[PutResult | None] = [IN_PROGRESS] * len(keys)
    todo: Sequence[int] = range(len(keys))
    without: set[NodeLink] = set()
    each_s = 0.0
    for _ in range(ROUNDS):
        try:
            plan = host.plan(picked(keys, todo), picked(values.sizes, todo), without)
        except NodeUnavailableError:
            if not without:
                raise
            break
        shares = [
            _Share(link, writer, namespace_id, picked(todo, which), values, checksums)
            for writer, link, which in plan
        ]
        each_s = each_s or host.each_s()
        with each_within(each_s) if each_s < host.timeout_s else nullcontext():
            _run(shares, host.timeout_s, host.machine)
        todo = []
        for share in shares:
            if len(share.results) == len(keys) and None not in share.results:
                results = share.results  # of the only one
                break
            for i, result in zip_longest(share.which, share.results):
                results[i] = rejected(str(share.failure)) if result is None else result
                if result is None:
                    todo.append(i)
                    without.add(share.link)
        if not todo:
            break
        todo.sort()
    if len(keys) > 1 and sum(values.sizes) >= PART_BYTES_MIN:
        # What went in several requests was sealed head first: the end of a run would outlive it.
        host.touch(keys, host.machine.monotonic(), at_once=True)
    return cast("list[PutResult]", results)


def _run(shares: Sequence[_Share], timeout_s: float, machine: Machine) -> None:
    """Side by side: each node is asked, all within `timeout_s`, before any answer is waited for."""
    try:
        while begun := _begun(shares, timeout_s, machine):
            for share in begun:
                share.finish(machine)
    finally:
        for share in shares:
            share.close()


def _begun(shares: Sequence[_Share], timeout_s: float, machine: Machine) -> list[_Share]:
    if len(shares) == 1:
        return [share for share in shares if share.begin()]  # nobody else needs the time
    begun: list[_Share] = []
    for share, by in in_turn(shares, timeout_s, machine.monotonic):
        with connecting(by):
            if share.begin():
                begun.append(share)
    return begun


class _Values:
    """What one call saves, column by column."""

    __slots__ = ("datas", "keys", "kinds", "metas", "sizes")

    def __init__(self, keys: Sequence[Key], payloads: Sequence[Payload]) -> None:
        self.keys = keys
        self.datas, self.metas, self.kinds = zip(*payloads, strict=True)
        self.sizes = list(map(add, map(len, self.datas), map(len, self.metas)))
        """In bytes, with the description."""


class _Share:
    """What is saved to one node, a window at a time."""

    def __init__(
        self,
        link: NodeLink,
        writer: Writer,
        namespace_id: int,
        which: Sequence[int],
        values: _Values,
        checksums: bool,
    ) -> None:
        self.link = link
        self.which = which
        """The numbers of its keys in the call."""
        self.results: list[PutResult | None] = []
        """What became of the first of them; None as in `_Window`, as it is for the others."""
        self.failure: PeerError | None = None
        self._writer = writer
        self._namespace_id = namespace_id
        self._values = values
        self._checksums = checksums
        self._windows = in_batches(which, BATCH_KEYS_MAX, values.sizes.__getitem__, WINDOW_BYTES)
        self._window: _Window | None = None

    def begin(self) -> bool:
        """Ask for the next window; False when there is none."""
        window = None if self.failure is not None else next(self._windows, None)
        if window is None:
            return False
        wants, datas, metas = _wants(self._values, window, self.link.inline_bytes, self._checksums)
        self._window = _Window(self._writer, self._namespace_id, wants, datas, metas)
        try:
            self._window.begin()
        except _GONE as e:
            self.failure, self._window = e, None
        return True

    def finish(self, machine: Machine) -> None:
        window = self._window
        if window is None:
            return
        self.results += _with_patience(window, machine)
        self.failure, self._window = window.failure, None

    def close(self) -> None:
        """Give back what is reserved, whatever ended the save."""
        if self._window is not None:
            self._window.close()


def _with_patience(window: _Window, machine: Machine) -> list[PutResult | None]:
    """Try again what found every slot reserved: reservations are short, and some were ours."""
    results = window.finish()
    for attempt in range(NO_SPACE_TRIES):
        if NO_SPACE not in results:
            break
        again = [i for i, result in enumerate(results) if result is NO_SPACE]
        if len(again) == len(results):
            machine.sleep(NO_SPACE_WAIT_S * 2**attempt)
        further = window.of(again)
        for i, result in zip(again, further.run(), strict=True):
            results[i] = result
        window.failure = further.failure or window.failure
    return results


def _wants(
    values: _Values, which: Sequence[int], inline_max: int, checksums: bool
) -> tuple[Wants, Sequence[memoryview], Sequence[bytes]]:
    """Return what is asked of the node for some of the values, and their bytes and descriptions."""
    keys, sizes = picked(values.keys, which), picked(values.sizes, which)
    datas, metas = picked(values.datas, which), picked(values.metas, which)
    inline: list[bytes | None] | None = None
    sums: int | list[int] = 0
    if len(keys) == 1 or min(sizes) <= inline_max:
        inline = _inline(datas, metas, inline_max)
        if checksums:
            digest = xxhash.xxh3_64_intdigest
            sums = [0 if value is None else digest(value) for value in inline]
    lengths = list(map(len, metas)) if any(metas) else 0
    wants = Wants(keys, sizes, picked(values.kinds, which), lengths, inline, sums)
    return wants, datas, metas


def _inline(
    datas: Sequence[memoryview], metas: Sequence[bytes], inline_max: int
) -> list[bytes | None]:
    """Return what travels in the request, None for what does not."""
    values: list[bytes | None] = []
    inline_room = INLINE_WINDOW_BYTES
    lone_max = inline_max * LONE_INLINE_FACTOR if len(datas) == 1 else 0
    for data, meta in zip(datas, metas, strict=True):
        size_bytes = data.nbytes + len(meta)
        small = size_bytes <= inline_max or 0 < data.nbytes <= lone_max
        if small and size_bytes <= inline_room:
            inline_room -= size_bytes
            values.append(data.tobytes() + meta)
        else:
            values.append(None)
    return values


class _Window:
    """What is reserved and saved together, in up to `PARTS` parts."""

    def __init__(
        self,
        writer: Writer,
        namespace_id: int,
        wants: Wants,
        datas: Sequence[memoryview],
        metas: Sequence[bytes],
    ) -> None:
        self._writer = writer
        self._namespace_id = namespace_id
        self._wants = wants
        self._datas = datas
        self._metas = metas
        self._results: list[PutResult | None] = [None] * len(wants.keys)
        self.failure: PeerError | None = None
        self._granted = Grants()
        self._commits: list[tuple[Sequence[int], Later[PutResult]]] = []
        self._parts = self._divided(wants)
        self._ahead: Later[ReserveAnswer] | None = None
        """The answer to what was asked for and is not written yet."""

    def of(self, which: Sequence[int]) -> _Window:
        """Return a new window, of some of the values of this one."""
        wants = self._wants.of(which)
        datas, metas = picked(self._datas, which), picked(self._metas, which)
        return _Window(self._writer, self._namespace_id, wants, datas, metas)

    def run(self) -> list[PutResult | None]:
        """`begin` and `finish`; raises nothing for a peer's fault."""
        try:
            self.begin()
        except _GONE as e:
            self.failure = e
            return self._results
        return self.finish()

    def begin(self) -> None:
        """Ask for the slots of the first part."""
        check_wanted()  # small values travel in the request, and are then stored
        self._ask(self._parts[0])

    def _ask(self, part: range) -> None:
        wants = self._wants.of(part)
        self._ahead = self._writer.reserve_later(wants, self._namespace_id, self._granted)

    def finish(self) -> list[PutResult | None]:
        """Return what became of each; None where the node went away or hangs: what it may still
        take is saved elsewhere too."""
        try:
            for part, following in zip_longest(self._parts, self._parts[1:]):
                assert self._ahead is not None
                ahead, self._ahead = self._ahead, None
                answers = ahead()
                if following is not None:
                    self._ask(following)
                self._write(part, answers)
        except _GONE as e:
            self.failure = e
        finally:
            self.close()
        self._collect()
        return self._results

    def close(self) -> None:
        """Give back what was asked for and not committed."""
        ahead, self._ahead = self._ahead, None
        try:
            if ahead is not None:
                with suppress(PeerError):
                    ahead()
        finally:
            self._granted.close()

    @staticmethod
    def _divided(wants: Wants) -> list[range]:
        count, values, sizes = len(wants.keys), wants.values, wants.each_size()
        if sum(sizes) < 2 * PART_BYTES_MIN:
            return [range(count)]
        if values is not None:
            sizes = [size for size, value in zip(sizes, values, strict=True) if value is None]
        parts = max(1, min(PARTS, count, sum(sizes) // PART_BYTES_MIN))
        step = -(-count // parts)
        return [range(i, min(i + step, count)) for i in range(0, count, step)]

    def _write(self, part: range, answers: Sequence[ReserveAnswer]) -> None:
        """Copy into what was granted and send the commit on its way."""
        places, slots = self._slots(part, answers)
        if not slots:
            return
        datas, metas = picked(self._datas, places), picked(self._metas, places)
        sizes = [len(r.buffer) for r in slots]
        every = range(len(slots))
        for some in in_batches(every, BATCH_KEYS_MAX, sizes.__getitem__, COPY_BYTES):
            _fill(picked(datas, some), picked(metas, some), picked(slots, some))
            check_wanted()
        self._commits.append((places, self._writer.commit_later(slots)))

    def _slots(
        self, part: range, answers: Sequence[ReserveAnswer]
    ) -> tuple[Sequence[int], Sequence[Reservation]]:
        """Return which have a slot to be written to, and what it is; the others' results are
        noted."""
        slots = [answer for answer in answers if isinstance(answer, Reservation)]
        if len(slots) == len(answers):
            return part, slots
        for i, answer in zip(part, answers, strict=True):
            self._results[i] = None if isinstance(answer, Reservation) else answer
        return [i for i in part if self._results[i] is None], slots

    def _collect(self) -> None:
        for places, outcomes in self._commits:
            try:
                for i, outcome in zip(places, outcomes(), strict=True):
                    self._results[i] = outcome
            except _GONE as e:
                self.failure = e


def _fill(
    datas: Sequence[memoryview], metas: Sequence[bytes], slots: Sequence[Reservation]
) -> None:
    """Copy each value over its slot, which is as large as it is with its description."""
    targets, sources = [slot.buffer for slot in slots], list(datas)
    if any(metas):
        for i, (data, meta) in enumerate(zip(datas, metas, strict=True)):
            if meta:
                slot, targets[i] = targets[i], targets[i][: data.nbytes]
                targets.append(slot[data.nbytes :])
                sources.append(memoryview(meta))
    batch_read.READER.copy_each(targets, sources)
