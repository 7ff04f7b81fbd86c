"""Nonsense in a node's directory, and a directory that may not be used any more."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from each_input import each
from other_users import ALICE, needs_root, run_as
from stores import MIB, announcement

from kvstore.client.nodes.lease import fresh_id
from kvstore.index.memory import MemoryIndex
from kvstore.machine import REAL
from kvstore.node import Node, NodeConfig
from kvstore.node import takeover as takeover_module
from kvstore.node.takeover import FormerClients
from kvstore.nodedir import ANNOUNCEMENT_BYTES_MAX, Announcement, NodeDir, stranger
from kvstore.system.filelock import try_lock
from kvstore.system.small_json import BRACKETS_MAX, parse_object

WORD = announcement()
MANY = b"[" + b"[]," * 300_000 + b"[]]"


def a_node(run_dir: Path) -> Node:
    run_dir.chmod(0o700)
    return Node(NodeConfig(run_dir=run_dir, size_bytes=4 * MIB), MemoryIndex())


# --- node.json ----------------------------------------------------------------------


def test_an_announcement_is_no_longer_than_that() -> None:
    room = ANNOUNCEMENT_BYTES_MAX - len(WORD.pack())
    assert Announcement.unpack(WORD.pack() + b" " * room) == WORD
    assert Announcement.unpack(WORD.pack() + b" " * (room + 1)) is None


def test_an_announcement_has_no_more_lists_in_it_than_that() -> None:
    raw = WORD.pack()
    spare = BRACKETS_MAX - raw.count(b"{") - raw.count(b"[")
    for count, believed in ((spare, True), (spare + 1, False)):
        word = Announcement.unpack(raw[:-1] + b', "more": [' + b"[]," * (count - 2) + b"[]]}")
        assert (word == WORD) is believed


def test_the_largest_announcement_that_a_node_makes_is_read() -> None:
    word = announcement(
        resets="r" * 9_000,
        counts={f"count_{i}": 2**63 for i in range(200)},
        data_path="d" * 4096,
        head_path="h" * 4096,
        control_path="c" * 107,
        transports={"stream": "tcp://[fe80::1]:7400", "cuda_ipc": "x" * 4096},
    )
    assert Announcement.unpack(word.pack()) == word


@each("raw", [MANY, b"[" * 100_000, b"1", b"null", b"{", b"\xff", b""])
def test_what_is_no_small_object_is_an_empty_one(raw: bytes) -> None:
    assert parse_object(raw, 1 << 20) == {}
    assert Announcement.unpack(raw) is stranger(raw) is None


def test_a_version_that_no_node_has_is_shown_to_nobody() -> None:
    for version in (int("9" * 4000), -1, 1 << 32):
        assert stranger(json.dumps({"version": version, "name": "n"}).encode()) is None
    assert stranger(json.dumps({"version": 99, "name": "n"}).encode()) is not None


@pytest.mark.parametrize("raw", [MANY, b"[" * 100_000, b'{"version": 3}', b"\0" * 5_000_000])
def test_a_node_starts_whatever_its_directory_says(tmp_path: Path, raw: bytes) -> None:
    directory = NodeDir(tmp_path, "node")
    directory.path.mkdir(parents=True)
    for path in (directory.announcement_path, directory.resets_path, directory.ready_path):
        path.write_bytes(raw)
    directory.keep.write_bytes(raw)
    with a_node(tmp_path) as node:
        assert directory.announcement() == node.announcement


# --- leases ----------------------------------------------------------------------------


@pytest.fixture
def leases(tmp_path: Path) -> Path:
    directory = NodeDir(tmp_path, "node")
    directory.leases.mkdir(parents=True)
    return directory.leases


def nonsense(leases: Path) -> set[str]:
    os.mkfifo(leases / fresh_id(REAL))
    (leases / fresh_id(REAL)).mkdir()
    (leases / fresh_id(REAL)).symlink_to("/etc/passwd")
    (leases / fresh_id(REAL)).symlink_to(leases / "nowhere")
    if os.geteuid() == 0:
        others = leases / fresh_id(REAL)
        others.touch()
        os.chown(others, ALICE, ALICE)
    return {path.name for path in leases.iterdir()}


@pytest.mark.parametrize("matter", [True, False])
def test_nonsense_among_the_leases_is_left_alone_and_waited_for_by_nobody(
    leases: Path, matter: bool, caplog: pytest.LogCaptureFixture
) -> None:
    odd = nonsense(leases)
    free = leases / fresh_id(REAL)
    free.touch()
    former = FormerClients(leases, matter=matter)
    assert former.gone()
    assert {path.name for path in leases.iterdir()} == odd
    assert len([r for r in caplog.records if "no lease" in r.getMessage()]) == 1
    former.close()


def test_a_node_starts_with_nonsense_among_its_leases(leases: Path, tmp_path: Path) -> None:
    nonsense(leases)
    with a_node(tmp_path) as node:
        assert node.announcement is not None


def test_a_lease_that_cannot_be_looked_at_counts_as_a_living_clients(
    leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file descriptor is left, say: its client may still write (rule 5)."""
    path = leases / fresh_id(REAL)
    lock = try_lock(path)
    assert lock is not None

    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(takeover_module.os, "open", refuse)
        former = FormerClients(leases, matter=True)
        assert len(former) == 1
        assert not former.gone()
    assert not former.gone()
    lock.release()
    assert former.gone()
    assert not path.exists()
    former.close()


