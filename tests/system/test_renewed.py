"""What is made of files follows them, and keeps what it had when they cannot be used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from redis_servers import wait_until

from kvstore.errors import UsageError
from kvstore.system import renewed
from kvstore.system.renewed import SETTLED_S, Renewed


@pytest.fixture(autouse=True)
def looks_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewed, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("old")
    return path


def made(file: Path) -> Renewed[str]:
    def make() -> str:
        text = file.read_text()
        if text == "unusable":
            raise UsageError("file", str(file), "cannot be used")
        return text

    return Renewed([file], make)


def test_a_file_that_is_written_to_is_taken_once_it_has_settled(file: Path) -> None:
    one = made(file)
    assert one.get() == "old"
    with file.open("w") as writing:
        for part in ("n", "e", "w"):
            writing.write(part)
            writing.flush()
            assert one.get() == "old"
    written_at = time.monotonic()
    wait_until(lambda: one.get() == "new", "it is taken", SETTLED_S + 5)
    assert time.monotonic() > written_at + SETTLED_S / 2


def test_a_file_that_is_replaced_by_an_older_one_is_taken_too(file: Path, tmp_path: Path) -> None:
    """As a link in Kubernetes is: neither its size nor its time need change."""
    times = (1, 1)
    os.utime(file, times)
    one = made(file)
    (tmp_path / "next").write_text("new")
    os.utime(tmp_path / "next", times)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "next")
    link.replace(file)
    wait_until(lambda: one.get() == "new", "it is taken", SETTLED_S + 5)


@pytest.mark.parametrize("how", ["unusable", "gone"])
def test_one_that_cannot_be_used_leaves_the_old_one_and_is_warned_of_once(
    file: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = made(file)
    file.unlink()
    if how == "unusable":
        file.write_text(how)

    def warned() -> bool:
        assert one.get() == "old"
        return bool(caplog.records)

    wait_until(warned, "it is said", SETTLED_S + 5)
    for _ in range(50):
        assert one.get() == "old"
    assert len(caplog.records) == 1
    assert str(file) in caplog.text
    file.write_text("new")
    wait_until(lambda: one.get() == "new", "the next one is taken", SETTLED_S + 5)


def test_the_disk_is_not_asked_at_each_call(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewed, "LOOK_EVERY_S", 3600.0)
    one = made(file)
    one.get()
    monkeypatch.setattr(one, "_stamps", lambda: pytest.fail("asked again"))
    assert one.get() == "old"


def test_what_cannot_be_used_in_the_beginning_is_an_error(file: Path) -> None:
    file.write_text("unusable")
    with pytest.raises(UsageError, match="cannot be used"):
        made(file)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        made(file)
