"""Decides on which NUMA nodes a process takes its memory, by the kernel's memory policy.

A policy set before memory is first touched is where its pages go: a node of the store touches all
of its segment when it is made. Without one they go to the socket of whichever core did that, and
half of the cores, and of the GPUs, reach them over the link between the sockets.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

from kvstore.errors import NoSpaceError, UsageError

NONE, INTERLEAVE = "none", "interleave"
SYSFS = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
NODES_MAX = 1024
"""The kernel's own limit."""
MUST = "must be none, interleave or the number of a NUMA node"
_BIND, _INTERLEAVE = 2, 3
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Numbers of the system call, for which the C library has no name."""


def check_setting(field: str, value: str) -> None:
    """Raise `UsageError` for what can be meant on no machine."""
    if value in (NONE, INTERLEAVE, ""):
        return
    if not re.fullmatch("[0-9]{1,4}", value) or int(value) >= NODES_MAX:
        raise UsageError(field, value, MUST)


def nodes_with_memory(sysfs: Path = SYSFS, status: Path = STATUS) -> list[int]:
    """Return the NUMA nodes that have memory which this process may use; empty on a kernel without
    NUMA.

    Others are left out by the control group's cpuset.
    """
    try:
        there = _listed((sysfs / "has_memory").read_text())
    except OSError:
        return []
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", status.read_text(), re.MULTILINE)
    return sorted(there & _listed(allowed[1]) if allowed else there)


def free_bytes(node: int, sysfs: Path = SYSFS) -> int:
    """Return what can be had on one node: its free memory, and its cache of files."""
    text = (sysfs / f"node{node}" / "meminfo").read_text()
    found = {name: int(kib) << 10 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
    return found["MemFree"] + found.get("FilePages", 0) - found.get("Shmem", 0)


def _listed(text: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it: 0-2,4."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def chosen(value: str, field: str = "numa", sysfs: Path = SYSFS) -> list[int]:
    """Return the NUMA nodes that `value` stands for here; empty: whichever.

    Raises `UsageError` for one that is not there, or not for this process.
    """
    check_setting(field, value)
    if value in (NONE, ""):
        return []
    nodes = nodes_with_memory(sysfs)
    if not nodes:
        raise UsageError(field, value, "cannot be had: this kernel has no NUMA nodes")
    if value == INTERLEAVE:
        return nodes
    if int(value) not in nodes:
        there = ", ".join(map(str, nodes))
        raise UsageError(field, value, f"must be a NUMA node with memory for this process: {there}")
    return [int(value)]


def place_memory(
    value: str, size_bytes: int = 0, *, field: str = "numa", sysfs: Path = SYSFS
) -> None:
    """Let this thread, and those that it starts, take new memory as `value` says.

    `size_bytes` is what is to fit on a single node: the kernel would rather kill than go elsewhere.
    Raises `UsageError` as `chosen` does, and where the system forbids it; `NoSpaceError` where it
    does not fit.
    """
    nodes = chosen(value, field, sysfs)
    if value == INTERLEAVE:
        _set_policy(field, value, _INTERLEAVE, nodes)
    elif nodes:
        room_bytes = free_bytes(nodes[0], sysfs)
        if size_bytes > room_bytes:
            raise NoSpaceError(
                f"NUMA node {value} has room for {room_bytes} bytes, and {size_bytes} are asked "
                "for: use a smaller --size, or --numa interleave"
            )
        _set_policy(field, value, _BIND, nodes)


def _set_policy(field: str, value: str, mode: int, nodes: list[int]) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise UsageError(field, value, f"is not known on {platform.machine()}; use numactl")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (NODES_MAX // bits))()
    for node in nodes:
        mask[node // bits] |= 1 << node % bits
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    # The kernel takes one bit less than it is told.
    if syscall(number, mode, ctypes.byref(mask), ctypes.c_ulong(NODES_MAX + 1)) != 0:
        why = os.strerror(ctypes.get_errno())
        raise UsageError(
            field, value, f"is forbidden here ({why}); in a container it takes --cap-add SYS_NICE"
        )
