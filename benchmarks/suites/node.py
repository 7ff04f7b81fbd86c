"""Suite `node` measures how long clients of one node wait when there are many, what a full node of
mixed sizes takes for a request of many values, and what a million blocks cost in memory."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import redis

from benchmarks.local_workers import PATIENT
from benchmarks.processes import NodeProcess, Worker, lone_node
from benchmarks.report import Row, machine, percentile
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.spi import BlockSession, Reservation, in_batches
from kvstore.types import KEY_BYTES, Key

SIZE_BYTES = 1 << 30
CLIENTS = 64
SECONDS = 8.0
PAUSE_S = 0.1
"""Of each client between two batches, so that the node is not the queue's end of all of them."""
BATCH, BLOCK_BYTES = 8, 64 << 10
BLOCKS = 250_000
SMALL_BYTES = 1000
NAMESPACE = 7
FULL_BYTES = 512 << 20
MIXED = ((4 << 10, 1, 15), (1 << 20, 1, 6), (64 << 10, 32, 6))
"""Size of the blocks of a request, how many these are, and how often it comes in a round."""
ROUNDS = 90
"""Of mixed sizes; the second half of them counts."""
MILLION = 1_000_000
MIB = 1 << 20


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=CLIENTS, help="processes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of saves, a row")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="for the memory (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer clients, seconds and blocks")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    if options.quick:
        options.clients, options.seconds, options.blocks = 8, 2.0, 20_000
    with lone_node(SIZE_BYTES) as node:
        about = machine(node.url)
        rows = [
            _waits(node, count, options.seconds) for count in dict.fromkeys((1, options.clients))
        ]
    for mix in (MIXED[1:2], MIXED[2:], MIXED):  # to fill a node by 4 KiB takes minutes
        with lone_node(FULL_BYTES) as node:
            rows += _full(node, mix)
    with lone_node(SIZE_BYTES) as node:
        return about, rows + _memory(node, options.blocks)


class Saver:
    """Saves and reads as an engine's worker does."""

    def __init__(self, node_url: str, run_dir: Path) -> None:
        self._session = BlockSession(node_url, run_dir=run_dir, limits=PATIENT)

    def save_for(self, seconds: float) -> tuple[list[float], list[float], int]:
        """Return how long each reservation took, and each commit, and the blocks not stored."""
        took: tuple[list[float], list[float]] = ([], [])
        lost = 0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            keys = [os.urandom(KEY_BYTES) for _ in range(BATCH)]
            started = time.perf_counter()
            slots = self._session.reserve(keys, BLOCK_BYTES, NAMESPACE)
            took[0].append(time.perf_counter() - started)
            granted = [slot for slot in slots if isinstance(slot, Reservation)]
            started = time.perf_counter()
            stored = self._session.commit(granted)
            took[1].append(time.perf_counter() - started)
            lost += BATCH - sum(map(bool, stored))
            time.sleep(PAUSE_S)
        return *took, lost

    def save_one(self, size_bytes: int, count: int) -> float:
        """Return how long the reservation of one request took; it is committed then."""
        keys = [os.urandom(KEY_BYTES) for _ in range(count)]
        started = time.perf_counter()
        slots = self._session.reserve(keys, size_bytes, NAMESPACE)
        took_s = time.perf_counter() - started
        if not all(self._session.commit([s for s in slots if isinstance(s, Reservation)])):
            raise AssertionError(f"{count} blocks of {size_bytes} bytes were not stored")
        return took_s

    def save(self, count: int) -> int:
        """Save so many small blocks; how many were stored."""
        stored = 0
        for keys in in_batches(_keys(count), BATCH_KEYS_MAX):
            slots = self._session.reserve(keys, SMALL_BYTES, NAMESPACE)
            stored += sum(
                map(bool, self._session.commit([s for s in slots if isinstance(s, Reservation)]))
            )
        return stored

    def read(self, count: int) -> int:
        """Look up and read so many of them; how many there were."""
        there = 0
        for keys in in_batches(_keys(count), BATCH_KEYS_MAX):
            found = [one for one in self._session.lookup(keys) if one is not None]
            there += sum(view is not None for view in self._session.views(found, None))
        return there

    def memory_bytes(self) -> int:
        return _own_bytes(os.getpid())

    def close(self) -> None:
        self._session.close()


