"""Suite `integrity` measures what checksums and signatures cost: calls with and without them."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.memory import Buffers, Memory, memcpy
from benchmarks.processes import house
from benchmarks.report import Row, machine, median, micros, ratios, spread
from kvstore import Client, Limits
from kvstore.record import RecordSigner, pack_record, unpack_record
from kvstore.types import Location

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SHAPES = ((4 * KIB, 1), (64 * KIB, 1), (1 * MIB, 1), (4 * MIB, 1), (1 * MIB, 32))
"""(bytes of a value, values in one call)"""
NODE_BYTES = GIB
HELD_BYTES = 256 * MIB
"""What a get walks through: above the caches."""
REPETITIONS_MIN, REPETITIONS_MAX = 7, 200
MOVED_BYTES = GIB
RECORDS = 4096
PATIENT = Limits(redis_timeout_s=2.0, request_timeout_s=10.0)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, at least 7")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    moved_bytes = MOVED_BYTES // (8 if options.quick else 1)
    with house(NODE_BYTES) as here:
        about = machine(here.url)
        caller = here.worker(Caller)
        rows = [row for shape in SHAPES for row in caller.do("measure", *shape, moved_bytes)]
    return about, [*rows, *_records()]


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Caller:
    """Calls two clients of one node in turns: one verifies."""

    def __init__(self, run_dir: Path, url: str) -> None:
        self._plain = Client(url, run_dir=run_dir, limits=PATIENT)
        self._careful = Client(url, run_dir=run_dir, limits=PATIENT, verify="always")

    def measure(self, size_bytes: int, batch: int, moved_bytes: int) -> list[Row]:
        call_bytes = size_bytes * batch
        sets = max(2, HELD_BYTES // call_bytes // 2)
        count = max(REPETITIONS_MIN, min(REPETITIONS_MAX, moved_bytes // call_bytes))
        sources = Buffers(
            Memory(HELD_BYTES), min(sets * batch, HELD_BYTES // size_bytes), size_bytes
        )
        targets = Buffers(Memory(call_bytes), batch, size_bytes)
        times: dict[str, list[float]] = {
            name: [] for name in ("put", "put always", "get", "get always", "memcpy", "xxh3")
        }
        clients = [("", self._plain), (" always", self._careful)]
        for number in range(count):
            first = number % sets * batch
            views = sources.views[first : first + batch]
            if len(views) < batch:
                first, views = 0, sources.views[:batch]
            turns = clients if number % 2 else clients[::-1]
            for suffix, client in turns:
                keys = [f"{size_bytes}.{batch}.{number}{suffix}.{i}" for i in range(batch)]
                pairs = list(zip(keys, views, strict=True))
                times[f"put{suffix}"].append(_timed(lambda c=client, p=pairs: c.put_many(p)))  # type: ignore[misc]
            from_ = sources.addresses[first : first + batch]
            times["memcpy"].append(_timed(lambda f=from_: memcpy(targets.addresses, f, size_bytes)))  # type: ignore[misc]
            times["xxh3"].append(_timed(lambda v=views: [xxhash.xxh3_64_intdigest(x) for x in v]))  # type: ignore[misc]
            # Both read what the careful one wrote: the other's has no checksum.
            keys = [f"{size_bytes}.{batch}.{number} always.{i}" for i in range(batch)]
            for suffix, client in turns:
                got: list[Any] = []
                read = lambda c=client, k=keys, g=got: g.extend(c.get_many(k, targets.views))  # noqa: E731
                times[f"get{suffix}"].append(_timed(read))
                if any(value is None for value in got):
                    raise AssertionError("a miss: nothing of this run counts")
        self._plain.session.clear(self._plain.namespace.id)
        return [self._row(op, size_bytes, batch, times) for op in ("put", "get")]

    @staticmethod
    def _row(op: str, size_bytes: int, batch: int, times: dict[str, list[float]]) -> Row:
        plain, careful = times[op], times[f"{op} always"]
        return {
            "op": op,
            "size_bytes": size_bytes,
            "batch": batch,
            "us_p50": micros(median(plain)),
            "always_us_p50": micros(median(careful)),
            "always_ratio": round(median(ratios(careful, plain)), 2),
            "memcpy_us_p50": micros(median(times["memcpy"])),
            "xxh3_us_p50": micros(median(times["xxh3"])),
            "spread": round(spread(careful), 2),
            "repetitions": len(plain),
        }

    def close(self) -> None:
        self._plain.close()
        self._careful.close()


def _records() -> list[Row]:
    """Time, per record, what a node packs and a reader reads, with and without a signature."""
    signer = RecordSigner(b"a secret of thirty-two bytes ...", "kv:bench")
    keys = [i.to_bytes(32, "little") for i in range(RECORDS)]
    plain = [pack_record(key, Location(1, 2, 0, 3, 4, 5, 6, 7)) for key in keys]
    signed = [signer.signed(key, record) for key, record in zip(keys, plain, strict=True)]
    pairs, signed_pairs = list(zip(keys, plain, strict=True)), list(zip(keys, signed, strict=True))
    location = Location(1, 2, 0, 3, 4, 5, 6, 7)
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "record, packed": (
            lambda: [pack_record(k, location) for k in keys],
            lambda: [signer.signed(k, pack_record(k, location)) for k in keys],
        ),
        "record, read": (
            lambda: [unpack_record(k, r) for k, r in pairs],
            lambda: [unpack_record(k, r) for k, r in signed_pairs if signer.right(k, r)],
        ),
    }
    rows: list[Row] = []
    for op, (without, with_) in calls.items():
        times = [(_timed(without), _timed(with_)) for _ in range(25)]
        bare, careful = ([t[i] / RECORDS for t in times] for i in (0, 1))
        rows.append(
            {
                "op": op,
                "size_bytes": len(plain[0]) if op.endswith("packed") else len(signed[0]),
                "us_p50": round(median(bare) * 1e6, 2),
                "always_us_p50": round(median(careful) * 1e6, 2),
                "always_ratio": round(median(ratios(careful, bare)), 2),
                "repetitions": len(times),
            }
        )
    return rows
