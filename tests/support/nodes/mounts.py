"""File systems of a test's own, in loop devices: for those who may mount."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_mounts = pytest.mark.usefixtures("mounts")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def mounted(where: Path, kind: str, *options: str) -> Iterator[Path]:
    """Mount a file system of that kind in a folder of `where`."""
    at = where / f"{kind}-mount"
    at.mkdir()
    run("mount", "-t", kind, *options, kind, str(at))
    try:
        yield at
    finally:
        run("umount", "-l", str(at))


@contextlib.contextmanager
def ext4(where: Path, size_bytes: int, *options: str, inodes: int = 0) -> Iterator[Path]:
    """Mount an ext4 of that size, with that many inodes if that is not 0."""
    image, at = where / "ext4.img", where / "ext4"
    at.mkdir()
    with image.open("w") as file:
        file.truncate(size_bytes)
    made = ("-N", str(inodes)) if inodes else ()
    run("mkfs.ext4", "-q", "-m", "0", *made, str(image))
    run("mount", "-o", ",".join(["loop", *options]), str(image), str(at))
    try:
        yield at
    finally:
        run("umount", "-l", str(at))


EXT4_SHUTDOWN = 0x8004587D
"""`EXT4_IOC_SHUTDOWN`: everything fails from then on, as if the drive were gone."""


def shut_down(where: Path) -> None:
    fd = os.open(where, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, EXT4_SHUTDOWN, b"\2\0\0\0")
    finally:
        os.close(fd)


def error_in(where: Path) -> Path:
    """Return what has an ext4 do what it does about errors, when it is written to."""
    device = where.stat().st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    return Path("/sys/fs/ext4", name, "trigger_fs_error")


@pytest.fixture(scope="session")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where no file system can be mounted: it needs root, mkfs.ext4 and loop devices."""
    try:
        with ext4(tmp_path_factory.mktemp("mounts"), 4 << 20):
            pass
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