def _keys(count: int) -> list[Key]:
    return [blake2b(number.to_bytes(8), digest_size=KEY_BYTES).digest() for number in range(count)]


def _own_bytes(pid: int) -> int:
    """Memory that is a process's own; segments, which are shared, are no part of it."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not say how much memory is anonymous")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _waits(node: NodeProcess, count: int, seconds: float) -> Row:
    savers = [Worker(Saver, node.url, node.run_dir) for _ in range(count)]
    for saver in savers:  # connected, and its pages mapped
        saver.do("save_for", PAUSE_S / 2)
    used_s, began = _cpu_s(node.process.pid), time.monotonic()
    for saver in savers:
        saver.call("save_for", seconds)
    answers = [saver.answer() for saver in savers]
    share = (_cpu_s(node.process.pid) - used_s) / (time.monotonic() - began)
    for saver in savers:
        saver.stop()
    row: Row = {"clients": count}
    for name, part in (("reserve", 0), ("commit", 1)):
        took = [one for answer in answers for one in answer[part]]
        row["batches"] = len(took)
        for percent in (50, 99):
            row[f"{name}_ms_p{percent}"] = round(percentile(took, percent) * 1e3, 2)
    return row | {"not_stored": sum(a[2] for a in answers), "node_core_share": round(share, 2)}


def _full(node: NodeProcess, mix: Sequence[tuple[int, int, int]]) -> list[Row]:
    """Reservations that evict, of these kinds of requests in turns."""
    saver = Saver(node.url, node.run_dir)
    took: dict[tuple[int, int], list[float]] = {(size, count): [] for size, count, _ in mix}
    rounds = ROUNDS if len(mix) > 1 else 0
    filled = 0
    number = 0
    while filled < 2 * FULL_BYTES or number < rounds:
        full = filled > FULL_BYTES and number >= rounds // 2
        for size, count, times in mix:
            for _ in range(times if rounds else 1):
                one_s = saver.save_one(size, count)
                filled += size * count
                if full:
                    took[size, count].append(one_s)
        number += 1
    saver.close()
    return [
        {
            "reserved": f"{count} x {size >> 10} KiB",
            "among": "mixed sizes" if len(mix) > 1 else "the like",
            "requests": len(times),
            **{f"ms_p{part}": round(percentile(times, part) * 1e3, 2) for part in (50, 99)},
            "ms_max": round(max(times) * 1e3, 1),
        }
        for (size, count), times in took.items()
    ]


def _memory(node: NodeProcess, blocks: int) -> list[Row]:
    server = redis.Redis.from_url(node.url)

    def index_bytes() -> int:
        return int(server.info("memory")["used_memory"])

    writer, reader = (Worker(Saver, node.url, node.run_dir) for _ in range(2))
    few = BATCH_KEYS_MAX
    writer.do("save", few)
    reader.do("read", few)
    ask = {
        "node": lambda: _own_bytes(node.process.pid),
        "client that saves": lambda: int(writer.do("memory_bytes")),
        "client that reads": lambda: int(reader.do("memory_bytes")),
        "Redis": index_bytes,
    }
    before = {name: value() for name, value in ask.items()}
    stored, there = writer.do("save", blocks), reader.do("read", blocks)
    after = {name: value() for name, value in ask.items()}
    for worker in (writer, reader):
        worker.stop()
    if there != blocks:
        raise AssertionError(f"{stored} of {blocks} blocks were stored, {there} were there")
    return [
        {
            "memory_of": name,
            "before_mib": round(before[name] / MIB, 1),
            "grown_mib": round((after[name] - before[name]) / MIB, 1),
            "blocks": blocks - few,
            "mib_per_million": round(
                (after[name] - before[name]) / MIB * MILLION / (blocks - few), 1
            ),
        }
        for name in ask
    ]
