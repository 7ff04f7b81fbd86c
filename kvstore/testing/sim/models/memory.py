"""Models shared memory that real segment code writes, with others looking on between its stores."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.core.events import Copy, Write
from kvstore.errors import NoSpaceError
from kvstore.segment.batch_read import BatchReader, Copied, Found, MappedSegment, Values
from kvstore.segment.shm import OwnedShm
from kvstore.types import Key

if TYPE_CHECKING:
    from kvstore.testing.sim.models.machine import SimMachine
    from kvstore.testing.sim.world import World

COPY_CHUNKS = 3


class SimMap(mmap.mmap):
    """Models the pages of one file, the same for everybody who maps it."""

    world: World

    def __setitem__(self, where: Any, value: Any) -> None:
        world = self.world
        world.pause()
        if isinstance(where, slice) and len(value) > 1:
            start = where.start or 0
            middle = start + len(value) // 2
            super().__setitem__(slice(start, middle), value[: middle - start])
            world.pause()
            super().__setitem__(slice(middle, start + len(value)), value[middle - start :])
        else:
            super().__setitem__(where, value)
        world.pause()

    def madvise(self, *_: int) -> None:
        """Do nothing: its pages are always there."""

    def move(self, dest: int, src: int, count: int) -> None:
        self[dest : dest + count] = self[src : src + count]

    def close(self) -> None:
        """End one mapping; the pages are others', too."""


def address_of(buffer: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Files:
    """Models /dev/shm of all hosts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._maps: dict[str, SimMap] = {}

    def create(self, path: Path, size_bytes: int) -> SimMap:
        if str(path) in self._maps:
            raise NoSpaceError(f"{path} exists")
        made = self._maps[str(path)] = SimMap(-1, size_bytes)
        made.world = self._world
        return made

    def reopen(self, path: Path, size_bytes: int) -> SimMap:
        found = self.map(path)
        if len(found) != size_bytes:
            raise ValueError(f"{path} has {len(found)} bytes, not {size_bytes}")
        return found

    def exists(self, path: str) -> bool:
        return path in self._maps

    def map(self, path: Path) -> SimMap:
        found = self._maps.get(str(path))
        if found is None:
            raise FileNotFoundError(path)
        return found

    def remove(self, *paths: str) -> None:
        for path in paths:
            self._maps.pop(path, None)


class SimReader:
    """Reads a batch of blocks as a real reader does, with others looking on before and after each
    of its copies."""

    def __init__(self, world: World, reader: BatchReader) -> None:
        self._world = world
        self._reader = reader
        self.name, self.suits_one = reader.name, reader.suits_one

    def read(
        self,
        segment: MappedSegment,
        keys: list[Key],
        outs: list[object],
        kinds: int,
        found: Found | None = None,
        copied: Copied | None = None,
    ) -> Values:
        pause = self._world.pause
        values = self._reader.read(segment, keys, outs, kinds, lambda *_: pause(), pause)
        self._world.count("read_in_batches", len(keys) - values[0].count(None))
        return values

    def copy_each(self, targets: list[memoryview], sources: list[memoryview]) -> None:
        for target, source in zip(targets, sources, strict=True):
            copy(self._world, target, source)

    def records(
        self, segment: MappedSegment, keys: list[Key], start: bytes
    ) -> list[bytes | None] | None:
        return self._reader.records(segment, keys, start)


class SimOwned(OwnedShm):
    """Models a node's segment; `Checks` sees every write before it happens."""

    def __init__(self, *args: Any, machine: SimMachine, **kwargs: Any) -> None:
        self.world = machine.world
        super().__init__(*args, machine=machine, **kwargs)
        self.address = address_of(self._data)

    def apply(self, write: Write) -> None:
        self.world.checks.before_write(self, write)
        self.world.pause()
        super().apply_all([write])
        if isinstance(write, Copy):
            self.world.count("moved")
        self.world.checks.after_write(self, write)

    def apply_all(self, writes: list[Write]) -> None:
        for write in writes:
            self.apply(write)

    def bytes_at(self, offset: int, size_bytes: int) -> bytes:
        return self._data[offset : offset + size_bytes]


def copy(world: World, destination: memoryview, source: memoryview) -> None:
    """Copy piece by piece; `Checks` knows where somebody writes."""
    size_bytes = len(destination)
    step = -(-size_bytes // COPY_CHUNKS) or 1
    actor = world.current
    world.checks.copies_to(destination)
    try:
        for start in range(0, size_bytes, step):
            world.pause()
            destination[start : start + step] = source[start : start + step]
    finally:
        world.checks.copying.pop(actor, None)
