"""Suite `adoption` measures how long a node takes, after a start, to know again what is on its
disks, and what who asks it meanwhile waits.

The disks are real devices with real entries, over files without payloads: 30 million blocks of 256
KiB take 4 GB then, and not 8 TB.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.report import Row, machine_alone, percentile
from kvstore.client.nodes.control import ControlChannel
from kvstore.core.disk.base import DISK_PAGE
from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig
from kvstore.node.config import BLOCK_BYTES, DiskConfig
from kvstore.node.disk import disks
from kvstore.nodedir import NodeDir
from kvstore.protocol.control import Op
from kvstore.segment.disk.device import REGIONS_MIN, DiskDevice
from kvstore.segment.disk.file import FILE_NAME, DirectFile
from kvstore.segment.disk.forbidden import Record, record
from kvstore.segment.disk.format import LOG_BYTES, REGION_BYTES, Geometry, pack_entry, pack_region
from kvstore.segment.disk.table import table_bytes
from kvstore.system.filelock import FileLock
from kvstore.types import DiskBlock, DiskPlace, Kind

ASK_EVERY_S = 0.002
POLL_EVERY = 25
TIMEOUT_S = 900.0


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--dir", type=Path, help="a folder on a disk, else that for temporary files"
    )
    parser.add_argument("--blocks", type=int, default=3_000_000)
    parser.add_argument("--disks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    with tempfile.TemporaryDirectory(prefix="kvb-", dir=options.dir) as folder:
        root = Path(folder)
        each = options.blocks // options.disks
        blocks = sum(_make(root / f"disk{i}", each) for i in range(options.disks))
        rows = [_adopted(root, options.disks, blocks) for _ in range(options.repetitions)]
    return machine_alone(), rows


def _file(directory: Path, size_bytes: int) -> DirectFile:
    """Open the file of a device with that size, and none of its pages."""
    path = directory / FILE_NAME
    lock = FileLock(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    assert lock.take()
    os.ftruncate(lock.fd, size_bytes)
    return DirectFile(path, lock, size_bytes)


def _size_of(blocks: int) -> int:
    one = Geometry(REGION_BYTES, LOG_BYTES, 1)
    regions = -(-blocks // (one.payload_pages * DISK_PAGE // BLOCK_BYTES))
    return one.start(max(regions, REGIONS_MIN)) * DISK_PAGE


def _make(directory: Path, blocks: int) -> int:
    """Make a device whose regions are all full of blocks; returns how many."""
    directory.mkdir()
    device = DiskDevice.open(_file(directory, _size_of(blocks)), 0, 1)
    shape = device.geometry
    device.log.add([record(Record.LAPS, shape.regions)])
    device.log.checkpoint()
    per_region = shape.payload_pages * DISK_PAGE // BLOCK_BYTES
    with (directory / FILE_NAME).open("r+b") as file:
        for region in range(shape.regions):
            file.seek(shape.start(region) * DISK_PAGE)
            file.write(pack_region(device.uuid, region, region + 1, 0))
            file.write(b"".join(_entries(device, region, per_region)))
        os.fsync(file.fileno())
    device.close()
    return per_region * shape.regions


def _entries(device: DiskDevice, region: int, count: int) -> Iterator[bytes]:
    first, keys = device.geometry.first_page(region), os.urandom(32 * count)
    for i in range(count):
        place = DiskPlace(0, first + i * (BLOCK_BYTES // DISK_PAGE), region + 1)
        key = keys[32 * i : 32 * i + 32]
        block = DiskBlock(key, place, BLOCK_BYTES, Kind.BLOCK, 0, i + 1, 7)
        yield pack_entry(block, i, device.seed)


def _node(root: Path, count: int, pipe: Connection) -> None:
    """A node in a process of its own, until the pipe is closed."""
    directories = [root / f"disk{i}" for i in range(count)]
    sizes = [(one / FILE_NAME).stat().st_size for one in directories]
    config = NodeConfig(
        run_dir=root / "run",
        size_bytes=2 * table_bytes(sum(sizes) // BLOCK_BYTES) + (64 << 20),
        disks=[DiskConfig(one, size) for one, size in zip(directories, sizes, strict=True)],
        disk_forced=True,
    )
    node = Node(config, MemoryIndex())
    began = time.perf_counter()
    with patch.object(disks, "open_file", lambda where, size_bytes, **_: _file(where, size_bytes)):
        node.start()
    pipe.send(time.perf_counter() - began)
    pipe.poll(None)
    node.stop()


def _cpu_s(pid: int | None) -> float:
    """Return what a process has used of processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _adopted(root: Path, count: int, blocks: int) -> Row:
    """Start a node, and ask it something all the time until it knows all blocks."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_node, args=(root, count, there))
    child.start()
    there.close()
    ready_s, began = here.recv(), time.perf_counter()
    cpu_s = _cpu_s(child.pid)
    directory = NodeDir(root / "run", "node")
    word = directory.announcement()
    assert word is not None
    control = ControlChannel(directory, (word.node_id, word.epoch), TIMEOUT_S, lambda: ((), ()))
    took: list[float] = []
    stats: dict[str, Any] = {"disk_adopting": 1}
    while stats["disk_adopting"]:
        asked = time.perf_counter()
        control.request(Op.PIN, bytes(32))
        took.append(time.perf_counter() - asked)
        if len(took) % POLL_EVERY == 0:
            stats = control.request(Op.STAT)
        time.sleep(ASK_EVERY_S)
        if time.perf_counter() - began > TIMEOUT_S:
            raise TimeoutError("it was not all adopted")
    all_s, cpu_s = time.perf_counter() - began, _cpu_s(child.pid) - cpu_s
    control.close()
    here.send(None)
    child.join()
    return {
        "op": "adoption",
        "blocks": blocks,
        "adopted": stats["disk_adopted"],
        "ready_s": round(ready_s, 2),
        "adopted_s": round(all_s, 2),
        "us_a_block": round(all_s / blocks * 1e6, 2),
        "cpu_us_a_block": round(cpu_s / blocks * 1e6, 2),
        "asked": len(took),
        "answer_ms_p50": round(percentile(took, 50) * 1e3, 2),
        "answer_ms_p99": round(percentile(took, 99) * 1e3, 2),
        "answer_ms_max": round(max(took) * 1e3, 2),
    }
