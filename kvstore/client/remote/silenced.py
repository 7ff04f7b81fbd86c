"""Notes which nodes of other hosts a client has just found silent, in `RUN_DIR/silent/ID-EPOCH`.

A hint among clients of one run directory: whoever hears it leaves the node alone and finds out for
itself whether it is there again. Nothing here is needed, so nothing here fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvstore.limits import NODE_TTL_S, SILENCED_MAX

DIRECTORY = "silent"
LISTEN_EVERY_S = 0.05


class Silenced:
    """What clients of one run directory say of silent nodes; each hears it once. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / DIRECTORY
        self._listened_at = float("-inf")
        self._changed_ns = 0

    def say(self, node_id: int, epoch: int) -> None:
        """Tell others that this start of this node is silent."""
        with suppress(OSError):
            self._path.mkdir(mode=0o700, exist_ok=True)
            self._file(node_id, epoch).touch(mode=0o600)
            os.utime(self._path)  # what listeners look at, also when the file was there

    def unsay(self, node_id: int, epoch: int) -> None:
        """Take back that this start of this node is silent."""
        with suppress(OSError):
            self._file(node_id, epoch).unlink(missing_ok=True)

    def heard(self, now: float) -> Iterator[tuple[int, int, float]]:
        """(node id, epoch, when by `time.time`) of what was said; nothing when nothing is new."""
        if now < self._listened_at + LISTEN_EVERY_S:
            return
        self._listened_at = now
        with suppress(OSError):
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns == self._changed_ns:
                return
            self._changed_ns = changed_ns
            for count, entry in enumerate(os.scandir(self._path)):
                said_at = entry.stat().st_mtime
                if count >= SILENCED_MAX or said_at < time.time() - NODE_TTL_S:
                    Path(entry.path).unlink(missing_ok=True)  # long gone from the index too
                    continue
                node_id, _, epoch = entry.name.partition("-")
                with suppress(ValueError):
                    yield int(node_id, 16), int(epoch), said_at

    def _file(self, node_id: int, epoch: int) -> Path:
        return self._path / f"{node_id:016x}-{epoch}"
