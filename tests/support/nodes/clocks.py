"""Lets time pass, or jump, for what nodes that died left behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from kvstore.nodedir import NodeDir
from kvstore.segment.header import LIFE_PLACE
from kvstore.system import host_clock


def lives_now(directory: NodeDir) -> None:
    """Leave a sign of life in `directory`, as its node does."""
    fd = directory.open_keep()
    try:
        os.pwrite(fd, host_clock.now().pack(), 0)
    finally:
        os.close(fd)


def died_ago(s_ago: float, *, keep: Path | None = None, files: Iterable[Path] = ()) -> None:
    """As if the last sign of life in `keep` and in the `files` of a segment were so old. Others
    may free them from the first one on."""
    moment = written(s_ago)
    for path in files:
        if path.suffix == ".head":
            _write(path, moment, LIFE_PLACE)
    if keep is not None:
        _write(keep, moment, 0)
    clock_was_set(s_ago, *files, *([keep] if keep is not None else []))


def clock_was_set(forward_s: float, *files: Path) -> None:
    """As if the wall clock had been set forward by so much since the files were written."""
    for path in files:
        at = time.time() - forward_s
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (at, at))


def written(s_ago: float) -> bytes:
    """What was written down so long ago; of a host that had not begun to run, nothing."""
    now = host_clock.now()
    ran_ms, passed_ms = now.ran_ms - int(s_ago * 1e3), now.passed_ms - int(s_ago * 1e3)
    if ran_ms < 0:
        return bytes(host_clock.MOMENT_BYTES)
    return host_clock.Moment(now.boot, ran_ms, passed_ms).pack()


def _write(path: Path, raw: bytes, place: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        return
    try:
        os.pwrite(fd, raw, place)
    finally:
        os.close(fd)
