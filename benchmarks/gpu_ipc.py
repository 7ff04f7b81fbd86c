"""Measures pulling blocks out of another process's VRAM, next to plain copies on the same device.

It needs a CUDA device. `benchmarks/suites/gpu.py` calls `run`; `python -m benchmarks.gpu_ipc` runs
it alone.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.vram import VramNodes
from kvstore.core.events import Commit, Reserve
from kvstore.cuda.base import CudaDevice, DeviceRange, Stream
from kvstore.cuda.bindings import open_device
from kvstore.index.memory import MemoryIndex
from kvstore.node import NodeConfig
from kvstore.node.vram import VramNode
from kvstore.nodedir import NodeDir
from kvstore.record import unpack_record
from kvstore.transport.base import Read
from kvstore.transport.cuda_ipc import WantedAnywhere
from kvstore.types import Key, Location

MIB = 1 << 20
SHAPES = ((64, 16 * MIB), (256, 4 * MIB), (256, MIB))
"""(blocks in a read, bytes of a block)."""
REPETITIONS = 30
WARM_UP = 3
PATIENCE_S = 60.0
spawn = multiprocessing.get_context("spawn")


class Pull(NamedTuple):
    """Holds the rates of one shape, medians in bytes of payload a second."""

    blocks: int
    block_bytes: int
    pull: float
    """A read of all blocks by the transport, headers compared, until its outcomes are known."""
    copies: float
    """The same number of plain device-to-device copies of the same size, one event."""
    whole: float
    """All of it as one plain device-to-device copy."""

    @property
    def ratio(self) -> float:
        """Return the rate of the pull over that of plain copies of the same shape."""
        return self.pull / self.copies

    @property
    def whole_ratio(self) -> float:
        """Return the rate of the pull over that of one copy of all, which no call slows down."""
        return self.pull / self.whole


def serve(run_dir: str, ordinal: int, blocks: int, block_bytes: int, pipe: Any) -> None:
    """Run the other process: a node in VRAM with `blocks` blocks in it, until told to end."""
    device = open_device(ordinal)
    size_bytes = -(-blocks * block_bytes * 5 // 4 // (64 * MIB)) * 64 * MIB
    index = MemoryIndex()
    config = NodeConfig(run_dir=Path(run_dir), name="vram", size_bytes=size_bytes)
    node = VramNode(config, index, device).start()
    session = node.session()
    keys = [os.urandom(32) for _ in range(blocks)]
    zeros = [0] * blocks

    def ask(what: Any) -> Any:
        return session.ask(what, time.monotonic() + PATIENCE_S)

    granted = ask(
        Reserve(0, 0, keys, [block_bytes] * blocks, 1, zeros, zeros, [None] * blocks, zeros)
    )
    ask(Commit(0, 0, [(slot, generation, 0) for slot, generation, _ in granted]))
    records = index.lookup(keys)
    pipe.send([(k, unpack_record(k, r)) for k, r in zip(keys, records, strict=True) if r])
    pipe.recv()
    node.stop()
    node.free()


def run(ordinal: int = 0) -> list[Pull]:
    """Measure every shape of `SHAPES`."""
    return [_measure(ordinal, *shape) for shape in SHAPES]


def _measure(ordinal: int, blocks: int, block_bytes: int) -> Pull:
    run_dir = Path(tempfile.mkdtemp(prefix="kvb-"))
    ours, theirs = spawn.Pipe()
    other = spawn.Process(
        target=serve, args=(str(run_dir), ordinal, blocks, block_bytes, theirs), daemon=True
    )
    other.start()
    theirs.close()  # so that its end is seen here
    try:
        if not ours.poll(PATIENCE_S):
            raise TimeoutError("the other process has not saved its blocks")
        return _read(open_device(ordinal), run_dir, ours.recv(), block_bytes)
    finally:
        with contextlib.suppress(OSError):
            ours.send("end")
        other.join(PATIENCE_S)
        other.kill()
        other.join(PATIENCE_S)
        shutil.rmtree(run_dir, ignore_errors=True)


def _read(
    device: CudaDevice, run_dir: Path, there: list[tuple[Key, Location]], block_bytes: int
) -> Pull:
    size_bytes = len(there) * block_bytes
    to, source = device.allocate(size_bytes), device.allocate(size_bytes)
    starts = list(range(0, size_bytes, block_bytes))
    # Blocks that lie side by side on both sides are one copy, which a pool in use seldom has.
    random.Random(1).shuffle(starts)
    wanted = [
        WantedAnywhere(key, at, [DeviceRange(to + start, block_bytes, device.ordinal)])
        for start, (key, at) in zip(starts, there, strict=True)
    ]
    nodes = VramNodes(NodeDirectory(run_dir, MemoryIndex(), "kv:default"), device)
    word = NodeDir(run_dir, "vram").announcement()
    assert word is not None
    stream = device.stream()
    seconds: dict[str, list[float]] = {"pull": [], "copies": [], "whole": []}
    for turn in range(WARM_UP + REPETITIONS):
        took: dict[str, float] = {}
        began = time.perf_counter()
        outcomes = nodes.read(word, wanted, time.monotonic() + PATIENCE_S)
        took["pull"] = time.perf_counter() - began
        if any(outcome.read is not Read.HIT for outcome in outcomes):
            raise RuntimeError(f"not all were hits: {outcomes}")
        copies = [(to + start, source + start, block_bytes) for start in starts]
        took["copies"] = _plain(stream, copies)
        took["whole"] = _plain(stream, [(to, source, size_bytes)])
        for name, value in took.items() if turn >= WARM_UP else ():
            seconds[name].append(value)
    stream.close()
    nodes.close()
    device.free(to)
    device.free(source)
    rates = {name: size_bytes / statistics.median(values) for name, values in seconds.items()}
    return Pull(len(there), block_bytes, rates["pull"], rates["copies"], rates["whole"])


def _plain(stream: Stream, copies: list[tuple[int, int, int]]) -> float:
    """Return the seconds of plain copies. It asks without a pause: the yardstick must not be longer
    by a sleep of ours."""
    began = time.perf_counter()
    stream.copy(copies)
    done = stream.record()
    while not done.done():
        if time.perf_counter() - began > PATIENCE_S:
            raise TimeoutError("a plain copy hangs")
    return time.perf_counter() - began


def main() -> None:
    """Print one line a shape; `benchmarks.gpu_judge` judges the ratios."""
    parser = ArgumentParser(prog="python -m benchmarks.gpu_ipc", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the ratios to this file too")
    options = parser.parse_args()
    pulls = run()
    if options.out is not None:
        rows = [
            {
                "blocks": pull.blocks,
                "MiB": pull.block_bytes / MIB,
                "ratio": round(pull.ratio, 3),
                "whole_ratio": round(pull.whole_ratio, 3),
                "GB/s": round(pull.pull / 1e9, 1),
            }
            for pull in pulls
        ]
        options.out.write_text(json.dumps({"suite": "gpu_ipc", "rows": rows}))
    for pull in pulls:
        print(
            f"{pull.blocks} x {pull.block_bytes / MIB:g} MiB: pull {pull.pull / 1e9:.0f} GB/s, "
            f"plain copies {pull.copies / 1e9:.0f}, one copy {pull.whole / 1e9:.0f}, "
            f"pull to copies {pull.ratio:.2f}, to one copy {pull.whole_ratio:.2f}"
        )


if __name__ == "__main__":
    main()
