"""Asks the driver what the product rests on and no document says, and what it offers.

Each function is a stage, which runs in a process of its own: after a fault on the device all
later calls of one fail.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

from gpu.driver import LARGE_BYTES, MIB, PORTABLE, READ_ONLY, Copies, Gpu, Shared, address_of
from gpu.rows import Say

PART_BYTES = 64 * MIB
PARTS = 32
HERE = (
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "/sys/devices/system/node/online",
    "/proc/driver/nvidia/version",
    "/sys/fs/cgroup/memory.max",
)
ATTRIBUTES: dict[str, int | None] = {
    "COMPUTE_CAPABILITY_MAJOR": None,
    "HOST_REGISTER_SUPPORTED": 1,
    "READ_ONLY_HOST_REGISTER_SUPPORTED": None,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
    "UNIFIED_ADDRESSING": 1,
    "PAGEABLE_MEMORY_ACCESS": None,
    "ASYNC_ENGINE_COUNT": 2,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "HANDLE_TYPE_FABRIC_SUPPORTED": None,
    "GPU_DIRECT_RDMA_SUPPORTED": None,
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": None,
    "GPU_DIRECT_RDMA_WRITES_ORDERING": None,
    "DMA_BUF_SUPPORTED": None,
    "MULTIPROCESSOR_COUNT": None,
}
"""Of the device, and what each must be at least; without the first three of those that have a
bound copies are slow or single, without the descriptors there is no pool in VRAM."""
STORM_S = float(os.environ.get("GPU_PROBE_STORM_S", "15"))
STORM_COPIES = 1024
STORM_BYTES = (512, 656, 4096, 4608, 16 << 10, 32 << 10)


def versions(say: Say) -> None:
    """Whether torch, the bindings, the driver and the kernel's compiler fit together."""
    import torch
    from cuda.bindings import nvrtc

    from connector.copiers.cuda.nvrtc import compiled

    gpu = Gpu()
    say("torch", torch.__version__, for_cuda=torch.version.cuda)
    say("CUDA of the driver", gpu.call(gpu.driver.cuDriverGetVersion), least=12080)
    say("NVRTC", nvrtc.nvrtcVersion()[1:])
    for name, least in ATTRIBUTES.items():
        say(name, gpu.attribute(name), least=least)
    say("bytes of the kernel", len(compiled(torch.cuda.get_device_capability(0))))


def env(say: Say) -> None:
    """What the machine says of itself."""
    say("kernel", os.uname().release, cores=os.cpu_count())
    disk = os.statvfs("/dev/shm")
    room, free = (disk.f_bsize * blocks >> 30 for blocks in (disk.f_blocks, disk.f_bavail))
    say("/dev/shm", room, "GiB", free=free)
    say("memory that may be locked", resource.getrlimit(resource.RLIMIT_MEMLOCK))
    for path in HERE:
        with contextlib.suppress(OSError):
            say(path, Path(path).read_text().strip()[:200])


