"""Runs the writer and the readers of the `local` suite, each in a process of its own.

Every repetition times the operation, a memcpy of as many bytes in the same
process right before or after it (they take turns in going first), and for puts and
single gets the floor. The memcpy has the reads' own destinations, and sources that
are as cold: both walk through sets of buffers that together exceed the caches.
Checksums are compared after both, outside the timed part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import redis
import xxhash

from benchmarks.memory import Buffers, Memory, memcpy
from benchmarks.processes import Gate
from kvstore import Client, Limits
from kvstore.protocol.control import Op

RING_BYTES = 512 << 20
"""Sources of the yardstick together, where there are enough repetitions: above any cache."""
WARM_BYTES = 32 << 20
PATIENT = Limits(redis_timeout_s=2.0, request_timeout_s=10.0)
"""On a busy machine a late answer shall cost time, not be a miss."""
now = time.perf_counter

Span = tuple[float, float]
"""Begin and end of one repetition, seconds of a clock all processes share."""


class Case(NamedTuple):
    """Describes one shape: `sets` times `batch` values of `size_bytes`."""

    name: str
    size_bytes: int
    batch: int
    sets: int

    def keys(self, number: int) -> list[str]:
        return [f"{self.name}/{number}/{i}" for i in range(self.batch)]

    def ring_sets(self) -> int:
        enough = -(-RING_BYTES // (self.size_bytes * self.batch))
        return max(1, min(self.sets, enough))


class Times(NamedTuple):
    """Holds the times of one worker, a value for each repetition."""

    operation: list[Span]
    memcpy: list[Span]
    floor: list[float]
    """Seconds; empty when none was taken."""


def timed(call: Callable[[], object]) -> Span:
    started = now()
    call()
    return started, now()


def _check(ok: bool, what: str) -> None:
    if not ok:
        raise AssertionError(f"{what}: wrong bytes or a miss; nothing of this run counts")


class _Party:
    """Holds what writer and reader share: a client, and a bare redis-py client for floors."""

    def __init__(self, run_dir: Path, url: str, sources_bytes: int, targets_bytes: int) -> None:
        """The sizes are what the largest case needs."""
        self._from = Memory(sources_bytes)
        self._to = Memory(targets_bytes)
        self.client = Client(url, run_dir=run_dir, limits=PATIENT)
        self.redis = redis.Redis.from_url(url)
        self.redis.set(b"floor", bytes(44))

    def close(self) -> None:
        self.client.close()


class Writer(_Party):
    """Puts values; the put's yardstick has sources and destinations as many as the put."""

    def warm(self, total_bytes: int) -> int:
        """Fill the whole pool once, so that no page is new to the node or to this process.

        Returns how many warm values are now in the store.
        """
        value = bytes(WARM_BYTES)
        count = total_bytes // WARM_BYTES
        for i in range(count):
            _check(bool(self.client.put(f"warm/{i}", value)), "warm-up")
        return count

    def clear(self) -> None:
        self.client.session.clear(self.client.namespace.id)

    def prepare(self, size_bytes: int, batch: int, ring_sets: int) -> None:
        """Make buffers for cases of this shape."""
        self._sources = Buffers(self._from, batch * ring_sets, size_bytes)
        self._targets = Buffers(self._to, batch * ring_sets, size_bytes)

    def put(self, case: Case) -> tuple[Times, dict[str, int]]:
        """Put all sets; return the times in seconds, and the checksum of every value by key."""
        times, sums = Times([], [], []), {}
        ring = case.ring_sets()
        for first in range(0, case.sets, ring):
            for number in range(first, min(first + ring, case.sets)):
                positions = self._positions(case, number - first)
                for key, position in zip(case.keys(number), positions, strict=True):
                    sums[key] = self._sources.stamp(position, hash((key, case.name)) & 0xFFFFFFFF)
            for number in range(first, min(first + ring, case.sets)):
                self._put_set(case, number, number - first, times)
        return times, sums

    @staticmethod
    def _positions(case: Case, ring_set: int) -> range:
        return range(ring_set * case.batch, (ring_set + 1) * case.batch)

    def _put_set(self, case: Case, number: int, ring_set: int, times: Times) -> None:
        ring = case.ring_sets()
        views = [self._sources.views[i] for i in self._positions(case, ring_set)]
        keys = case.keys(number)
        other = self._positions(case, (ring_set + ring // 2) % ring)
        from_ = [self._sources.addresses[i] for i in other]
        to = [self._targets.addresses[i] for i in other]
        stored: list[bool] = []

        def put() -> None:
            if case.batch == 1:
                stored.append(bool(self.client.put(keys[0], views[0])))
            else:
                stored.extend(map(bool, self.client.put_many(zip(keys, views, strict=True))))

        if number % 2:
            times.memcpy.append(timed(lambda: memcpy(to, from_, case.size_bytes)))
        times.operation.append(timed(put))
        if not number % 2:
            times.memcpy.append(timed(lambda: memcpy(to, from_, case.size_bytes)))
        _check(len(stored) == case.batch and all(stored), f"put {keys[0]}")
        times.floor.append(self._floor(case.batch))

    def _floor(self, batch: int) -> float:
        """Time one control message there and back, and one bare SET or MSET of its records."""
        control = self.client.session.writer.link().control
        records = {b"floor/%d" % i: bytes(44) for i in range(batch)}
        started = now()
        control.request(Op.UNPIN, [])
        if batch == 1:
            self.redis.set(b"floor", bytes(44))
        else:
            self.redis.mset(records)
        return now() - started


class Reader(_Party):
    """Gets values into its own buffers, which are the yardstick's destination too."""

    def __init__(
        self,
        run_dir: Path,
        url: str,
        sources_bytes: int,
        targets_bytes: int,
        number: int,
        gate: Gate,
    ) -> None:
        super().__init__(run_dir, url, sources_bytes, targets_bytes)
        self._number = number
        self._gate = gate
        self._step = 0

    def warm(self, count: int) -> None:
        """Read every warm value once: maps all pages of the pool into this process."""
        target = bytearray(WARM_BYTES)
        for i in range(count):
            _check(self.client.get(f"warm/{i}", out=target) is not None, "warm-up")

    def prepare(self, size_bytes: int, batch: int, ring_sets: int) -> None:
        self._sources = Buffers(self._from, batch * ring_sets, size_bytes)
        self._sums = [
            self._sources.stamp(i, (self._number + 1) << 32 | i) for i in range(batch * ring_sets)
        ]
        self._targets = Buffers(self._to, batch, size_bytes)

    def get(self, case: Case, sums: dict[str, int]) -> Times:
        """Get all sets, one repetition each. A second call finds the places remembered."""
        times = Times([], [], [])
        views = self._targets.views
        for number in range(case.sets):
            keys = case.keys(number)
            got: list[object] = []

            def get(keys: list[str] = keys, got: list[object] = got) -> None:
                if len(keys) == 1:
                    got.append(self.client.get(keys[0], out=views[0]))
                else:
                    got.extend(self.client.get_many(keys, out=views))

            if number % 2:
                times.memcpy.append(self._memcpy(case, number))
            times.operation.append(self._together(get))
            found = self._targets.checksums(range(case.batch))
            _check(all(v is not None for v in got), f"get {keys[0]}")
            _check(found == [sums[key] for key in keys], f"get {keys[0]}")
            if not number % 2:
                times.memcpy.append(self._memcpy(case, number))
            if case.batch == 1:
                times.floor.append(self._floor())
        return times

    def _memcpy(self, case: Case, number: int) -> Span:
        first = number % case.ring_sets() * case.batch
        from_ = self._sources.addresses[first : first + case.batch]
        to = self._targets.addresses
        span = self._together(lambda: memcpy(to, from_, case.size_bytes))
        copied = self._targets.checksums(range(case.batch))
        _check(copied == self._sums[first : first + case.batch], "memcpy")
        return span

    def _together(self, call: Callable[[], object]) -> Span:
        self._step += 1
        self._gate.wait(self._number, self._step)
        return timed(call)

    def _floor(self) -> float:
        """Time one bare GET of a record."""
        started = now()
        self.redis.get(b"floor")
        return now() - started

    def pin(self, case: Case, sums: dict[str, int]) -> Times:
        """Pin and let go each value, reading it in place in between (untimed)."""
        times = Times([], [], [])
        for number in range(case.sets):
            (key,) = case.keys(number)
            started = now()
            pinned = self.client.pin(key)
            took = now() - started
            assert pinned, key
            _check(xxhash.xxh3_64_intdigest(pinned.buffer) == sums[key], f"pin {key}")
            started = now() - took
            pinned.close()
            times.operation.append((started, now()))
            times.memcpy.append(self._memcpy(case, number))
        return times
