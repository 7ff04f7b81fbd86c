"""The file of a device: where it may lie, what it takes, and what others do to it."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_parts import PAGE, file_of
from lossy_mount import Op, lossy_mount
from mounts import error_in, ext4, mounted, needs_mounts, shut_down

from kvstore.errors import NoSpaceError, UsageError
from kvstore.segment.disk.base import aligned
from kvstore.segment.disk.file import FILE_NAME, DirectFile, file_system_of, open_file, remove_file

MIB = 1 << 20


def used_bytes(where: Path) -> int:
    """Return what `du` says of a directory."""
    told = subprocess.run(["du", "-s", "-B1", where], capture_output=True, text=True, check=True)
    return int(told.stdout.split()[0])


def fill(path: Path) -> None:
    """Write to a file until the file system is full, which raises."""
    with path.open("wb", buffering=0) as file:
        while file.write(bytes(MIB)):
            pass


# --- where it may lie -------------------------------------------------------------------


def test_a_directory_must_be_there(disk_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.*must be a directory"):
        open_file(disk_dir / "nowhere", MIB)


def test_shared_memory_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="is on tmpfs; must be on ext4 or xfs, unless forced"):
        open_file(Path("/dev/shm"), MIB)
    assert not Path("/dev/shm", FILE_NAME).exists()


@needs_mounts
def test_an_overlay_is_refused_by_name_unless_forced(disk_dir: Path) -> None:
    for name in ("lower", "upper", "work"):
        (disk_dir / name).mkdir()
    of = f"lowerdir={disk_dir}/lower,upperdir={disk_dir}/upper,workdir={disk_dir}/work"
    with mounted(disk_dir, "overlay", "-o", of) as where:
        with pytest.raises(UsageError, match="is on overlayfs"):
            open_file(where, MIB)
        open_file(where, MIB, forced=True).close()


def test_a_file_system_that_nobody_thought_of_is_refused() -> None:
    assert file_system_of(Path("/proc")) == "a file system of type 0x9fa0"
    with pytest.raises(UsageError, match="is on a file system of type 0x9fa0"):
        open_file(Path("/proc"), MIB)


@needs_mounts
def test_a_file_system_without_direct_io_is_refused_even_if_forced(disk_dir: Path) -> None:
    with mounted(disk_dir, "ramfs") as where:
        with pytest.raises(UsageError, match="without O_DIRECT"):
            open_file(where, MIB, forced=True)
        assert not list(where.iterdir())


def test_another_users_file_and_what_is_no_file_is_refused(disk_dir: Path) -> None:
    path = disk_dir / FILE_NAME
    (disk_dir / "elsewhere").touch()
    path.symlink_to(disk_dir / "elsewhere")
    with pytest.raises(OSError):
        open_file(disk_dir, MIB, forced=True)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises((UsageError, OSError)):
        open_file(disk_dir, MIB, forced=True)
    path.unlink()
    if os.geteuid() == 0:
        path.touch()
        os.chown(path, 12345, 12345)
        with pytest.raises(UsageError, match="this user's"):
            open_file(disk_dir, MIB, forced=True)


@pytest.mark.parametrize("size", [10, PAGE, 100 * PAGE, 2 * MIB])
def test_another_programs_file_is_left_as_it_is(disk_dir: Path, size: int) -> None:
    path = disk_dir / FILE_NAME
    content = os.urandom(size)
    path.write_bytes(content)
    with pytest.raises((UsageError, OSError), match=r"move it away|the file ends"):
        open_file(disk_dir, MIB, forced=True)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", bytes(100), bytes(2 * PAGE)])
def test_a_file_that_was_not_made_to_its_end_can_be_removed(disk_dir: Path, content: bytes) -> None:
    (disk_dir / FILE_NAME).write_bytes(content)
    assert remove_file(disk_dir) == len(content)
    assert not list(disk_dir.iterdir())
    assert remove_file(disk_dir) == 0


@pytest.mark.parametrize("size", [10, PAGE, 2 * MIB])
def test_what_is_no_disk_is_not_removed(disk_dir: Path, size: int) -> None:
    (disk_dir / FILE_NAME).write_bytes(os.urandom(size))
    with pytest.raises(UsageError, match="is no disk of kvstore's: move it away"):
        remove_file(disk_dir)
    assert (disk_dir / FILE_NAME).stat().st_size == size


# --- how large it is --------------------------------------------------------------------


def test_a_disk_size_must_leave_something(disk_dir: Path) -> None:
    with pytest.raises(UsageError, match="disk_size=65536: must be more than 65536"):
        open_file(disk_dir, 64 << 10, forced=True)


@pytest.mark.parametrize("disk_size", [MIB, 3 * MIB + 4097, 64 * MIB])
def test_all_of_a_directory_takes_no_more_than_the_disk_size(
    disk_dir: Path, disk_size: int
) -> None:
    where = disk_dir / "own"
    where.mkdir()
    file = open_file(where, disk_size, forced=True)
    assert disk_size * 0.99 - (128 << 10) < used_bytes(where) <= disk_size
    assert (where / FILE_NAME).stat().st_mode & 0o777 == 0o600
    file.close()


def test_the_size_grows_and_shrinks_at_a_restart_and_keeps_what_is_there(disk_dir: Path) -> None:
    pages = aligned(PAGE)
    pages[:] = os.urandom(PAGE)
    file = open_file(disk_dir, 4 * MIB, forced=True)
    file.write(2 * PAGE, [pages])
    file.close()
    for disk_size in (9 * MIB, 2 * MIB, 2 * MIB, 5 * MIB):
        file = open_file(disk_dir, disk_size, forced=True)
        assert file.size_bytes == (disk_dir / FILE_NAME).stat().st_size <= disk_size
        assert used_bytes(disk_dir) <= disk_size
        found = aligned(PAGE)
        file.read(2 * PAGE, found)
        assert found == pages
        file.read(file.size_bytes - PAGE, found)
        assert not any(found)
        file.close()


@needs_mounts
def test_a_file_system_keeps_a_share_for_others(disk_dir: Path) -> None:
    with ext4(disk_dir, 64 * MIB) as where:
        fs = os.statvfs(where)
        most = fs.f_bavail * fs.f_frsize - fs.f_blocks * fs.f_frsize // 20
        with pytest.raises(NoSpaceError, match="under 5% of its file system"):
            open_file(where, most + MIB)
        assert not (where / FILE_NAME).exists()
        file = open_file(where, 20 * MIB)
        file.close()
        with pytest.raises(NoSpaceError, match="under 5%"):
            open_file(where, most + MIB)
        assert (where / FILE_NAME).stat().st_size == file.size_bytes
        open_file(where, most).close()
        open_file(where, most).close()


@needs_mounts
def test_once_it_is_there_a_full_file_system_harms_nothing(disk_dir: Path) -> None:
    with ext4(disk_dir, 32 * MIB) as where:
        file = open_file(where, 12 * MIB)
        with pytest.raises(OSError):
            fill(where / "other")
        before = used_bytes(where)
        pages = aligned(MIB)
        for lap in range(3):
            pages[:] = bytes([lap + 1]) * MIB
            for start in range(2 * PAGE, file.size_bytes - MIB, MIB):
                file.write(start, [pages])
        file.sync()
        assert used_bytes(where) == before
        file.close()
        open_file(where, 12 * MIB).close()  # and it starts again


@needs_mounts
def test_where_nothing_can_be_allocated_there_is_no_half_made_file(disk_dir: Path) -> None:
    with mounted(disk_dir, "tmpfs", "-o", "size=8m") as where:
        with pytest.raises(NoSpaceError):
            open_file(where, 32 * MIB, forced=True)
        assert not list(where.iterdir())


@needs_mounts
def test_where_no_inode_is_left_it_says_that_no_file_can_be_made(disk_dir: Path) -> None:
    with ext4(disk_dir, 64 * MIB, inodes=16) as where:
        with contextlib.suppress(OSError):
            for number in range(1000):
                (where / str(number)).touch()
        with pytest.raises(NoSpaceError, match=r"kvstore\.disk: no file can be made.*inodes"):
            open_file(where, 8 * MIB)
        (where / "0").unlink()
        open_file(where, 8 * MIB).close()


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_where_a_quota_ends_a_disk_is_refused_and_one_that_is_there_keeps_its_size(
    tmp_path: Path, number: int
) -> None:
    with lossy_mount(tmp_path / "fuse", 64 * MIB, 0) as mount:
        mount.refused = {Op.CREATE: number}
        with pytest.raises(NoSpaceError, match="no file can be made"):
            open_file(mount.where, 8 * MIB, forced=True)
        mount.refused = {Op.FALLOCATE: number}
        with pytest.raises(NoSpaceError, match="no room for"):
            open_file(mount.where, 8 * MIB, forced=True)
        path = mount.where / FILE_NAME
        assert not path.exists()
        mount.refused = {}
        open_file(mount.where, 8 * MIB, forced=True).close()
        size_bytes = path.stat().st_size
        mount.refused = {Op.FALLOCATE: number}
        with pytest.raises(NoSpaceError, match="no room for"):
            open_file(mount.where, 16 * MIB, forced=True)
        assert path.stat().st_size == size_bytes


# --- what others do to it ---------------------------------------------------------------


def test_one_process_has_a_disk_and_another_start_is_refused(disk_dir: Path) -> None:
    file = open_file(disk_dir, MIB, forced=True)
    text = f"""
