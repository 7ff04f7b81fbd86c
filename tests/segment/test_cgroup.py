"""The memory limit of a container, from trees as the kernel shows them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from each_input import each

from kvstore.cli.checks import machine
from kvstore.cli.checks.base import Context, Level
from kvstore.errors import UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig
from kvstore.node import daemon as node_daemon
from kvstore.segment.cgroup import MemoryLimit, check_limit, memory_limit, size_within
from kvstore.segment.shm import files_bytes

MIB = 1 << 20
NONE = str((1 << 63) - 4096)

TREES: dict[str, tuple[str, dict[str, str], int | None]] = {
    "version 2": ("0::/a/b\n", {"a/b/memory.max": "1000"}, 1000),
    "version 2, a group above allows less": (
        "0::/a/b\n",
        {"memory.max": "max", "a/memory.max": "500", "a/b/memory.max": "1000"},
        500,
    ),
    "version 2, none": ("0::/a\n", {"a/memory.max": "max"}, None),
    "version 2, seen from inside a container": ("0::/\n", {"memory.max": "700"}, 700),
    "version 2, the path is the host's": ("0::/../docker/x\n", {"memory.max": "700"}, 700),
    "version 1": (
        "4:memory:/a\n1:cpu:/b\n",
        {
            "memory/memory.limit_in_bytes": NONE,
            "memory/a/memory.limit_in_bytes": "300",
            "memory/b/memory.limit_in_bytes": "100",
        },
        300,
    ),
    "version 1, several controllers": (
        "4:cpu,memory:/a\n",
        {"memory/a/memory.limit_in_bytes": "300"},
        300,
    ),
    "version 1, the path is the host's": (
        "4:memory:/docker/x\n0::/\n",
        {"memory/memory.limit_in_bytes": "200"},
        200,
    ),
    "version 1, none": ("4:memory:/\n", {"memory/memory.limit_in_bytes": NONE}, None),
    "both, the limit is of version 1": (
        "4:memory:/a\n0::/a\n",
        {"unified/a/memory.max": "900", "memory/a/memory.limit_in_bytes": "300"},
        300,
    ),
    "both, the limit is of version 2": (
        "4:cpu:/a\n0::/a\n",
        {"unified/a/memory.max": "900"},
        900,
    ),
    "a colon in the path": ("0::/a:b\n", {"a:b/memory.max": "100"}, 100),
    "other lines than that of version 2": (
        "0::/a\n7::/b\n0:cpu:/b\n",
        {"a/memory.max": "100", "b/memory.max": "50"},
        100,
    ),
    "the least that is no limit": ("0::/\n", {"memory.max": str(1 << 60)}, None),
    "nonsense": ("what\n::\n", {"memory.max": "lots"}, None),
    "nothing": ("", {}, None),
}


@each("case", TREES)
def test_the_lowest_limit_of_all_groups_counts(tmp_path: Path, case: str) -> None:
    groups, files, expected = TREES[case]
    there = tmp_path / case
    there.mkdir()
    (there / "cgroup").write_text(groups)
    for name, text in files.items():
        file = there / "sys" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    found = memory_limit(there / "cgroup", there / "sys")
    assert (found.limit_bytes if found else None) == expected
    if found is not None:
        assert found.file.read_text().strip() == str(expected)


def test_what_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "absent", tmp_path) is None


LIMIT = MemoryLimit(64 * MIB, Path("/limit/of/memory.max"))


def test_a_size_that_was_asked_for_beyond_the_limit_is_refused() -> None:
    check_limit(32 * MIB, LIMIT)
    check_limit(1 << 40, None)
    for size_bytes, nodes in ((64 * MIB, 1), (32 * MIB, 2)):
        with pytest.raises(UsageError, match=r"^size_bytes=.* 67108864 bytes \(/limit/of/mem"):
            check_limit(size_bytes, LIMIT, nodes=nodes)


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_a_size_that_nobody_asked_for_is_as_large_as_the_limit_allows(
    nodes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        size_bytes = size_within(1 << 30, LIMIT, nodes=nodes)
    assert 0 < files_bytes(size_bytes) * nodes <= 48 * MIB
    assert size_bytes * nodes > 32 * MIB
    assert "/limit/of/memory.max" in caplog.text
    check_limit(size_bytes, LIMIT, nodes=nodes)


def test_a_size_within_the_limit_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    assert size_within(16 * MIB, LIMIT) == 16 * MIB
    assert size_within(1 << 40, None) == 1 << 40
    assert not caplog.text


def test_a_node_beyond_the_limit_does_not_start_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_daemon, "memory_limit", lambda: LIMIT)
    config = NodeConfig(run_dir=tmp_path, size_bytes=64 * MIB)
    with pytest.raises(UsageError, match=r"memory\.max"):
        Node(config, MemoryIndex()).start()
    assert not config.run_dir.joinpath("nodes", "node").exists()


def test_the_doctor_warns_of_a_limit_below_a_nodes_default_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: LIMIT)
    monkeypatch.setattr(machine, "SIZE_BYTES_DEFAULT", 56 * MIB)
    (finding,) = machine.shared_memory(Context(None, "kv:default", None))
    assert finding.level is Level.WARN
    assert "/limit/of/memory.max" in finding.found


def test_what_fits_to_the_byte_is_within_the_limit_and_all_nodes_count() -> None:
    size_bytes = 1 << 30
    file = LIMIT.file
    check_limit(size_bytes, MemoryLimit(files_bytes(size_bytes), file))
    exact = MemoryLimit(files_bytes(size_bytes) + (256 << 20), file)
    assert size_within(size_bytes, exact) == size_bytes
    assert size_within(32 * MIB, LIMIT, nodes=2) < 32 * MIB
    for nodes, said in ((1, "headers and all, are"), (2, "headers and all, of 2 nodes, are")):
        with pytest.raises(UsageError, match=said):
            check_limit(64 * MIB, LIMIT, nodes=nodes)