# --- rights -------------------------------------------------------------------------------


@pytest.fixture
def others_run_dir() -> Iterator[Path]:
    """Which another user can enter, unlike those of pytest."""
    run_dir = Path(tempfile.mkdtemp(prefix="kvn-"))
    yield run_dir
    shutil.rmtree(run_dir, ignore_errors=True)


@needs_root
def test_a_node_that_may_not_write_there_says_so(others_run_dir: Path) -> None:
    os.chown(others_run_dir, ALICE, ALICE)
    for path, mode in ((others_run_dir, 0o500), (others_run_dir / "nodes", 0o000)):
        path.mkdir(exist_ok=True)
        os.chown(path, ALICE, ALICE)
        path.chmod(mode)
        told = run_as(
            ALICE,
            """
            from kvstore.index.memory import MemoryIndex
            from kvstore.node import Node, NodeConfig
            config = NodeConfig(run_dir=Path(args[0]), key_prefix="kv:t", size_bytes=4 << 20)
            print(json.dumps(raised(lambda: Node(config, MemoryIndex()).start())))
            """,
            str(others_run_dir),
        )
        assert told.startswith(f"UsageError: run_dir='{others_run_dir}"), told
        assert "Permission denied" in told
        others_run_dir.chmod(0o700)


@needs_root
@pytest.mark.parametrize("which", ["run_dir", "directory"])
def test_a_directory_that_may_not_be_entered_any_more_ends_nobody(
    others_run_dir: Path, which: str
) -> None:
    run_dir = others_run_dir
    os.chown(run_dir, ALICE, ALICE)
    told = run_as(
        ALICE,
        """
        import logging, time
        from kvstore.index.memory import MemoryIndex
        from kvstore.node import Node, NodeConfig
        lines = []
        class Kept(logging.Handler):
            def emit(self, record):
                lines.append(record.getMessage() + ("Traceback" if record.exc_info else ""))
        logging.getLogger("kvstore").addHandler(Kept())
        run_dir, which = Path(args[0]), args[1]
        config = NodeConfig(run_dir=run_dir, key_prefix="kv:t", size_bytes=4 << 20)
        node = Node(config, MemoryIndex()).start()
        shut = run_dir if which == "run_dir" else node.dir.path
        def new():
            start = (node.core.node_id, node.core.epoch)
            return ControlChannel(node.dir, start, 10.0, lambda: ((), ()))
        def asked(channel):
            return raised(lambda: type(channel.request(Op.STAT)).__name__)
        channel = new()
        said = []
        said.append(asked(channel))
        shut.chmod(0)
        time.sleep(2.5)
        said.append(asked(channel))
        alive, failed = node._thread.is_alive(), node.core.blocks.counts["tasks_failed"]
        shut.chmod(0o700)
        again = asked(new())
        channel.close()
        node.stop()
        print(json.dumps([said, alive, failed, again, lines, shut.exists()]))
        """,
        str(run_dir),
        which,
    )
    said, alive, failed, again, lines, _ = told
    assert said[0] == said[1] == again, told
    assert alive, told
    assert failed == 0, told
    assert not [line for line in lines if "Traceback" in line]
    assert [line for line in lines if "Permission denied" in line]
    assert len(lines) <= 15, "each thing once"
