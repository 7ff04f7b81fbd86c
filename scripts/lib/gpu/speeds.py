"""Measures what figures of the product are judged by, and what copies cost those who make them."""

from __future__ import annotations

import ctypes
import threading
import time
from statistics import median

from gpu.driver import LARGE_BYTES, MIB, Gpu, Shared, address_of, timed
from gpu.rows import Say

LAUNCHES = 4000


def bus(say: Say) -> None:
    """Plain copies over the bus and within the device: the ceilings, of this run alone."""
    gpu = Gpu()
    stream, other = gpu.stream(), gpu.stream()
    there, back = gpu.memory(LARGE_BYTES), gpu.memory(LARGE_BYTES)
    pinned = int(gpu.call(gpu.driver.cuMemHostAlloc, LARGE_BYTES, 0))
    ctypes.memset(pinned, 7, LARGE_BYTES)
    memory = Shared(LARGE_BYTES)
    shared = memory.address

    def rate(*copies: tuple[int, int, int]) -> float:
        def work() -> None:
            for to, source, on in copies:
                gpu.copy([(to, source, LARGE_BYTES)], on)
            for _, _, on in copies:
                gpu.wait(on)

        return round(len(copies) * LARGE_BYTES / timed(work) / 1e9, 1)

    say("h2d, memory not locked", rate((there, shared, stream)), "GB/s")
    say("d2h, memory not locked", rate((shared, there, stream)), "GB/s")
    gpu.lock(shared, LARGE_BYTES)
    for way, ours, plain in (
        ("h2d", (there, shared, stream), (there, pinned, stream)),
        ("d2h", (shared, there, stream), (pinned, there, stream)),
    ):
        say(f"{way}, the driver's own memory", ceiling := rate(plain), "GB/s")
        say(f"{way}, locked shared memory", rate(ours), "GB/s", least=round(0.95 * ceiling, 1))
    both = (there, shared, stream), (pinned, back, other)
    say("both ways at once", rate(*both), "GB/s")
    say("within the device", rate((back, there, stream)), "GB/s")
    own = gpu.device.stream()
    own.copy([(back, there, 4096)])
    event = own.record()
    time.sleep(0.01)
    say("asking whether a copy is done", round(1e6 * timed(event.done, 500, 50), 2), "us")


def kernel(say: Say) -> None:
    """The kernel alone, between payloads in VRAM and paged KV, by the size of its grid."""
    import torch

    import connector.copiers.cuda.kernel_plan as plan
    from benchmarks.suites import gpu as suite
    from connector.copiers.base import Gather, Scatter
    from kvstore.spi import DeviceRange

    for shape in suite.SHAPES[:3]:
        with suite.shared_memory() as pool:
            rig = suite.Rig(torch, shape, pool, locked=True)
            size = rig.count * rig.block_bytes
            room = torch.empty(size, dtype=torch.uint8, device="cuda")
            places = [
                DeviceRange(room.data_ptr() + i * rig.block_bytes, rig.block_bytes, 0)
                for i in range(rig.count)
            ]
            gathers = [Gather(g.block_ids, at) for g, at in zip(rig.gathers, places, strict=True)]
            scatters = [
                Scatter(at, 0, s.block_ids) for s, at in zip(rig.scatters, places, strict=True)
            ]
            for grid in (8, 32, 64, 132):
                plan.DEVICE_BLOCKS_MAX = grid  # type: ignore[attr-defined]
                saved = timed(lambda: rig.blocks.gather_many(gathers), 7)  # noqa: B023
                loaded = timed(lambda: rig.blocks.scatter_many(scatters), 7)  # noqa: B023
                rates = [round(size / took / 1e9) for took in (saved, loaded)]
                # Both directions of the bus together are about 110 GB/s.
                least = 110 if grid == 32 else None
                name = f"{shape.name}, {grid} thread blocks, the slower way"
                say(name, min(rates), "GB/s", least=least, saved=rates[0], loaded=rates[1])
            rig.device.close()


def callers(say: Say) -> None:
    """What a copy costs the thread that makes it, and launches of another thread beside it."""
    import torch

    from benchmarks.suites import gpu as suite

    with suite.shared_memory() as pool:
        rig = suite.Rig(torch, suite.SHAPES[1], pool, locked=True)
        for name, move in (("save", rig.save), ("load", rig.load)):
            move()
            began, cpu = time.perf_counter(), time.thread_time()
            for _ in range(20):
                move()
            cpu_ms, wall_ms = (
                round(1e3 * took / 20, 2)
                for took in (time.thread_time() - cpu, time.perf_counter() - began)
            )
            say(f"processor of a {name} of 64 MiB", cpu_ms, "ms", wall=wall_ms)
        small = torch.zeros(1024, device="cuda")

        def launches() -> float:
            began = time.perf_counter()
            for _ in range(LAUNCHES):
                small.add_(1.0)
            torch.cuda.synchronize()
            return time.perf_counter() - began

        launches()
        alone, stop = median(launches() for _ in range(5)), threading.Event()

        def copies() -> None:
            while not stop.is_set():
                rig.save()
                rig.load()

        thread = threading.Thread(target=copies)
        thread.start()
        beside = median(launches() for _ in range(5))
        stop.set()
        thread.join(30)
        say(
            f"{LAUNCHES} launches beside copies without a pause, longer by",
            round(100 * (beside / alone - 1), 1),
            "percent",
            alone_ms=round(1e3 * alone, 1),
        )
        rig.device.close()


def unlocked(say: Say) -> None:
    """A small copy from memory that is locked, and from memory that is not."""
    gpu = Gpu()
    stream, there = gpu.stream(), gpu.memory(4096)
    memory, loose = Shared(MIB), bytearray(8192)
    gpu.lock(memory.address, MIB)
    for name, source in (("locked", memory.address), ("not locked", address_of(loose))):

        def small(source: int = source) -> None:
            gpu.copy([(there, source, 4096)], stream)
            gpu.wait(stream)

        say(f"4 KiB from memory that is {name}", round(1e6 * timed(small, 200, 20), 1), "us")
