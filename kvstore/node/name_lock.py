"""Makes a process the node of a name, which at most one process is at a time: a lock says which."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.errors import UsageError
from kvstore.node.publishing.publisher import STOP_TIMEOUT_S
from kvstore.nodedir import NodeDir, sweep
from kvstore.rundir import socket_path
from kvstore.system.filelock import FileLock, try_lock

NAME_TAKEN_TIMEOUT_S = 0.2
"""Seconds to wait for a name that a serving node holds: it may be about to stop."""
NAME_FREED_TIMEOUT_S = STOP_TIMEOUT_S * 2
"""The same for a node that does not serve (any more): it is starting, or removing its records."""
LOCK_RETRY_S = 0.01


async def take_name(directory: NodeDir, run_dir: Path, give_up: Callable[[], bool]) -> FileLock:
    """Become the one process that is this node, and remove what dead nodes left in `run_dir`.

    Returns the lock that says so; the node holds it to its end. Raises `UsageError` when another
    node of this name keeps it for longer than one that stops would, or `give_up` says so.
    """
    socket_path(directory.socket)
    sweep(run_dir)
    started_at = time.monotonic()
    while True:
        lock = None
        with suppress(FileNotFoundError):  # swept away between mkdir and lock
            directory.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = try_lock(directory.lock)
        if lock is not None and lock.is_at(directory.lock):
            return lock
        if lock is not None:
            lock.release()
        serving = directory.socket.exists()
        patience_s = NAME_TAKEN_TIMEOUT_S if serving else NAME_FREED_TIMEOUT_S
        if time.monotonic() - started_at > patience_s or give_up():
            raise UsageError(
                "name",
                directory.name,
                f"a node of this name runs in {directory.path}: stop it, or choose another name",
            )
        await asyncio.sleep(LOCK_RETRY_S)
