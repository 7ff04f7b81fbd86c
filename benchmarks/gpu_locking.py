"""Measures what page-locking costs another process that computes on the same device.

One process launches a small kernel again and again and notes how long each launch takes; another
page-locks shared memory as a worker does, part by part, with the worker's pauses. It needs a CUDA
device.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import percentile
from kvstore.segment.shm import check_free

MIB = 1 << 20
LOCK_BYTES = 8 << 30
PART_BYTES = 64 * MIB
ALONE_S = 2.0
"""Of launches before the other process locks anything."""
LOCKING_S = 45.0
"""The longest that locking may go on."""
PATIENCE_S = 30.0
spawn = multiprocessing.get_context("spawn")


def launches(pipe: Any) -> None:
    """Run the computing process: times of launches, since it was last asked, each time it is."""
    import torch

    there = torch.zeros(1024, device="cuda")
    stream = torch.cuda.current_stream()
    pipe.send("ready")
    took: list[float] = []
    while True:
        if pipe.poll():
            if pipe.recv() == "end":
                return
            pipe.send(took)
            took = []
        began = time.perf_counter()
        there.add_(1.0)
        took.append(time.perf_counter() - began)
        stream.synchronize()


@contextlib.contextmanager
def shared_memory(size_bytes: int) -> Iterator[memoryview]:
    """Map memory as a node's segment is mapped."""
    path = Path("/dev/shm/kvstore-bench-locking")
    check_free(path.parent, size_bytes)  # else a signal ends the process
    with path.open("w+b") as file:
        path.unlink()
        os.posix_fallocate(file.fileno(), 0, size_bytes)  # every page is there
        yield memoryview(mmap.mmap(file.fileno(), size_bytes))


def locked(cuda: Any, memory: memoryview, part_bytes: int, patience_s: float) -> tuple[int, float]:
    """Page-lock `memory` as a worker does, until a part is refused or `patience_s` is over.

    Return the bytes that were locked and the seconds.
    """
    from connector.copiers.cuda.page_lock import LockedPool
    from kvstore.spi import PoolMapping

    total = 0

    def count(size_bytes: int, failure: str) -> None:
        nonlocal total
        total += 0 if failure else size_bytes

    mapping = PoolMapping(memory, part_bytes, True, 1, 1)
    pool = LockedPool(cuda, lambda: [mapping], count)
    began = time.monotonic()
    try:
        pool.look()
        with pool.holding([mapping.memory]):
            pass  # as after copies that used all of it
        while (rest_s := pool.lock_next()) is not None:
            if time.monotonic() - began > patience_s:
                break
            time.sleep(rest_s)
        return total, time.monotonic() - began
    finally:
        pool.close()


def run(size_bytes: int = LOCK_BYTES) -> dict[str, float]:
    """Return one row; times of launches in microseconds."""
    import torch

    from connector.copiers.cuda.queue import Cuda

    ours, theirs = spawn.Pipe()
    other = spawn.Process(target=launches, args=(theirs,), daemon=True)
    other.start()
    theirs.close()  # so that its end is seen here

    def asked(question: str) -> Any:
        ours.send(question)
        if not ours.poll(PATIENCE_S):
            raise TimeoutError("the process that launches does not answer")
        return ours.recv()

    try:
        if not ours.poll(PATIENCE_S):
            raise TimeoutError("the process that launches has not started")
        ours.recv()
        cuda = Cuda(torch.device("cuda", 0))
        with shared_memory(size_bytes) as memory:
            asked("forget")
            time.sleep(ALONE_S)
            alone = asked("alone")
            total, seconds = locked(cuda, memory, PART_BYTES, LOCKING_S)
            beside = asked("beside")
        ours.send("end")
        other.join(PATIENCE_S)
    finally:
        other.kill()
        other.join(PATIENCE_S)
    row: dict[str, float] = {
        "MiB": size_bytes // MIB,
        "locked_MiB": total // MIB,
        "seconds": round(seconds, 2),
    }
    for name, took in (("alone", alone), ("beside", beside)):
        for label, percent in (("p50", 50.0), ("p99", 99.0), ("max", 100.0)):
            row[f"{name}_us_{label}"] = round(percentile(took, percent) * 1e6, 1)
    return row


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.gpu_locking", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the row to this file too")
    options = parser.parse_args()
    row = run()
    if options.out is not None:
        options.out.write_text(json.dumps({"suite": "gpu_locking", "rows": [row]}))
    print(", ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