from pathlib import Path
from kvstore.segment.disk.file import open_file
open_file(Path({str(disk_dir)!r}), 1 << 20, forced=True)
"""
    told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert "is in use by another process: one node a disk" in told.stderr
    file.close()
    told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


def test_a_forked_child_has_nothing_of_it(disk_dir: Path) -> None:
    file = open_file(disk_dir, MIB, forced=True)
    child = os.fork()
    if child == 0:
        try:
            file.write(0, [aligned(PAGE)])
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    file.close()


def test_a_file_that_was_removed_replaced_or_cut_is_told(disk_dir: Path) -> None:
    path = disk_dir / FILE_NAME
    file = file_of(disk_dir, 16 * PAGE)
    assert file.trouble() is None
    os.truncate(path, 8 * PAGE)
    assert file.trouble() == f"{path} was cut to {8 * PAGE} bytes"
    with pytest.raises(OSError):
        file.read(8 * PAGE, aligned(PAGE))
    path.rename(disk_dir / "away")
    assert file.trouble() == f"{path} was removed or replaced"
    path.touch()
    assert file.trouble() == f"{path} was removed or replaced"
    file.close()


@needs_mounts
def test_a_file_system_that_became_read_only_is_an_error_and_is_still_read(disk_dir: Path) -> None:
    with ext4(disk_dir, 32 * MIB, "errors=remount-ro") as where, writing(where) as (file, pages):
        error_in(where).write_text("1")
        with pytest.raises(OSError):
            file.write(0, [aligned(PAGE)])
        found = aligned(PAGE)
        file.read(0, found)
        assert found == pages


@needs_mounts
def test_a_drive_that_vanished_is_an_error(disk_dir: Path) -> None:
    with ext4(disk_dir, 32 * MIB) as where, writing(where) as (file, _):
        shut_down(where)
        for call in (
            lambda: file.write(0, [aligned(PAGE)]),
            lambda: file.read(0, aligned(PAGE)),
            file.sync,
        ):
            with pytest.raises(OSError):
                call()


@contextlib.contextmanager
def writing(where: Path) -> Iterator[tuple[DirectFile, memoryview]]:
    """Open a file in which the first page is synced."""
    pages = aligned(PAGE)
    pages[:] = b"x" * PAGE
    with contextlib.closing(open_file(where, 4 * MIB)) as file:
        file.write(0, [pages])
        file.sync()
        yield file, pages
