"""Processes that are started in the background and may outlive who started them.

Such a process has a group of its own, so that the Ctrl-C of a terminal is not for it, and
neither is the SIGHUP at the terminal's end: both go to the group in the foreground. It has no
session of its own, since the kernel schedules each session as one group (autogroup): a node in
one of its own got 3% of a core beside an engine's workers that wait by spinning, with gaps of
1.8 s, where one in their session got 50%.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

CPUS_MAX = 8192
"""The largest number of processors that a kernel can be built for."""


def start_in_background(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start `command` in a process group of its own, on every processor that it may use.

    `options` are those of `subprocess.Popen`. Raises `OSError` when it cannot be started.
    """
    with _on_all_processors():
        return subprocess.Popen(command, process_group=0, **options)


@contextlib.contextmanager
def _on_all_processors() -> Iterator[None]:
    """Let this thread, and what it starts meanwhile, use every processor: an engine binds its
    workers to one core each, and what these start would share it with the forward. The kernel
    takes out what the cgroup does not allow; where it forbids the call, nothing changes."""
    try:
        bound_to = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(CPUS_MAX))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, bound_to)
