"""Suite `gpu` moves KV between a CUDA device and shared memory, next to plain DMA.

It needs no node and no Redis: the copies alone are measured. It also
runs as `python -m benchmarks.suites.gpu`, which imports nothing but torch and
cuda-python beside ours.
"""

from __future__ import annotations

import json
import mmap
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Row, median, ratios, show, spread
from kvstore.segment.shm import check_free

MIB = 1 << 20
PART_BYTES = 64 * MIB
POOL_BYTES = 256 * MIB
BATCH_BYTES = 64 * MIB
"""One step's saves, or loads."""
REPETITIONS, REPETITIONS_QUICK = 40, 10
WARM_UP = 3
MATRIX = 8192
COMPUTE_S = 0.5
DRAM_BYTES = 1 << 30
JOIN_TIMEOUT_S = 30.0


class Shape(NamedTuple):
    """Describes one worker's share of a model: store blocks of 256 tokens, engine blocks of 16."""

    name: str
    layers: int
    heads: int
    channel_bytes: int


SHAPES = (
    Shape("llama-8b", 32, 8, 512),
    Shape("llama-70b tp8", 80, 1, 512),
    Shape("mla", 61, 1, 1152),
    Shape("small", 8, 1, 512),
)
TOKENS, BLOCK_TOKENS = 16, 256


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--thread-blocks", type=int, nargs="+", help="sizes of the kernel's grid to compare"
    )


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    try:
        import torch

        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    except ImportError:
        device = None
    if device is None:
        return {"device": "no CUDA device"}, []
    driver = Path("/proc/driver/nvidia/version")
    about = {
        "device": device,
        "driver": _version(driver.read_text()) if driver.exists() else "unknown",
        "torch": torch.__version__,
    }
    repetitions = REPETITIONS_QUICK if options.quick else REPETITIONS
    grids = options.thread_blocks or [None]
    rows: list[Row] = []
    for shape in SHAPES:
        rows += copies(torch, shape, repetitions)
    for grid in grids:
        rows += slowed(torch, grid)
    return about, rows


def _version(text: str) -> str:
    """Return the first word of it that looks like one: kinds of drivers differ in what comes
    before."""
    words = (word for word in text.split() if word[0].isdigit() and "." in word)
    return next(words, "unknown")


@contextmanager
def shared_memory() -> Iterator[memoryview]:
    """Map memory as a node's segment is mapped: a file in /dev/shm, all its pages there."""
    path = Path("/dev/shm/kvstore-bench-gpu")
    check_free(path.parent, POOL_BYTES)  # else a signal ends the process
    with path.open("w+b") as file:
        path.unlink()
        file.truncate(POOL_BYTES)
        mapped = mmap.mmap(file.fileno(), POOL_BYTES)
        for start in range(0, POOL_BYTES, MIB):
            mapped[start : start + MIB] = bytes(MIB)
        yield memoryview(mapped)


