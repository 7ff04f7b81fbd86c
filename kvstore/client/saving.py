"""Many values into the store: while one part is copied, the node works on the parts beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import xxhash

from kvstore.client.answers import NO_SPACE
from kvstore.client.base import Reservation
from kvstore.client.tensors import Payload
from kvstore.client.wants import Want
from kvstore.client.writer import Later, Writer
from kvstore.errors import DeadlineError, NodeUnavailableError, PeerError
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.segment.copying import copy
from kvstore.types import IN_PROGRESS, Key, PutResult, rejected

WINDOW_BYTES = 128 << 20
"""Bytes reserved at a time by one put_many: a large batch must not hold all slots at once."""
INLINE_WINDOW_BYTES = 1 << 20
"""Bytes that travel inside the reserve requests of a window at most."""
PARTS = 2
"""Of a window: half of the node's work is then done while a client copies. More parts are
more messages, and on a busy machine each may cost the sender its core for a while."""
PART_BYTES_MIN = 4 << 20
"""Copying it takes about as long as the node needs for a request."""

NO_SPACE_TRIES = 6
NO_SPACE_WAIT_S = 0.002
"""Before the second try; doubles with each further one."""

_GONE = (NodeUnavailableError, DeadlineError)


def save(
    writer: Writer,
    namespace_id: int,
    keys: Sequence[Key],
    payloads: Sequence[Payload],
    *,
    checksums: bool,
) -> list[PutResult]:
    """Put `payloads` under `keys`; a node that cannot be reached rejects."""
    results: list[PutResult] = []
    for start, end in _windows(payloads):
        window = payloads[start:end]
        try:
            wants = _wants(keys[start:end], window, writer.inline_bytes, checksums)
        except _GONE as e:
            results += [rejected(str(e))] * len(window)
            continue
        results += _with_patience(writer, namespace_id, wants, window)
    if len(keys) > 1 and sum(payload.size_bytes for payload in payloads) >= PART_BYTES_MIN:
        # What went in several requests was sealed head first: the end of a run would outlive it.
        writer.touch(keys, time.monotonic(), at_once=True)
    return results


def _with_patience(
    writer: Writer, namespace_id: int, wants: Sequence[Want], payloads: Sequence[Payload]
) -> list[PutResult]:
    """Try again what found every slot reserved: reservations are short, and some were ours."""
    results = _Window(writer, namespace_id, wants, payloads).run()
    for attempt in range(NO_SPACE_TRIES):
        again = [i for i, result in enumerate(results) if result is NO_SPACE]
        if not again:
            break
        if len(again) == len(results):
            time.sleep(NO_SPACE_WAIT_S * 2**attempt)
        wanted = [wants[i] for i in again]
        retried = _Window(writer, namespace_id, wanted, [payloads[i] for i in again]).run()
        for i, result in zip(again, retried, strict=True):
            results[i] = result
    return results


def _windows(payloads: Sequence[Payload]) -> Iterator[tuple[int, int]]:
    """Runs of at most `WINDOW_BYTES` (or one payload, if it is larger) that fit a request."""
    start = size_bytes = 0
    for i, payload in enumerate(payloads):
        if i > start and (
            size_bytes + payload.size_bytes > WINDOW_BYTES or i - start == BATCH_KEYS_MAX
        ):
            yield start, i
            start, size_bytes = i, 0
        size_bytes += payload.size_bytes
    if payloads:
        yield start, len(payloads)


def _wants(
    keys: Sequence[Key], payloads: Sequence[Payload], inline_max: int, checksums: bool
) -> list[Want]:
    wants: list[Want] = []
    inline_room = INLINE_WINDOW_BYTES
    for key, payload in zip(keys, payloads, strict=True):
        value, checksum = None, 0
        data, meta, kind = payload
        size_bytes = data.nbytes + len(meta)
        if size_bytes <= inline_max and size_bytes <= inline_room:
            inline_room -= size_bytes
            value = data.tobytes() + meta
            checksum = xxhash.xxh3_64_intdigest(value) if checksums else 0
        wants.append(Want(key, size_bytes, kind, len(meta), value, checksum))
    return wants


class _Window:
    """What is reserved and saved together, in up to `PARTS` parts."""

    def __init__(
        self,
        writer: Writer,
        namespace_id: int,
        wants: Sequence[Want],
        payloads: Sequence[Payload],
    ) -> None:
        self._writer = writer
        self._namespace_id = namespace_id
        self._wants = wants
        self._payloads = payloads
        self._results: list[PutResult] = [IN_PROGRESS] * len(wants)
        self._commits: list[tuple[list[int], Later]] = []

    def run(self) -> list[PutResult]:
        parts = self._parts()
        answers: Sequence[Reservation | PutResult]
        ahead: Later | None = None
        done = 0
        try:
            for i, part in enumerate(parts):
                if ahead is None:
                    answers = self._writer.reserve(self._wants[part], self._namespace_id)
                else:
                    answers = ahead()
                    ahead = None
                if i + 1 < len(parts):
                    wants = self._wants[parts[i + 1]]
                    ahead = self._writer.reserve_later(wants, self._namespace_id)
                self._write(part.start, answers)
                done = part.stop
        except _GONE as e:
            for i in range(done, len(self._wants)):
                self._results[i] = rejected(str(e))
        finally:
            if ahead is not None:
                with suppress(PeerError):
                    self._writer.abort([a for a in ahead() if isinstance(a, Reservation)])
        self._collect()
        return self._results

    def _parts(self) -> list[slice]:
        count = len(self._wants)
        total_bytes = sum(want.size_bytes for want in self._wants if want.value is None)
        parts = max(1, min(PARTS, count, total_bytes // PART_BYTES_MIN))
        step = -(-count // parts)
        return [slice(i, min(i + step, count)) for i in range(0, count, step)]

    def _write(self, first: int, answers: Sequence[Reservation | PutResult]) -> None:
        """Copy into what was granted and send the commit on its way."""
        places: list[int] = []
        granted: list[Reservation] = []
        for i, answer in enumerate(answers, first):
            if isinstance(answer, Reservation):
                places.append(i)
                granted.append(answer)
            else:
                self._results[i] = answer
        if not granted:
            return
        try:
            for i, reservation in zip(places, granted, strict=True):
                data, meta, _ = self._payloads[i]
                if meta:
                    copy(reservation.buffer[: data.nbytes], data)
                    reservation.buffer[data.nbytes :] = meta
                else:
                    copy(reservation.buffer, data)
        except BaseException:
            self._writer.abort(granted)
            raise
        self._commits.append((places, self._writer.commit_later(granted)))

    def _collect(self) -> None:
        for places, outcomes in self._commits:
            try:
                for i, outcome in zip(places, outcomes(), strict=True):
                    self._results[i] = outcome
            except _GONE as e:
                for i in places:
                    self._results[i] = rejected(str(e))
