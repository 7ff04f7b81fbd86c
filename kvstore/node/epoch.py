"""Gives each start of a node its epoch: a number larger than that of every start before it.

Clients remember locations over a restart, and only a new epoch makes those
misses. The time alone is not enough: two starts may share a second, and clocks
are set back. So the last epoch is kept in `RUN_DIR/epochs/NAME`, which stays when
the node's own directory goes.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.errors import UsageError

EPOCH_MAX = (1 << 32) - 1


def next_epoch(run_dir: Path, name: str, now_s: float) -> int:
    """Return the epoch of a start that is about to happen; it is on record before this returns.

    The caller holds the node's lock, so nobody else counts at the same time. A file that cannot be
    read counts as none: then the time has to do.
    """
    path = record_of(run_dir, name)
    epoch = epoch_after(_last(path), now_s)
    if not 0 < epoch <= EPOCH_MAX:
        raise UsageError("epoch", epoch, f"must be 1 to {EPOCH_MAX}; look at {path} and the clock")
    remember(path, epoch)
    return epoch


def remember(path: Path, epoch: int) -> None:
    """Put the epoch of the last start on record. Raises `OSError`."""
    path.parent.mkdir(exist_ok=True, mode=0o700)
    fresh = path.with_suffix(".new")
    with fresh.open("w") as file:
        file.write(f"{epoch}\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)


def record_of(run_dir: Path, name: str) -> Path:
    """Return where the epoch of the last start of the node is."""
    return run_dir / "epochs" / name


def epoch_after(last: int, now_s: float) -> int:
    """Return the epoch that follows `last` at wall-clock time `now_s`."""
    return max(last + 1, int(now_s))


def _last(path: Path) -> int:
    try:
        return max(int(path.read_text()), 0)
    except (OSError, ValueError):
        return 0