class Rig:
    """Holds an engine's KV of some shape, the product's copier, and a pool to copy to."""

    def __init__(self, torch: Any, shape: Shape, pool: memoryview, *, locked: bool) -> None:
        from connector.copiers.base import Gather, Scatter
        from connector.copiers.cuda.copier import DeviceCopier
        from connector.copiers.cuda.kernel_plan import layout_of, staging_buffer_bytes
        from connector.copiers.cuda.page_lock import LockedPool, address_of
        from connector.copiers.cuda.queue import Cuda, CudaStream, QueuedDevice
        from connector.layout.geometry import KVGeometry
        from connector.limits import DEVICE_PAGES_MAX
        from kvstore.spi import PoolMapping

        geometry = KVGeometry(
            layers=shape.layers,
            heads=shape.heads,
            channel_bytes=shape.channel_bytes,
            engine_block_tokens=TOKENS,
        )
        self.block_bytes = geometry.token_bytes * BLOCK_TOKENS
        self.count = max(1, BATCH_BYTES // self.block_bytes)
        engine_blocks = self.count * BLOCK_TOKENS // TOKENS
        # [layer][block][token][head][C], as attention backends keep it.
        kv = torch.randint(
            0,
            255,
            (shape.layers, engine_blocks, TOKENS, shape.heads, shape.channel_bytes),
            dtype=torch.uint8,
            device="cuda",
        )
        layers = [layer.transpose(1, 2) for layer in kv]
        cuda = Cuda(torch.device("cuda", 0))
        mapping = PoolMapping(pool, PART_BYTES, True, 1, 1)
        self.locked_bytes = 0
        self.pool = LockedPool(cuda, lambda: [mapping] if locked else [], self._count)
        self.pool.look()
        with self.pool.holding([mapping.memory] if locked else []):
            pass  # as after copies that used all of it
        while self.pool.lock_next() is not None:
            pass
        layout = layout_of(layers, geometry, BLOCK_TOKENS)
        staging_bytes = staging_buffer_bytes([layout])
        self.device = QueuedDevice(cuda, staging_bytes, DEVICE_PAGES_MAX, self.pool)
        self.blocks = DeviceCopier(layout, self.device, keep=layers)
        self._cuda, self._stream = cuda, CudaStream(cuda)
        order = torch.randperm(engine_blocks).tolist()
        each = BLOCK_TOKENS // TOKENS
        per_part = PART_BYTES // self.block_bytes
        places = [
            (i // per_part) * PART_BYTES + i % per_part * self.block_bytes
            for i in range(self.count)
        ]
        views = [pool[place : place + self.block_bytes] for place in places]
        tables = [order[i * each : (i + 1) * each] for i in range(self.count)]
        self.gathers = [Gather(*pair) for pair in zip(tables, views, strict=True)]
        self.scatters = [Scatter(v, 0, t) for t, v in zip(tables, views, strict=True)]

        start = address_of(pool)
        page_bytes = TOKENS * shape.heads * shape.channel_bytes
        self._pages = [
            (
                start + place + (number * each + i) * page_bytes,
                layer.data_ptr() + table[i] * page_bytes,
                page_bytes,
            )
            for place, table in zip(places, tables, strict=True)
            for number, layer in enumerate(kv)
            for i in range(each)
        ]

    def save_pages(self) -> None:
        """Save page by page, straight from the engine's memory to the pool, in its order of
        tokens."""
        self._stream.begin()
        self._cuda.copy(self._pages, self._stream)
        self._stream.wait()

    def load_pages(self) -> None:
        """Load page by page, the other way."""
        self._stream.begin()
        self._cuda.copy([(b, a, size) for a, b, size in self._pages], self._stream)
        self._stream.wait()

    def _count(self, size_bytes: int, failure: str) -> None:
        self.locked_bytes += 0 if failure else size_bytes

    def save(self) -> None:
        self.blocks.gather_many(self.gathers)

    def load(self) -> None:
        self.blocks.scatter_many(self.scatters)


def plain(torch: Any, count: int, size_bytes: int) -> dict[str, Callable[[], None]]:
    """Time the yardstick: contiguous device memory, torch's pinned memory, one copy per block."""
    pinned = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
    there = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(count)]
    stream = torch.cuda.Stream()

    def copy(targets: Sequence[Any], sources: Sequence[Any]) -> None:
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        stream.synchronize()

    return {"d2h": lambda: copy(pinned, there), "h2d": lambda: copy(there, pinned)}


def copies(torch: Any, shape: Shape, repetitions: int) -> list[Row]:
    """Time each way and each yardstick in turn, again and again."""
    with shared_memory() as pool, shared_memory() as pageable:
        rig = Rig(torch, shape, pool, locked=True)
        slow = Rig(torch, shape, pageable, locked=False)
        bare = plain(torch, rig.count, rig.block_bytes)
        timed: dict[str, Callable[[], None]] = {
            "d2h plain": bare["d2h"],
            "d2h pool": rig.save,
            "d2h pages": rig.save_pages,
            "d2h not locked": slow.save,
            "h2d plain": bare["h2d"],
            "h2d pool": rig.load,
            "h2d pages": rig.load_pages,
            "h2d not locked": slow.load,
        }
        took: dict[str, list[float]] = {name: [] for name in timed}
        for repetition in range(WARM_UP + repetitions):
            for name, call in timed.items():
                started = time.perf_counter()
                call()
                if repetition >= WARM_UP:
                    took[name].append(time.perf_counter() - started)
        moved = rig.count * rig.block_bytes
        rig.device.close()
        slow.device.close()
    rows = []
    for name, values in took.items():
        yardstick = took[f"{name.split()[0]} plain"]
        rows.append(
            {
                "shape": shape.name,
                "blocks": rig.count,
                "MiB": round(rig.block_bytes / MIB, 2),
                "way": name,
                "locked_MiB": rig.locked_bytes // MIB if name.endswith("pool") else "-",
                "GB/s": round(moved / median(values) / 1e9, 2),
                "plain_ratio": round(median(ratios(yardstick, values)), 3),
                "spread": round(spread(values), 3),
            }
        )
    return rows


def slowed(torch: Any, grid: int | None) -> list[Row]:
    """Time computing alone and beside saves, or loads, that follow each other without a pause."""
    import connector.copiers.cuda.kernel_plan as plan
    from connector.limits import DEVICE_BLOCKS_MAX

    if grid is not None:
        plan.DEVICE_BLOCKS_MAX = grid  # type: ignore[attr-defined]
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    large = torch.zeros(DRAM_BYTES // 4, device="cuda")

    def matmul() -> None:
        torch.matmul(a, b, out=out)

    def stream() -> None:
        large.add_(1.0)

    rows = []
    with shared_memory() as pool:
        rig = Rig(torch, SHAPES[0], pool, locked=True)
        moves = [("saves", rig.save)]
        if grid in (None, DEVICE_BLOCKS_MAX):  # a second run of each other grid is not worth it
            moves.append(("loads", rig.load))
        moved = rig.count * rig.block_bytes
        for name, work in (("matmul", matmul), ("memory-bound", stream)):
            work()
            count = max(1, int(COMPUTE_S / compute_s(torch, work, 10) * 10))
            for way, move in moves:
                shares, rates = zip(
                    *(beside(torch, work, count, move) for _ in range(5)), strict=True
                )
                rows.append(
                    {
                        "shape": SHAPES[0].name,
                        "way": f"{name} beside {way}",
                        "thread_blocks": plan.DEVICE_BLOCKS_MAX,  # type: ignore[attr-defined]
                        "GB/s": round(moved * median(rates) / 1e9, 2),
                        "slowed_percent": round(100 * median(shares), 2),
                    }
                )
        rig.device.close()
    return rows


def beside(
    torch: Any, work: Callable[[], None], count: int, move: Callable[[], None]
) -> tuple[float, float]:
    """Return by which share `work` is longer beside `move`, and how many of those end a second."""
    alone = compute_s(torch, work, count)
    rounds: list[None] = []
    stop = threading.Event()

    def run_on() -> None:
        while not stop.is_set():
            move()
            rounds.append(None)

    thread = threading.Thread(target=run_on)
    thread.start()
    with_moves = compute_s(torch, work, count)
    stop.set()
    thread.join(JOIN_TIMEOUT_S)
    if not rounds:
        raise RuntimeError("nothing was copied beside the computing")
    return 1 - alone / with_moves, len(rounds) / with_moves


def compute_s(torch: Any, work: Callable[[], None], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.suites.gpu", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    parser.add_argument("--out", type=Path, help="write that object to this file too")
    arguments(parser)
    options = parser.parse_args()
    about, rows = run(options)
    if options.out is not None:
        options.out.write_text(json.dumps({"suite": "gpu", "machine": about, "rows": rows}))
    show("gpu", about, rows, as_json=options.json)


if __name__ == "__main__":
    main()