def register(say: Say) -> None:
    """Page-locking of shared memory: what it takes, and what is refused."""
    gpu = Gpu()
    unlock = gpu.driver.cuMemHostUnregister
    for kind, most_ms in (("populated", 8), ("never touched", 30)):
        memory = Shared(PARTS * PART_BYTES, populated=kind == "populated")
        parts = range(memory.address, memory.address + PARTS * PART_BYTES, PART_BYTES)
        took = []
        for part in parts:
            began = time.perf_counter()
            gpu.lock(part, PART_BYTES)
            took.append(1e3 * (time.perf_counter() - began))
        middle = sorted(took)[PARTS // 2]
        say(f"locking 64 MiB, {kind}", round(middle, 2), "ms", most=most_ms, longest=max(took))
        for part in parts:
            gpu.call(unlock, part)
    memory, loose = Shared(PART_BYTES), bytearray(3 * 4096)
    lock, half = gpu.driver.cuMemHostRegister, PART_BYTES // 2
    gpu.lock(memory.address, half)
    read_only = address_of(memory.read_only)
    for name, expected, function, *args in (
        ("the same range again", "HOST_MEMORY_ALREADY_REGISTERED", lock, memory.address, half),
        ("one that overlaps", "HOST_MEMORY_ALREADY_REGISTERED", lock, memory.address + MIB, half),
        ("the other half", "CUDA_SUCCESS", lock, memory.address + half, half),
        ("the same pages, mapped again", "CUDA_SUCCESS", lock, address_of(memory.twin), half),
        ("a read-only mapping", "INVALID_VALUE", lock, read_only, half),
        ("a read-only mapping as such", "NOT_SUPPORTED", lock, read_only, half, READ_ONLY),
        ("an address that is not mapped", "INVALID_VALUE", lock, 1 << 20, 4096),
        ("part of a page", "CUDA_SUCCESS", lock, address_of(loose) + 100, 1000),
        ("unlocking an inner address", "HOST_MEMORY_NOT_REGISTERED", unlock, memory.address + MIB),
    ):
        flags = () if function is unlock else (PORTABLE | (args.pop() if len(args) > 2 else 0),)
        seen = gpu.answer(function, *args, *flags)
        say(name, seen, expected=expected, as_expected=seen == expected)
    _unlocked_under_copies(gpu, say)


def _unlocked_under_copies(gpu: Gpu, say: Say) -> None:
    """Tell whether unlocking waits for copies that are under way."""
    size = LARGE_BYTES
    memory, there, stream = Shared(size), gpu.memory(size), gpu.stream()
    gpu.lock(memory.address, size)
    gpu.copy([(there, memory.address, size)] * 8, stream)
    event, began = gpu.event(stream), time.perf_counter()
    answer = gpu.answer(gpu.driver.cuMemHostUnregister, memory.address)
    say(
        "unlocking under copies",
        answer,
        waited_ms=round(1e3 * (time.perf_counter() - began), 1),
        copies=gpu.answer(gpu.driver.cuEventQuery, event),
        afterwards=gpu.answer(gpu.driver.cuEventSynchronize, event),
    )


def batch(say: Say) -> None:
    """The call for many copies: what it takes, whether its bytes are right, and what it costs."""
    gpu = Gpu()
    if gpu.batch() is None:
        say("a call for many copies", "none")
        return
    memory, loose = Shared(2 * PART_BYTES), bytearray(MIB)
    there = gpu.memory(2 * PART_BYTES)
    for part in range(2):
        gpu.lock(memory.address + part * PART_BYTES, PART_BYTES)
    for name, (copies, settings) in _questions(memory.address, there, address_of(loose)).items():
        many, stream = gpu.batch(**settings), gpu.stream()
        assert many is not None
        answer = many(copies, stream)
        say(name, answer, afterwards=gpu.answer(gpu.driver.cuEventSynchronize, gpu.event(stream)))
    _bytes_of_batches(gpu, say, memory, there)
    _cost_of_batches(gpu, say, memory.address, there)


def _questions(base: int, there: int, loose: int) -> dict[str, tuple[Copies, dict[str, Any]]]:
    """Return copies, and settings of the call, by what they ask."""
    size = 64 << 10
    into = [(there + i * size, base + i * size, size) for i in range(16)]
    back = [(base + i * size, there + i * size, size) for i in range(16)]
    far = there + PART_BYTES
    unlocked = [(there + i * size, loose + i * size, size) for i in range(8)]
    border = base + PART_BYTES - size
    return {
        "host to device": (into, {}),
        "device to host": (back, {}),
        "device to device": ([(far + i * size, there + i * size, size) for i in range(16)], {}),
        "both ways in one": ([into[0], back[1]], {}),
        "source order ANY": (into, {"order": "any"}),
        "overlap preferred": (into, {"overlap": True}),
        "over two locked parts": ([(there, border, 2 * size), (far, base, size)], {}),
        "from memory that is not locked": (unlocked, {}),
        "to memory that is not locked": ([(b, a, n) for a, b, n in unlocked], {}),
        "1024 copies": ([(there + i * 4096, base + i * 4096, 4096) for i in range(1024)], {}),
    }


def _bytes_of_batches(gpu: Gpu, say: Say, memory: Shared, there: int) -> None:
    import numpy as np

    host = np.frombuffer(memory.mapping, np.uint8)
    random = np.random.default_rng(1)
    host[:] = random.integers(0, 255, len(host), np.uint8)
    many, stream = gpu.batch(), gpu.stream()
    assert many is not None
    for count, size in ((64, 64 << 10), (512, 4096), (16, 4 * MIB)):
        before, order = host.copy(), random.permutation(count)
        into = [
            (there + int(j) * size, memory.address + i * size, size) for i, j in enumerate(order)
        ]
        answers = [many(into, stream), many([(b, a, n) for a, b, n in into[::-1]], stream)]
        gpu.wait(stream)
        same = bool(np.array_equal(before, host))
        say(f"bytes there and back, {count} x {size >> 10} KiB", same, least=1, answers=answers)


def _cost_of_batches(gpu: Gpu, say: Say, base: int, there: int) -> None:
    """Compare one call for all with a call each, and the settings of the call."""
    from gpu.driver import timed

    ways: dict[str, dict[str, Any]] = {
        "batch": {},
        "any order": {"order": "any"},
        "overlap": {"overlap": True},
    }
    for size in (4096, 16 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB):
        count = min(1024, PART_BYTES // size)
        spots = [i * size for i in range(count)]
        for way, to, source in (
            ("h2d", there, base),
            ("d2h", base, there),
            ("d2d", there + PART_BYTES, there),
        ):
            copies = [(to + spot, source + spot, size) for spot in spots]
            row = {}
            for kind in (*ways, "single"):
                many = gpu.batch(**ways[kind]) if kind in ways else gpu.copy
                assert many is not None
                stream, calls_s = gpu.stream(), list[float]()

                def work(many: Any = many, stream: int = stream, calls_s: Any = calls_s) -> None:
                    began = time.perf_counter()
                    many(copies, stream)  # noqa: B023
                    calls_s.append(time.perf_counter() - began)
                    gpu.wait(stream)

                row[kind] = round(count * size / timed(work, 5, 1) / 1e9, 1)
                row[f"{kind}, us a copy"] = round(1e6 * min(calls_s) / count, 2)
            say(f"{way} {count} x {size >> 10} KiB", row["batch"], "GB/s", **row)


def vmm(say: Say) -> None:
    """Memory that processes share: which handles it gets, and that it outlives its owner."""
    from gpu.handed import outlives

    gpu = Gpu()
    driver = gpu.driver
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 0
    kinds = driver.CUmemAllocationHandleType
    for name, kind in (
        ("a descriptor", kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        ("a fabric handle", kinds.CU_MEM_HANDLE_TYPE_FABRIC),
    ):
        wanted.requestedHandleTypes = kind
        for rdma in (0, 1):
            wanted.allocFlags.gpuDirectRDMACapable = rdma
            say(
                f"memory with {name}, RDMA {rdma}",
                gpu.answer(driver.cuMemCreate, 2 * MIB, wanted, 0),
            )
    outlives(say)


def storm(say: Say) -> None:
    """Many small copies a call, both ways, by two threads: a driver was reported to hang so."""
    faulthandler.dump_traceback_later(STORM_S + 10, exit=True)
    gpu = Gpu()
    if gpu.batch() is None:
        say("a call for many copies", "none")
        return
    import numpy as np

    memory, there = Shared(2 * PART_BYTES), gpu.memory(2 * PART_BYTES)
    host, random = np.frombuffer(memory.mapping, np.uint8), np.random.default_rng(5)
    host[:] = random.integers(0, 255, len(host), np.uint8)
    before = host.copy()
    for part in range(2):
        gpu.lock(memory.address + part * PART_BYTES, PART_BYTES)
    sizes = random.choice(STORM_BYTES, STORM_COPIES)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    done, failed = [0, 0], list[str]()

    def run(which: int) -> None:
        own, base = Gpu(), which * PART_BYTES
        stream, many = own.stream(), own.batch()
        order = np.random.default_rng(which)
        end_at = time.monotonic() + STORM_S
        while time.monotonic() < end_at and not failed:
            into = [
                (
                    there + base + int(starts[i]),
                    memory.address + base + int(starts[i]),
                    int(sizes[i]),
                )
                for i in order.permutation(STORM_COPIES)
            ]
            back = [(b, a, n) for a, b, n in into[::-1]]
            assert many is not None
            answers = {many(copies, stream) for _ in range(8) for copies in (into, back)}
            failed.extend(answers - {"CUDA_SUCCESS"})
            own.wait(stream)
            done[which] += 16

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(STORM_S + 5)
    hung = sum(thread.is_alive() for thread in threads)
    say(f"calls of {STORM_COPIES} copies in {STORM_S:g} s", sum(done))
    say("other answers than success", len(failed), most=0, seen=failed)
    say("threads that hang in one", hung, most=0)
    say("bytes are what they were", bool(np.array_equal(before, host)), least=1)
    if hung:
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
