"""What becomes of a node whose lock file somebody takes away, as cleaners of /tmp do."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from open_files import open_files
from redis_servers import wait_until

from kvstore.errors import NodeUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig, name_lock
from kvstore.nodedir import NodeDir
from kvstore.system.filelock import FileLock, try_lock


def a_node(run_dir: Path) -> Node:
    return Node(NodeConfig(run_dir=run_dir, size_bytes=4 << 20), MemoryIndex())


@pytest.mark.parametrize("replaced", [False, True])
def test_a_node_that_lost_its_name_ends_and_leaves_the_next_one_alone(
    tmp_path: Path, replaced: bool
) -> None:
    tmp_path.chmod(0o700)
    first = a_node(tmp_path).start()
    assert first.announcement is not None
    mine = Path(first.announcement.data_path)
    first.dir.lock.unlink()
    if replaced:
        first.dir.lock.touch(0o600)
    with a_node(tmp_path) as second:
        assert second.announcement is not None
        wait_until(lambda: not mine.exists(), "the first has ended")
        first.stop()
        assert isinstance(first._failure, NodeUnavailableError)
        assert second.dir.lock.exists()
        assert second.dir.socket.exists()
        assert second.dir.announcement() == second.announcement
        assert Path(second.announcement.data_path).exists()


def test_a_directory_that_is_swept_as_its_name_is_taken_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, tries = NodeDir(tmp_path, "node"), []

    def swept(path: Path) -> FileLock | None:
        lock = try_lock(path)
        tries.append(lock)
        if len(tries) == 1:
            shutil.rmtree(directory.path)
        return lock

    monkeypatch.setattr(name_lock, "try_lock", swept)
    before = open_files()
    lock = asyncio.run(name_lock.take_name(directory, tmp_path, lambda: False))
    assert len(tries) == 2
    lock.release()
    assert open_files() == before
