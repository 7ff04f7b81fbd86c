"""Gets values: finds them, reads them and makes them anew of their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client.explanation import MissReason
from kvstore.client.nodes.fetch import FetchedBlock, RemoteBlock
from kvstore.client.nodes.known import Attached
from kvstore.client.payloads import tensors
from kvstore.client.payloads.out import Out
from kvstore.client.reader import Place
from kvstore.client.session import BlockSession
from kvstore.errors import UsageError
from kvstore.segment import batch_read
from kvstore.types import Key, Kind, Value

_PLAIN = (int(Kind.BYTES), int(Kind.BLOCK))
"""What needs no description to be a value again."""
_PLAIN_BITS = sum(1 << kind for kind in _PLAIN)


class ValueGetter:
    """Gets values for `Client`. Thread-safe, as the session is."""

    def __init__(self, session: BlockSession) -> None:
        self._session = session
        self._now = session.machine.monotonic
        self._reader = session.reader
        self._verify = session.verify == "always"
        self.counts = {"hits": 0, "misses": 0, "hit_bytes": 0}
        self.remote_counts = {"hits": 0, "hit_bytes": 0}
        """Those of `counts` that came from other hosts or from disks."""

    def get(self, key: Key, out: Value) -> Value:
        """As `get_many` for one key; a value seen in this host's memory before asks nobody."""
        now = self._now()
        value = None
        if batch_read.READER.suits_one and not self._verify:
            (value,) = self._here([key], [out], now)
        if value is None:
            place = self._reader.remembered.get(key)
            if place is not None:
                self._session.nodes.check(now)
                value = self._value(key, place, None if out is None else Out(out))
        if value is None:
            (value,) = self._look((key,), (out,))
        if value is None:
            self.counts["misses"] += 1
        else:
            self._session.writer.touch((key,), now)
        return value

    def get_many(self, keys: Sequence[Key], outs: Sequence[Value]) -> list[Value]:
        """Return the values, None for each that is missing; `outs` has None where there is no
        `out`.

        Raises `UsageError` for an `out` that does not fit; it is then unchanged.
        """
        now = self._now()
        values = self._values(keys, outs, now)
        missed = sum(value is None for value in values)
        self.counts["misses"] += missed
        if missed < len(values):
            got = [key for key, value in zip(keys, values, strict=True) if value is not None]
            self._session.writer.touch(got, now)
        return values

    def _values(self, keys: Sequence[Key], outs: Sequence[Value], now: float) -> list[Value]:
        """Get what lies plainly in this host's memory in one call, the rest one by one."""
        if self._verify:
            return self._look(keys, outs)
        values = self._here(list(keys), outs, now)
        rest = [i for i, value in enumerate(values) if value is None]
        if not rest:
            return values
        if len(rest) == len(keys):
            return self._look(keys, outs)
        looked = self._look([keys[i] for i in rest], [outs[i] for i in rest])
        for i, value in zip(rest, looked, strict=True):
            values[i] = value
        return values

    def _here(self, keys: list[Key], outs: Sequence[Value], now: float) -> list[Value]:
        """Return what `read_batch` finds in the segments that are mapped, None for the rest."""
        nodes = self._session.nodes
        nodes.check(now)
        values: list[Value] = []
        targets = [memoryview(out) if type(out) is bytearray else out for out in outs]
        typed = _typed(targets)
        for attached in nodes.mapped:
            if not values:
                values = self._read(attached, keys, targets)
            elif rest := [i for i, value in enumerate(values) if value is None]:
                wanted, into = [keys[i] for i in rest], [targets[i] for i in rest]
                found = self._read(attached, wanted, into)
                for i, value in zip(rest, found, strict=True):
                    values[i] = value
        for i, out in typed:
            if values and values[i] is not None:
                values[i] = out.answer(values[i].nbytes)
        return values or [None] * len(keys)

    def _read(self, attached: Attached, keys: list[Key], targets: list[Value]) -> list[Value]:
        values, size_bytes = attached.shm.read_batch(keys, targets, _PLAIN_BITS)
        if attached.gone:  # meanwhile
            return [None] * len(keys)
        self.counts["hits"] += len(values) - values.count(None)
        self.counts["hit_bytes"] += size_bytes
        return values

    def _look(
        self, keys: Sequence[Key], outs: Sequence[Value], *, again: bool = True
    ) -> list[Value]:
        """Find and read; what is no more where it was, once more: not a third time, however often
        other threads remember it meanwhile."""
        refs = self._reader.search(keys, remembered=True)
        into = [
            None if ref is None or out is None else Out(out)
            for ref, out in zip(refs, outs, strict=True)
        ]
        try:
            views = self._reader.read(refs, into)
            values = [
                None if view is None else self._value(key, view, out)
                for key, view, out in zip(keys, views, into, strict=True)
            ]
        except UsageError:  # an `out` is too small, perhaps for what is there no more
            if again and self._reader.forget_remote(keys):
                return self._look(keys, outs, again=False)
            raise
        lost = [i for i, ref in enumerate(refs) if ref is not None and values[i] is None]
        for i in lost:
            if views[i] is None:
                self._lost(keys[i], refs[i])
        stale = [i for i in lost if again and _is_stale(refs[i])]
        if stale:
            anew = self._look([keys[i] for i in stale], [outs[i] for i in stale], again=False)
            for i, value in zip(stale, anew, strict=True):
                values[i] = value
        return values

    def _value(self, key: Key, view: Place | FetchedBlock, out: Out | None) -> Value:
        """Copy, then check (rule 4): the value, or None and where it was is forgotten."""
        value: Value = None
        copied: memoryview | bytes | None = None
        try:
            if out is None and view.kind in _PLAIN:
                value = copied = view.value()
            else:
                value, copied = _made(view, out)
        except UsageError:
            # It may be wrong for what was there before and right for what is there now.
            if view.valid():
                raise
        except ValueError:
            pass  # damaged, or the slot was reused while its description was read
        if value is not None and not view.valid():
            value = None
        elif self._verify and not self._is_right(key, view, copied):
            return None
        if value is None:
            self._lost(key)
            return None
        if isinstance(view, Place):
            size_bytes = view.size_bytes
        else:
            size_bytes = view.location.length
            self.remote_counts["hits"] += 1
            self.remote_counts["hit_bytes"] += size_bytes
            self._reader.seen_remote(key, view.location)
        self.counts["hits"] += 1
        self.counts["hit_bytes"] += size_bytes
        return value

    def _is_right(
        self, key: Key, view: Place | FetchedBlock, copied: memoryview | bytes | None
    ) -> bool:
        """Return whether the bytes are those that were saved. What came from another host was
        compared with its checksum on the way."""
        return isinstance(view, FetchedBlock) or self._reader.verified(key, view, copied)

    def _lost(self, key: Key, ref: Place | RemoteBlock | None = None) -> None:
        self._reader.forget(key)
        refused = self._reader.refused(ref) if isinstance(ref, RemoteBlock) else None
        self._reader.missed(refused or MissReason.LOAD_FAILED)


