"""Damages and takes away the bytes of a store under trial."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

FLIP_EVERY_BYTES = 512
FILE_BYTES_MIN = 4096
"""Smaller files of a store are not its payload."""


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
