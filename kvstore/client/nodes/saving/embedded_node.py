"""Starts the embedded memory node, a process of its own that ends with its last client."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from kvstore.client.nodes.saving.host_writer import POLL_S
from kvstore.errors import (
    NO_DESCRIPTORS,
    DeadlineError,
    KVStoreError,
    NodeUnavailableError,
    NoSpaceError,
)
from kvstore.index.open import URL_VARIABLE
from kvstore.limits import EMBEDDED_NODE_BYTES_MIN
from kvstore.machine import REAL
from kvstore.nodedir import VERSION, NodeDir
from kvstore.rundir import listens
from kvstore.secret import SIGNING_KEY
from kvstore.segment.cgroup import memory_limit, size_within
from kvstore.segment.header import SHM_DIR
from kvstore.segment.shm import files_bytes, free_bytes
from kvstore.system import service_manager
from kvstore.system.background import start_in_background

log = logging.getLogger("kvstore.client")

START_TIMEOUT_S = 20.0
"""For one save."""
START_SAVES = 3
"""So many saves wait for one process; then it is killed, and the next save starts another."""
STEP_BYTES = 1 << 20
"""Sizes of nodes that are made smaller than asked for."""


def fitting_bytes(where: Path, size_bytes: int) -> int:
    """`size_bytes`, or less where less fits: nobody but the user of a library's default has
    asked for it. Raises `NoSpaceError` when what fits is of no use."""
    free = free_bytes(where)
    if files_bytes(size_bytes) <= free:
        return size_bytes
    fits = max(free, 0) // STEP_BYTES * STEP_BYTES
    while fits > 0 and files_bytes(fits) > free:
        fits -= STEP_BYTES
    remedy = "enlarge it (`mount -o remount,size=...`, `docker run --shm-size`, an emptyDir)"
    if fits < EMBEDDED_NODE_BYTES_MIN:
        raise NoSpaceError(
            f"{where} has {max(free, 0) >> 20} MiB to give, and a memory node of any use needs "
            f"{EMBEDDED_NODE_BYTES_MIN >> 20}: {remedy}"
        )
    log.warning(
        "%s has room for a node of %d MiB, not of %d MiB: %s, or ask for less (node_size_bytes)",
        where,
        fits >> 20,
        size_bytes >> 20,
        remedy,
    )
    return fits


def embedded_name(key_prefix: str) -> str:
    """Return what the embedded node of `key_prefix` is called: those of other key prefixes, and of
    other versions, run beside it."""
    digest = hashlib.sha256(f"{VERSION} {key_prefix}".encode()).hexdigest()
    return f"embedded-{digest[:8]}"


def start_embedded_node(
    run_dir: Path, *, key_prefix: str, size_bytes: int, signing_key: bytes | None = None
) -> None:
    """Start it, unless another process just did, and return when clients can connect.

    It is given no URL: it joins the embedded Redis of `run_dir` as a user, so that
    Redis lasts as long as the node. Where /dev/shm is too small, so is the node. One that
    was started before and is not ready yet is waited for again, not started anew. Raises
    `NodeUnavailableError` with what it said when it could not start, `DeadlineError` and
    `NoSpaceError`.
    """
    directory = NodeDir(run_dir, embedded_name(key_prefix))
    try:
        _begin(directory, run_dir, key_prefix, size_bytes, signing_key)
    except KVStoreError:
        raise
    except OSError as e:
        remedy = f": {NO_DESCRIPTORS}" if e.errno in (errno.EMFILE, errno.ENFILE) else ""
        raise NodeUnavailableError(f"the embedded node cannot be started: {e}{remedy}") from e


def _begin(
    directory: NodeDir, run_dir: Path, key_prefix: str, size_bytes: int, signing_key: bytes | None
) -> None:
    if _ready(directory):
        return
    process, saves = _starting.get(directory.path, (None, 0))
    if process is None or process.poll() is not None:
        process, saves = _start(directory, run_dir, key_prefix, size_bytes, signing_key), 0
    _starting[directory.path] = process, saves + 1
    try:
        _wait_for(process, directory)
    except DeadlineError:
        if saves + 1 < START_SAVES:
            raise
        process.kill()
        _over(process, directory)
        raise
    except BaseException:
        _over(process, directory)
        raise
    _over(process, directory)


_starting: dict[Path, tuple[subprocess.Popen[bytes], int]] = {}
"""By node directory, what this process has started there, and the saves that have waited for it."""


def _start(
    directory: NodeDir, run_dir: Path, key_prefix: str, size_bytes: int, signing_key: bytes | None
) -> subprocess.Popen[bytes]:
    size_bytes = fitting_bytes(SHM_DIR, size_within(size_bytes, memory_limit()))
    kept = {k: v for k, v in os.environ.items() if k not in (URL_VARIABLE, service_manager.OURS)}
    env = {os.fsencode(k): os.fsencode(v) for k, v in kept.items()}
    if signing_key is not None:
        env[os.fsencode(SIGNING_KEY)] = signing_key
    process = start_in_background(
        [
            *(sys.executable, "-m", "kvstore.cli", "node", "--name", directory.name),
            *("--run-dir", str(run_dir), "--key-prefix", key_prefix),
            *("--size", str(size_bytes)),
            *("--end-with-last-client", "--only-options"),
        ],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    # Somebody must take note of its end, whenever that is: or it stays a zombie, and
    # Python warns of a process that nobody waits for.
    with contextlib.suppress(RuntimeError):  # no more threads: a zombie is what it costs
        REAL.start_thread(process.wait, "kvstore-embedded-node")
    return process


def _wait_for(process: subprocess.Popen[bytes], directory: NodeDir) -> None:
    assert process.stderr is not None
    began = time.monotonic()
    while not _ready(directory):
        if process.poll() is not None and not directory.alive():
            said = process.stderr.read().decode(errors="replace").strip()
            # Behind what it logged.
            why = said.rpartition("\n")[2][-500:]
            raise NodeUnavailableError(f"the embedded node ended at once: {why}")
        if time.monotonic() - began > START_TIMEOUT_S:
            raise DeadlineError(f"the embedded node was not ready within {START_TIMEOUT_S} s")
        time.sleep(POLL_S)


def _over(process: subprocess.Popen[bytes], directory: NodeDir) -> None:
    assert process.stderr is not None
    _starting.pop(directory.path, None)
    process.stderr.close()


def _ready(directory: NodeDir) -> bool:
    return directory.alive() and listens(directory.socket) and directory.announcement() is not None