def _typed(targets: list[Value]) -> list[tuple[int, Out]]:
    """Arrays and tensors among `targets`, which are replaced there by their memory. One that cannot
    be written stays: whoever finds a value for it says so."""
    typed: list[tuple[int, Out]] = []
    for i, target in enumerate(targets):
        if target is None or type(target) is memoryview:
            continue
        try:
            out = Out(target)
        except UsageError:
            continue
        targets[i] = out.target
        typed.append((i, out))
    return typed


def _made(view: Place | FetchedBlock, out: Out | None) -> tuple[Value, memoryview]:
    """Return the value, and its bytes as they were copied: in `out`, or an array or tensor.

    Raises `UsageError` when it does not fit `out`, which is then unchanged, or when the library
    that it needs is missing, `ValueError` when its description is none.
    """
    if out is not None:
        size_bytes = view.size_bytes
        if out.plain:
            out.check_room(size_bytes)
        else:
            out.check(view.kind, bytes(view.meta), size_bytes)
        target = out.room[:size_bytes]
        view.copy_to(target)
        return out.answer(size_bytes), target
    value, target = tensors.make(view.kind, bytes(view.meta), view.size_bytes)
    view.copy_to(target)
    return value, target


def _is_stale(ref: Place | RemoteBlock | None) -> bool:
    """Return whether what could not be read may be elsewhere: it left while it was read, or nobody
    was asked where it is."""
    return ref.remembered if isinstance(ref, RemoteBlock) else ref is not None and not ref.valid()
