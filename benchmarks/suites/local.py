"""Suite `local` measures put, get, get_cached and pin on one host, next to memcpy."""

from __future__ import annotations

import shlex
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from benchmarks import peers, side_by_side
from benchmarks.local_workers import Case, Reader, Span, Times, Writer
from benchmarks.memory import PAGE_BYTES
from benchmarks.processes import Gate, House, Worker, house
from benchmarks.report import Row, machine, median, micros, percentile, ratios, spread

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES_BYTES = (4 * KIB, 64 * KIB, 1 * MIB, 4 * MIB, 32 * MIB)
BATCHES = (1, 32)
READERS = (1, 4)
NODE_BYTES = 4 * GIB
HELD_BYTES = 2 * GIB + GIB // 2
"""Of the pool, at a time: holes of other sizes stay, so it is not filled to the brim."""
CASE_BYTES = GIB + GIB // 2
"""What one case moves at least, unless `REPETITIONS_MAX` is reached first."""
REPETITIONS_MIN, REPETITIONS_MAX = 5, 400
QUICK = 8
"""`--quick` moves this many times less."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, at least 5")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_BYTES, help="in bytes")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--readers", type=int, nargs="+", default=READERS)
    parser.add_argument("--node-bytes", type=int, default=NODE_BYTES)
    parser.add_argument("--peer", choices=sorted(peers.PEERS), action="append", default=[])
    parser.add_argument(
        "--docs", action="store_true", help="put this store beside its peers in docs/benchmarks.md"
    )
    parser.add_argument(
        "--document", type=Path, default=side_by_side.DOCUMENT, help="where --docs puts them"
    )


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    free = shutil.disk_usage("/dev/shm").free
    if options.node_bytes > free * 0.9:
        raise SystemExit(
            f"--node-bytes {options.node_bytes}: /dev/shm has {free} bytes free: ask for less"
        )
    if options.docs and not options.peer:
        options.peer = list(side_by_side.NAMES)
    rows: list[Row] = []
    with house(options.node_bytes) as here:
        about = machine(here.url)
        largest = max(_shape(1, s, b, options)[1] for s, b in _shapes(1, options))
        writer = here.worker(Writer, largest, largest)
        for readers in options.readers:
            rows += _with_readers(here, writer, readers, options)
    for peer in options.peer:
        rows += peers.run(peer, options.sizes, options.batches)
    if options.docs:
        about = side_by_side.versions() | about
        made = side_by_side.table(about, rows, shlex.join(["scripts/bench", *sys.argv[1:]]))
        document: Path = options.document
        document.write_text(side_by_side.into_document(document.read_text(), made))
    return about, rows


def _with_readers(here: House, writer: Worker, readers: int, options: Namespace) -> list[Row]:
    gate = Gate(readers)
    shapes = _shapes(readers, options)
    sources = max(_shape(readers, size, batch, options)[1] for size, batch in shapes)
    targets = max(size * batch for size, batch in shapes)
    crowd = [here.worker(Reader, sources, targets, number, gate) for number in range(readers)]
    writer.do("clear")
    warm_values = writer.do("warm", options.node_bytes)
    for reader in crowd:
        reader.do("warm", warm_values)
    rows: list[Row] = []
    for size_bytes, batch in shapes:
        rows += _case(writer, crowd, size_bytes, batch, options)
    for reader in crowd:
        here.dismiss(reader)
    return rows


def _held_bytes(options: Namespace) -> int:
    node_bytes: int = options.node_bytes
    return HELD_BYTES * node_bytes // NODE_BYTES


def _shapes(readers: int, options: Namespace) -> list[tuple[int, int]]:
    """Return (value size, batch) of what fits into the pool at once, for so many readers."""
    return [
        (size_bytes, batch)
        for batch in options.batches
        for size_bytes in options.sizes
        if size_bytes * batch * readers <= _held_bytes(options)
    ]


def _shape(readers: int, size_bytes: int, batch: int, options: Namespace) -> tuple[int, int, int]:
    """Return (repetitions, bytes of the yardstick's ring, repetitions in one filling of the
    pool)."""
    wanted = CASE_BYTES // (size_bytes * batch) // (QUICK if options.quick else 1)
    repetitions = max(REPETITIONS_MIN, min(REPETITIONS_MAX, wanted))
    sets = max(1, min(repetitions, _held_bytes(options) // (size_bytes * batch * readers)))
    ring_sets = Case("", size_bytes, batch, sets).ring_sets()
    return repetitions, ring_sets * batch * max(size_bytes, PAGE_BYTES), sets


def _case(
    writer: Worker, crowd: list[Worker], size_bytes: int, batch: int, options: Namespace
) -> list[Row]:
    """Measure all operations on one shape, in as many rounds as the pool is too small for."""
    readers = len(crowd)
    repetitions, _, sets = _shape(readers, size_bytes, batch, options)
    ring_sets = Case("", size_bytes, batch, sets).ring_sets()
    for worker in (writer, *crowd):
        worker.do("prepare", size_bytes, batch, ring_sets)
    found: dict[str, list[list[Times]]] = {"put": [], "get": [], "get_cached": [], "pin": []}
    for number in range(-(-repetitions // sets)):
        writer.do("clear")
        put: list[Times] = []
        told = []
        for reader in range(readers):
            case = Case(
                f"{size_bytes}.{batch}.{readers}.{number}.{reader}", size_bytes, batch, sets
            )
            times, sums = writer.do("put", case)
            put.append(times)
            told.append((case, sums))
        found["put"] += [[times] for times in put]
        for op in ("get", "get_cached"):
            for reader_, (case, sums) in zip(crowd, told, strict=True):
                reader_.call("get", case, sums)
            found[op].append([reader_.answer() for reader_ in crowd])
        if batch == 1 and readers == 1:
            found["pin"].append([crowd[0].do("pin", *told[0])])
    if readers > 1:
        del found["put"]  # one writer, measured with one reader
    return [
        _row(op, size_bytes, batch, 1 if op == "put" else readers, rounds)
        for op, rounds in found.items()
        if rounds
    ]


def _walls(of_workers: list[list[Span]]) -> list[float]:
    """Return, per repetition, the time from the first that began to the last that ended."""
    return [
        max(end for _, end in spans) - min(start for start, _ in spans)
        for spans in zip(*of_workers, strict=True)
    ]


def _row(op: str, size_bytes: int, batch: int, readers: int, rounds: list[list[Times]]) -> Row:
    walls = [w for workers in rounds for w in _walls([t.operation for t in workers])]
    memcpys = [w for workers in rounds for w in _walls([t.memcpy for t in workers])]
    calls = [end - start for workers in rounds for t in workers for start, end in t.operation]
    floors = [floor for workers in rounds for t in workers for floor in t.floor]
    moves = op != "pin"  # a pin copies nothing
    return {
        "op": op,
        "size_bytes": size_bytes,
        "batch": batch,
        "readers": readers,
        "gb_per_s": round(size_bytes * batch * readers / median(walls) / 1e9, 3) if moves else None,
        "memcpy_ratio": round(median(ratios(memcpys, walls)), 3) if moves else None,
        "latency_us_p50": micros(median(calls)),
        "latency_us_p99": micros(percentile(calls, 99)),
        "spread": round(spread(walls), 3),
        "floor_us_p50": micros(median(floors)) if floors else None,
        "memcpy_us_p50": micros(median(memcpys)),
        "repetitions": len(walls),
    }
