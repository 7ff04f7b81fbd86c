"""Notes which nodes of other hosts a client has just found silent, in `RUN_DIR/silent/ID-EPOCH`.

A hint among clients of one run directory: whoever hears it leaves the node alone and finds out for
itself whether it is there again. Nothing here is needed, so nothing here fails.

The files are of one host, so their times are of its monotonic clock, which nobody sets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.limits import NODE_TTL_S, SILENCED_MAX
from kvstore.system.interruption import Suppressed

DIRECTORY = "silent"
LISTEN_EVERY_S = 0.05


class Silenced:
    """What clients of one run directory say of silent nodes; each hears it once. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / DIRECTORY
        self.listen_at = float("-inf")
        """To be read: nothing is heard before."""
        self._changed_ns = 0

    def say(self, node_id: int, epoch: int) -> None:
        """Tell others that this start of this node is silent."""
        with Suppressed(OSError):
            self._path.mkdir(mode=0o700, exist_ok=True)
            path = self._file(node_id, epoch)
            path.touch(mode=0o600)
            os.utime(path, (time.monotonic(),) * 2)
            os.utime(self._path)  # what listeners look at, also when the file was there

    def unsay(self, node_id: int, epoch: int) -> None:
        """Take back that this start of this node is silent."""
        with Suppressed(OSError):
            self._file(node_id, epoch).unlink()

    def heard(self, now: float) -> Iterator[tuple[int, int, float]]:
        """(node id, epoch, when by `time.monotonic`) of what was said; nothing when nothing is
        new."""
        if now < self.listen_at:
            return
        self.listen_at = now + LISTEN_EVERY_S
        with Suppressed(OSError):
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns == self._changed_ns:
                return
            self._changed_ns = changed_ns
            for count, entry in enumerate(os.scandir(self._path)):
                said_at = entry.stat().st_mtime
                lately = 0 <= time.monotonic() - said_at <= NODE_TTL_S
                if count >= SILENCED_MAX or not lately:
                    # Long gone from the index too, or said before the host's last boot.
                    Path(entry.path).unlink(missing_ok=True)
                    continue
                node_id, _, epoch = entry.name.partition("-")
                with Suppressed(ValueError):
                    yield int(node_id, 16), int(epoch), said_at

    def _file(self, node_id: int, epoch: int) -> Path:
        return self._path / f"{node_id:016x}-{epoch}"
