"""Damages and takes away the bytes of a store under trial."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import numpy as np

FLIP_EVERY_BYTES = 512
FILE_BYTES_MIN = 4096
"""Smaller files of a store are not its payload."""
END_TIMEOUT_S = 10.0
MAPPING_BYTES_MIN = 1 << 20
PART_BYTES = 16 << 20
WORD_BYTES = 8


def payload_files(folder: Path) -> list[Path]:
    """Return the files that the store under trial keeps KV in: its own in `folder`, or a node's
    memory."""
    found = [Path(json.loads(word.read_text())["data_path"]) for word in _node_words(folder)]
    mine = {word.parent for word in _node_words(folder)}
    for path in folder.rglob("*"):
        plain = path.is_file() and not mine.intersection(path.parents)
        if plain and path.stat().st_size >= FILE_BYTES_MIN:
            found.append(path)
    return [path for path in found if path.exists()]


def _node_words(folder: Path) -> list[Path]:
    return list(folder.glob("**/nodes/*/node.json"))


def flip_bits(folder: Path, more: Sequence[Path] = ()) -> str:
    """Flip one bit in every few hundred bytes that are not 0. Return why it could not be done, or
    nothing."""
    flipped = 0
    for path in [*payload_files(folder), *more]:
        with path.open("r+b") as file:
            # The last byte of each, which of little-endian numbers has the exponent: a change of
            # the first one moves no token.
            for start in range(FLIP_EVERY_BYTES - 1, path.stat().st_size, FLIP_EVERY_BYTES):
                file.seek(start)
                byte = file.read(1)
                if byte != b"\0":
                    file.seek(start)
                    file.write(bytes([byte[0] ^ 0x40]))
                    flipped += 1
    return "" if flipped else "its bytes are in no file of {dir} and no memory node of it"


def lose_store(folder: Path, pids: Sequence[int] = ()) -> str:
    """Kill the store's nodes (SIGKILL), or remove its files. Return why it could not be done, or
    nothing."""
    words = _node_words(folder)
    for word in words:
        os.kill(json.loads(word.read_text())["pid"], signal.SIGKILL)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    files = [] if words or pids else payload_files(folder)
    for path in files:
        path.unlink()
    return "" if words or files or pids else "it has no file in {dir} and no memory node"


def end_all_of(setting: str) -> None:
    """End what still has this in its environment: servers that a connector has started. They have
    the time of `END_TIMEOUT_S` to see by themselves that their engines are gone, and as much again
    after SIGTERM."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        give_up_at = time.monotonic() + END_TIMEOUT_S
        for pid in _with_setting(setting):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while _with_setting(setting):
            if time.monotonic() > give_up_at:
                break
            time.sleep(0.1)
        else:
            return


def _with_setting(setting: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another's, or gone meanwhile
            if setting.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def flip_copies(pid: int, needles: Sequence[bytes], places: Sequence[tuple[int, int]]) -> int:
    """Flip a bit of every copy of these bytes in the memory of a process, but for `places`
    (address, size). Return how many. The needles are of one length, and lie at multiples of
    `WORD_BYTES`."""
    if not needles:
        return 0
    known, length = set(needles), len(needles[0])
    firsts = np.array([int.from_bytes(one[:WORD_BYTES], "little") for one in known], np.uint64)
    flipped = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for at, data in _parts_of(memory, pid, length):
            words = np.frombuffer(data, np.uint64, len(data) // WORD_BYTES)
            for index in np.flatnonzero(np.isin(words, firsts)).tolist():
                begin = index * WORD_BYTES
                address = at + begin
                if data[begin : begin + length] not in known:
                    continue
                if any(start <= address < start + size for start, size in places):
                    continue
                memory.seek(address + length - 1)
                memory.write(bytes([data[begin + length - 1] ^ 0x40]))
                flipped += 1
    return flipped


def _parts_of(memory: FileIO, pid: int, overlap: int) -> Iterator[tuple[int, bytes]]:
    """Yield what a process may write of its larger mappings, in parts: address and bytes."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        start, end = (int(one, 16) for one in span.split("-"))
        if not mode.startswith("rw") or end - start < MAPPING_BYTES_MIN:
            continue
        for at in range(start, end, PART_BYTES):
            try:
                memory.seek(at)
                data = memory.read(min(PART_BYTES + overlap - WORD_BYTES, end - at))
            except (OSError, OverflowError):  # a mapping that is gone, or a device's
                break
            yield at, data
