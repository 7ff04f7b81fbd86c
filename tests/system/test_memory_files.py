"""Files of shared memory are whole, plain and of the right size, or are not mapped."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from kvstore.errors import NoSpaceError
from kvstore.segment.attached import MADV_POPULATE_READ, MADV_POPULATE_WRITE
from kvstore.system import memory_files
from kvstore.system.memory_files import attach, create, own, reopen, room

OTHER = os.geteuid() + 1


def test_links_pipes_and_files_of_others_are_not_mapped(tmp_path: Path) -> None:
    plain, link, pipe = tmp_path / "plain", tmp_path / "link", tmp_path / "pipe"
    plain.write_bytes(bytes(4096))
    link.symlink_to(plain)
    os.mkfifo(pipe)
    attach(plain, writable=False, owner=os.geteuid()).close()
    with pytest.raises(OSError, match="link"):
        attach(link, writable=False, owner=os.geteuid())
    for path, owner in ((pipe, os.geteuid()), (plain, OTHER)):
        with pytest.raises(ValueError, match="no plain file of user"):
            attach(path, writable=False, owner=owner)


def test_a_file_that_is_made_has_all_its_pages_and_nobody_elses_name(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with create(path, 1 << 20) as made:
        assert len(made) == 1 << 20
        assert path.stat().st_blocks * 512 >= 1 << 20
    with pytest.raises(FileExistsError):
        create(path, 1 << 20)


def test_a_file_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError, match=r"no room for \d+ bytes"):
        create(tmp_path / "s", 1 << 62)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", ["os.posix_fallocate", "kvstore.system.memory_files.WritableMap"])
def test_who_is_interrupted_while_pages_are_taken_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The kernel takes seconds for a large node, so Ctrl-C comes there."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, interrupted)
    with pytest.raises(KeyboardInterrupt):
        create(tmp_path / "s", 1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_what_is_opened_again_has_the_bytes_and_the_size_that_it_had(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with create(path, 8192) as made:
        made[:4] = b"here"
    with reopen(path, 8192) as again:
        assert again[:4] == b"here"
    with pytest.raises(ValueError, match="has 8192 bytes, not 4096"):
        reopen(path, 4096)


def test_a_file_has_one_owner_and_none_once_it_was_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.system.memory_files.LOCK_WAIT_S", 0.0)
    path = tmp_path / "s"
    with pytest.raises(FileNotFoundError):
        own(path)
    create(path, 4096).close()
    mine = own(path)
    with pytest.raises(ValueError, match="another process has the lock"):
        own(path)
    mine.release()
    own(path).release()


def test_room_is_what_the_file_system_says(tmp_path: Path) -> None:
    found = room(tmp_path)
    assert 0 <= found.free_bytes <= found.total_bytes


def mapped_bytes(path: Path) -> int:
    """How much of a file this process has pages of."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    rss = next(line for line in lines[at:] if line.startswith("Rss:"))
    return int(rss.split()[1]) << 10


@pytest.mark.parametrize("writable", [False, True])
def test_pages_are_mapped_in_advance_where_that_is_asked_for(writable: bool) -> None:
    path = Path(f"/dev/shm/kvstore-test-pages-{os.getpid()}")
    size_bytes = 1 << 20
    try:
        create(path, size_bytes).close()
        there = attach(path, writable=writable, owner=None)
        assert mapped_bytes(path) == 0
        there.madvise(MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ, 0, size_bytes // 2)
        assert mapped_bytes(path) == size_bytes // 2
        there.madvise(MADV_POPULATE_READ)
        assert mapped_bytes(path) == size_bytes
        with pytest.raises(OSError, match="Invalid argument") as refused:
            there.madvise(1 << 20, 0, size_bytes)
        assert refused.value.errno == errno.EINVAL
        there.close()
    finally:
        path.unlink()


def test_other_threads_run_while_the_kernel_maps_pages() -> None:
    """Functions of `ctypes.CDLL` give up the GIL, those of `PyDLL` (flag 4) and mmap's do not."""
    assert not memory_files._madvise._flags_ & 4
    assert memory_files.WritableMap.madvise is memory_files.SharedMap.madvise
    assert memory_files.SharedMap.madvise is not mmap.mmap.madvise
