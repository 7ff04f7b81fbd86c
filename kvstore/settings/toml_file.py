"""Reads the operator's file as it stands, below everything that has a setting in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvstore.errors import UsageError
from kvstore.settings.reader import known_names
from kvstore.settings.removed import CONSTANT, GONE, REMOVED

CONFIG = "KVSTORE_CONFIG"
CONFIG_BYTES_MAX = 1 << 20
TABLES = ("limits", "security", "node", "connector", "transfer")


def read_toml(path: str | Path | None = None) -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """Return the path and the tables of the file at `path`, else of the one that KVSTORE_CONFIG
    names, else (None, {}).

    Raises `UsageError` when it cannot be read, is no TOML, or has a table that nobody reads, or a
    name that was a setting once: whoever reads the file for anything says so.
    """
    name, path = ("config", path) if path else (CONFIG, os.environ.get(CONFIG))
    if not path:
        return None, {}
    try:
        with Path(path).open("rb") as file:
            raw = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as e:
        raise UsageError(name, str(path), f"cannot be read: {e.strerror}") from e
    import tomllib  # most processes have no such file

    if len(raw) > CONFIG_BYTES_MAX:
        raise UsageError(name, str(path), f"must have at most {CONFIG_BYTES_MAX} bytes")
    try:
        tables = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as e:
        raise UsageError(name, str(path), f"must be TOML: {e}") from e
    former = tables.pop(GONE, {})
    known_names(tables, TABLES, where=str(path))
    for table, values in (*tables.items(), (GONE, former)):
        if not isinstance(values, dict):
            raise UsageError(str(path), table, f"must be a table: [{table}]")
        for name in values if table in ("limits", GONE) else ():
            if successor := REMOVED.get(name, CONSTANT if table == GONE else ""):
                raise UsageError(f"{path} [{table}]", name, successor)
    return Path(path), tables
