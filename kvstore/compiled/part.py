"""Loads a compiled part, if it is there, fits and is wanted (docs/decisions/0077)."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from zlib import crc32

COMPILED = "KVSTORE_COMPILED"
"""The variable that decides: `no` uses the Python, `yes` fails where there is no compiled part. Any
other value uses the compiled part where it can."""
BLOCK_KEYS = "kvstore.compiled._block_keys"
BLOCK_KEYS_SOURCE = Path(__file__).with_name("block_keys.c")
BLOCK_WRITES = "kvstore.compiled._block_writes"
BLOCK_WRITES_SOURCE = Path(__file__).with_name("block_writes.c")


def wanted() -> str | None:
    """Return what that variable says in this process."""
    return os.environ.get(COMPILED)


def load(wanted: str | None, module: str, source: Path) -> ModuleType | None:
    """Return the compiled part `module`, None where that in Python is to be used. Raises
    `ImportError` when `wanted` is `yes` and there is none that fits."""
    if wanted == "no":
        return None
    try:
        compiled = importlib.import_module(module)
        if not _is_of(compiled, source):
            raise ImportError(f"{module} is not of {source.name} as it is now: build it again")
    except ImportError:
        if wanted == "yes":
            raise
        return None
    return compiled


def _is_of(module: ModuleType, source: Path) -> bool:
    """Return whether the source beside it, if there is one, is what was compiled: an editable
    install keeps what was built when it was made."""
    try:
        return bool(crc32(source.read_bytes()) == module.SOURCE_CRC32)
    except OSError:
        return True
