"""Suite `disk` measures reads of blocks from a file on disk, next to the same bare preads."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.report import Row, machine_alone, median, spread
from kvstore.core.disk.base import DISK_PAGE
from kvstore.limits import DISK_PIECE_BYTES, DISK_THREADS
from kvstore.nodedir import Announcement
from kvstore.record import disk_location
from kvstore.segment.copying import copy
from kvstore.segment.disk.attached import DiskFile
from kvstore.segment.disk.format import DiskSuperblock, pack_superblock, pages_of
from kvstore.segment.disk.table import AttachedTable, DiskTable
from kvstore.segment.header import SHM_DIR
from kvstore.transport.base import Read, Wanted
from kvstore.transport.disk import DiskTransport
from kvstore.types import DiskBlock, DiskPlace

MIB, GIB = 1 << 20, 1 << 30
SIZES = (256 << 10, 2 * MIB, 32 * MIB)
BATCH_BYTES = 64 * MIB
"""Read by one call, as a worker's window of loads."""
TABLE_BLOCKS = 200_000
START = (1, 1)
"""Id and epoch of a node that there is not."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--dir", type=Path, help="a folder on the disk, else that for temporary files"
    )
    parser.add_argument("--bytes", type=int, default=GIB, help="read in each repetition")
    parser.add_argument("--repetitions", type=int, default=5)


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    rows = _table()
    with tempfile.TemporaryDirectory(prefix="kvb-", dir=options.dir) as folder:
        for size_bytes in SIZES:
            count = options.bytes // size_bytes
            with _Disk(Path(folder), size_bytes, count) as disk:
                rows += disk.measure(options.repetitions)
    return machine_alone(), rows


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _pages() -> memoryview:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, DISK_PIECE_BYTES, flags=private))


class _Disk:
    """A device with blocks of one size, and a transport that reads it."""

    def __init__(self, folder: Path, size_bytes: int, count: int) -> None:
        self.size_bytes = size_bytes
        self._path = folder / "kvstore.disk"
        self._table = DiskTable(SHM_DIR / f"kvb-{os.getpid()}.table", *START, count)
        uuid, payload = os.urandom(16), bytearray(os.urandom(size_bytes))
        self.blocks: list[DiskBlock] = []
        with self._path.open("wb") as file:
            file.write(pack_superblock(DiskSuperblock(uuid, 1, 256 * MIB, 0, 1, 0, 0)) * 2)
            for number in range(count):
                payload[:8] = number.to_bytes(8, "little")
                place = DiskPlace(0, 2 + number * pages_of(size_bytes), 1)
                checksum = xxhash.xxh3_64_intdigest(payload)
                block = DiskBlock(os.urandom(32), place, size_bytes, 0, 0, checksum, 7)
                file.seek(place.page * DISK_PAGE)
                file.write(payload)
                self._table.put(block)
                self.blocks.append(block)
            os.fsync(file.fileno())
        self.find = AttachedTable(self._table.path, *START).find
        self.files = {0: DiskFile(str(self._path), uuid.hex(), os.getuid())}
        self._transport = DiskTransport(lambda _: self, copy)
        rooms = max(BATCH_BYTES // size_bytes, DISK_THREADS)
        self._rooms = [memoryview(bytearray(os.urandom(size_bytes))) for _ in range(rooms)]
        """Into which blocks are read; their pages are there."""
        self._fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)

    def measure(self, repetitions: int) -> list[Row]:
        """Each way in turns, so that what else runs here meets all alike."""
        ways: dict[str, Callable[[], None]] = {
            "pread": lambda: self._plainly(1, digest=False),
            f"pread, {DISK_THREADS} threads": lambda: self._plainly(DISK_THREADS, digest=False),
            f"pread and xxh3, {DISK_THREADS}": lambda: self._plainly(DISK_THREADS, digest=True),
            "read": lambda: self._read(1, max(BATCH_BYTES // self.size_bytes, 1)),
            "read, a block a call": lambda: self._read(1, 1),
            f"read, {DISK_THREADS} callers": lambda: self._read(DISK_THREADS, 1),
        }
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(repetitions):
            for name, way in ways.items():
                cpu_s, began = _cpu_s(), time.perf_counter()
                way()
                took[name].append((time.perf_counter() - began, _cpu_s() - cpu_s))
        total_bytes = self.size_bytes * len(self.blocks)
        best_s = median([s for s, _ in took[f"pread, {DISK_THREADS} threads"]])
        cheap_s = median([cpu_s for _, cpu_s in took[f"pread and xxh3, {DISK_THREADS}"]])
        return [
            {
                "op": name,
                "size_bytes": self.size_bytes,
                "gb_per_s": round(total_bytes / median([s for s, _ in times]) / 1e9, 2),
                "of_pread": round(best_s / median([s for s, _ in times]), 2),
                "cpu_s_per_gib": round(median([c for _, c in times]) / (total_bytes / GIB), 3),
                "cpu_ratio": round(median([c for _, c in times]) / cheap_s, 2),
                "spread": round(spread([s for s, _ in times]), 2),
                "repetitions": len(times),
            }
            for name, times in took.items()
        ]

    def _plainly(self, threads: int, *, digest: bool) -> None:
        """Read the same pieces into as few pages, with or without a pass of xxh3 over each."""
        pieces = (
            (block.place.page * DISK_PAGE + at, min(DISK_PIECE_BYTES, block.length - at))
            for block in self.blocks
            for at in range(0, block.length, DISK_PIECE_BYTES)
        )

        def read(mine: Iterator[tuple[int, int]]) -> None:
            pages, state = _pages(), xxhash.xxh3_64()
            for offset, size_bytes in mine:
                piece = pages[: pages_of(size_bytes) * DISK_PAGE]
                os.preadv(self._fd, [piece], offset)
                if digest:
                    state.update(piece[:size_bytes])

        _at_once(read, pieces, threads)

    def _read(self, callers: int, batch: int) -> None:
        numbers = iter(range(callers))

        def read(mine: Iterator[Sequence[DiskBlock]]) -> None:
            first = next(numbers) * batch
            rooms = self._rooms[first : first + batch]
            for blocks in mine:
                wanted = [
                    Wanted(block.key, disk_location(*START, block), (room,))
                    for block, room in zip(blocks, rooms, strict=False)
                ]
                outcomes = self._transport.read(_WORD, wanted, time.monotonic() + 600)
                if any(one.read is not Read.HIT for one in outcomes):
                    raise AssertionError("a miss: nothing of this run counts")

        starts = range(0, len(self.blocks), batch)
        _at_once(read, (self.blocks[i : i + batch] for i in starts), callers)

    def __enter__(self) -> _Disk:
        return self

    def __exit__(self, *exc: object) -> None:
        self._transport.close()
        os.close(self._fd)
        self._table.close()
        self._path.unlink()


def _at_once(work: Callable[[Iterator[Any]], None], what: Iterator[Any], threads: int) -> None:
    """Call `work` in so many threads, which share what there is to do."""
    lock, failed = threading.Lock(), list[BaseException]()

    def shared() -> Iterator[Any]:
        while True:
            with lock:
                one = next(what, None)
            if one is None:
                return
            yield one

    def run() -> None:
        try:
            work(shared())
        except BaseException as e:
            failed.append(e)

    made = [threading.Thread(target=run) for _ in range(threads)]
    for thread in made:
        thread.start()
    for thread in made:
        thread.join()
    if failed:
        raise failed[0]


_WORD = Announcement(
    node_id=START[0],
    epoch=START[1],
    name="bench",
    host="here",
    pid=0,
    key_prefix="kv:bench",
    data_path="",
    head_path="",
    control_path="",
    size_bytes=0,
    inline_bytes=0,
    disks={"0": ""},
)


def _table() -> list[Row]:
    """Time, per block, what a node enters and a reader of its host finds."""
    table = DiskTable(SHM_DIR / f"kvb-{os.getpid()}.table", *START, TABLE_BLOCKS)
    blocks = [
        DiskBlock(os.urandom(32), DiskPlace(0, i, i >> 8), MIB, 0, 0, i + 1, 7)
        for i in range(TABLE_BLOCKS)
    ]
    keys, absent = [block.key for block in blocks], [os.urandom(32) for _ in blocks]
    reader = AttachedTable(table.path, *START)
    calls: dict[str, Callable[[], object]] = {
        "table, put": lambda: [table.put(block) for block in blocks],
        "table, find": lambda: [reader.find(key) for key in keys],
        "table, find what is not there": lambda: [reader.find(key) for key in absent],
    }
    rows: list[Row] = []
    for op, call in calls.items():
        began = time.process_time()
        call()
        took_s = time.process_time() - began
        rows.append({"op": op, "cpu_us": round(took_s / TABLE_BLOCKS * 1e6, 2)})
    rows[0]["loaded"] = f"{table.blocks} of {TABLE_BLOCKS}"
    table.close()
    return rows
