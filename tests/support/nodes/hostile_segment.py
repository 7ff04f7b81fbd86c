"""Reads a segment that another process writes without a rule, and one that is reused at full speed.

`python hostile_segment.py MODULE SEED SECONDS`: MODULE is a built `_batch_read`, sanitized or not.
It prints how many batches and hits there were, and ends with 1 when a hit was not its key's value.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from segment_bytes import head_of, hints_in_head

from kvstore.core.events import Fill, Mark, Seal
from kvstore.segment.attached import AttachedShm
from kvstore.segment.batch_read import CompiledReader
from kvstore.segment.header import (
    FREE,
    HEADER_BYTES,
    RESERVED,
    SUPERBLOCK_BYTES,
    Superblock,
    hint_of,
    pack,
)
from kvstore.segment.shm import OwnedShm

SIZE = 256 << 10
SLOTS = SIZE // 4096
KEYS = 40
EDGES = (0, 1, 3, 4095, 4096, 4097, SIZE - 1, SIZE, SIZE + 1, 2**31, 2**32 - 1)
KINDS = 0b11


def key_of(i: int) -> bytes:
    return bytes([i]) * 8 + i.to_bytes(4, "little") + bytes([i]) * 20


def value_of(i: int, generation: int, size_bytes: int) -> bytes:
    """Each eight bytes say which key and generation they are of."""
    return ((generation << 8 | i).to_bytes(8, "little") * (size_bytes // 8 + 1))[:size_bytes]


def is_whole(i: int, value: Any) -> bool:
    """Whether all of it is one value of that key."""
    raw = bytes(value)
    return raw[0] == i and raw == (raw[:8] * (len(raw) // 8 + 1))[: len(raw)]


def reuse(owned: OwnedShm, rng: random.Random, generation: int) -> None:
    """Give a slot to another block, as a node does; a block has up to four pages."""
    slot, i = rng.randrange(SLOTS // 4) * 4, rng.randrange(KEYS)
    granule, size_bytes = rng.randrange(4), rng.randrange(8, 12000)
    owned.apply(Mark(slot, FREE, generation))
    owned.apply(Mark(slot, RESERVED, generation, granule, 12))
    owned.apply(Fill(slot * 4096 + granule * 1024, value_of(i, generation, size_bytes)))
    owned.apply(Seal(slot, generation, key_of(i), size_bytes, granule, 1, 0, 0, 0))


def damage(head: mmap.mmap, hints: memoryview, rng: random.Random) -> None:
    """Write what no node writes: whole headers that lie, torn ones, hints that lead anywhere."""
    slot = rng.choice((0, 1, SLOTS - 1, rng.randrange(SLOTS)))
    start = SUPERBLOCK_BYTES + slot * HEADER_BYTES
    what = rng.randrange(4)
    if what == 0:
        key, granule = key_of(rng.randrange(KEYS)), rng.choice((0, 1, 3, 4, 255))
        lie = (rng.getrandbits(47), key, rng.choice(EDGES), granule)
        kind, meta_length = rng.choice((0, 1, 1, 31, 32, 255)), rng.choice((0, 0, 9, 2**16 - 1))
        head[start : start + HEADER_BYTES] = pack((*lie, kind, meta_length, 0, 0))
        hints[hint_of(key, len(hints))] = slot
    elif what == 1:
        at = start + rng.randrange(HEADER_BYTES)
        head[at : at + 1] = rng.randbytes(1)
    else:
        lie = rng.choice((SLOTS - 1, SLOTS, 2**31, 2**32 - 1, rng.randrange(SLOTS)))
        hints[rng.randrange(len(hints))] = lie


def write(base: Path, seed: int, *, hostile: bool) -> None:
    """What the other process does, until it is killed or its reader has ended."""
    owned = OwnedShm(base, Superblock(7, 1, 0, SIZE))
    head, hints = head_of(owned), hints_in_head(owned)
    (base.parent / "ready").touch()
    rng, reader = random.Random(seed), os.getppid()
    for generation in range(1, 1 << 40):
        if generation % 1000 == 0 and os.getppid() != reader:  # it was ended by what it read
            return
        if hostile and rng.random() < 0.7:
            damage(head, hints, rng)
        else:
            with contextlib.suppress(IndexError):  # of a hint that it follows itself
                reuse(owned, rng, generation)


def out_for(rng: random.Random) -> Any:
    """Targets of every kind that a caller can think of."""
    kind = rng.randrange(8)
    if kind < 3:
        return None
    if kind < 5:
        return memoryview(bytearray(rng.choice((12288, 64 << 10))))
    if kind == 5:
        return memoryview(bytearray(rng.randrange(1, 300)))
    if kind == 6:
        return memoryview(bytes(9000))
    released = memoryview(bytearray(12288))
    released.release()
    return released


class StruckError(Exception):
    """Raised by a callback."""


def callback(rng: random.Random) -> Any:
    """None, or one that is true, false, or raises."""
    kind = rng.randrange(8)
    if kind < 5:
        return None

    def call(*_: int) -> bool:
        if rng.random() < 0.02:
            raise StruckError
        return kind != 5 or rng.random() < 0.5

    return call


def read(reader: CompiledReader, shm: AttachedShm, rng: random.Random, *, hostile: bool) -> int:
    """Read one batch; returns how many hits. Raises `AssertionError` for a wrong one."""
    wanted = [rng.randrange(KEYS + 5) for _ in range(rng.choice((1, 3, 31, 32, 33, 200)))]
    outs = [out_for(rng) for _ in wanted]
    watchers = callback(rng), callback(rng)
    try:
        values, size_bytes = reader.read(
            shm._mapped, [key_of(i) for i in wanted], outs, KINDS, *watchers
        )
    except StruckError:
        return 0
    hits = [(i, v) for i, v in zip(wanted, values, strict=True) if v is not None]
    assert size_bytes == sum(len(v) for _, v in hits)
    for i, value in hits:
        assert hostile or is_whole(i, value), f"key {i} has the bytes of another block"
    return len(hits)


def play(module: Path, seed: int, seconds: float, *, hostile: bool) -> None:
    """Read with two threads while a process of its own writes."""
    spec = importlib.util.spec_from_file_location("_batch_read", module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    reader = CompiledReader(loaded)
    with tempfile.TemporaryDirectory(prefix="kvh-", dir="/dev/shm") as where:
        base, ready = Path(where) / "s", Path(where) / "ready"
        child = os.fork()  # before there are threads, and a mapping that children do not inherit
        if not child:
            try:
                write(base, seed, hostile=hostile)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        while not ready.exists():
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the writer ended"
            time.sleep(0.01)
        shm = AttachedShm(base.with_suffix(".data"), base.with_suffix(".head"))
        counts, wrong = [0, 0], []
        over_at = time.monotonic() + seconds

        def many(number: int) -> None:
            rng = random.Random(seed + number)
            while time.monotonic() < over_at and not wrong:
                try:
                    counts[1] += read(reader, shm, rng, hostile=hostile)
                except BaseException as e:
                    wrong.append(repr(e))
                counts[0] += 1

        threads = [threading.Thread(target=many, args=(n,)) for n in (1, 2)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        shm.close()
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            wrong.append("the writer ended")
    print("hostile" if hostile else "reused", "batches", counts[0], "hits", counts[1], *wrong)
    if wrong or not counts[1]:
        sys.exit(1)


if __name__ == "__main__":
    for mode in (False, True):
        play(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), hostile=mode)
