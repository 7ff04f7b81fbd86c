"""Which NUMA nodes memory is taken from, over a machine of two sockets that is only files."""

from __future__ import annotations

from pathlib import Path

import pytest
from each_input import each
from own_python import printed

from kvstore.errors import NoSpaceError, UsageError
from kvstore.system import numa

KIB_PER_GIB = 1 << 20
IN_A_PROCESS = """
import mmap, os, sys, threading
from kvstore.system.numa import place_memory
place_memory(sys.argv[1])
def touch():
    fd = os.memfd_create("segment")
    os.posix_fallocate(fd, 0, 1 << 20)
    touch.mapped = mmap.mmap(fd, 1 << 20)
    touch.mapped[:] = bytes(1 << 20)
thread = threading.Thread(target=touch)
thread.start()
thread.join()
lines = open(f"/proc/self/task/{os.getpid()}/numa_maps").read().splitlines()
print([line.split()[1] for line in lines if "memfd:segment" in line][0])
"""


def sockets(folder: Path, has_memory: str, free_gib: int = 4) -> Path:
    (folder / "has_memory").write_text(has_memory + "\n")
    for node in range(4):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "meminfo").write_text(
            f"Node {node} MemTotal:       {64 * KIB_PER_GIB} kB\n"
            f"Node {node} MemFree:        {free_gib * KIB_PER_GIB} kB\n"
            f"Node {node} FilePages:      {3 * KIB_PER_GIB} kB\n"
            f"Node {node} Shmem:          {2 * KIB_PER_GIB} kB\n"
        )
    return folder


@pytest.mark.parametrize(
    ("has_memory", "allowed", "expected"),
    [
        ("0", "0", [0]),
        ("0-1", "0-1", [0, 1]),
        ("0-1,3", "0-3", [0, 1, 3]),
        ("0-3", "1,3", [1, 3]),
        ("0,2", "0-1", [0]),
    ],
)
def test_nodes_with_memory_are_those_that_the_cpuset_lets_this_process_use(
    tmp_path: Path, has_memory: str, allowed: str, expected: list[int]
) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\nSigQ:\t0\n")
    assert numa.nodes_with_memory(sockets(tmp_path, has_memory), status) == expected


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert numa.nodes_with_memory(tmp_path) == []
    with pytest.raises(UsageError, match="no NUMA nodes"):
        numa.chosen("interleave", sysfs=tmp_path)


def test_room_is_what_is_free_and_the_cache_of_files_but_no_shared_memory(tmp_path: Path) -> None:
    assert numa.free_bytes(1, sockets(tmp_path, "0-1")) == 5 << 30


@each("wrong", ["socket0", "-1", "0-1", "0,1", "1024", "99999", "\u0663", " 0"])
def test_what_no_machine_has_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="must be none, interleave or the number"):
        numa.check_setting("numa", wrong)


def test_a_node_that_is_not_there_is_refused_and_those_that_are_there_named() -> None:
    there = numa.nodes_with_memory()
    assert there, "the machine of the tests has NUMA"
    with pytest.raises(UsageError, match=rf"for this process: {', '.join(map(str, there))}$"):
        numa.chosen("1023")


def test_a_node_without_room_is_refused_before_the_kernel_kills() -> None:
    with pytest.raises(NoSpaceError, match="NUMA node 0 has room for"):
        numa.place_memory("0", 1 << 60)


@pytest.mark.parametrize(
    ("value", "policy"), [("0", "bind:0"), ("interleave", "interleave:"), ("none", "default")]
)
def test_a_thread_that_is_started_later_takes_memory_there(value: str, policy: str) -> None:
    ran = printed(IN_A_PROCESS, value)
    assert ran.startswith(policy)


def test_what_the_system_forbids_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_SET_MEMPOLICY", {numa.platform.machine(): 1 << 20})  # no such call
    with pytest.raises(UsageError, match="SYS_NICE"):
        numa.place_memory("0")
