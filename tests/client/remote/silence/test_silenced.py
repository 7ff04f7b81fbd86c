"""What clients of one run directory tell each other of silent nodes, file by file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.client.remote import silenced as silenced_module
from kvstore.client.remote.silenced import LISTEN_EVERY_S, Silenced
from kvstore.limits import NODE_TTL_S, SILENCED_MAX

NODE = 2**64 - 2


@pytest.fixture
def said(tmp_path: Path) -> Path:
    return tmp_path / "silent"


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def heard(listener: Silenced, now: float) -> list[tuple[int, int]]:
    return [(node_id, epoch) for node_id, epoch, _ in listener.heard(now)]


@pytest.mark.usefixtures("open_umask")
def test_what_is_said_is_nobody_elses_to_write(tmp_path: Path, said: Path) -> None:
    Silenced(tmp_path).say(NODE, 7)
    assert said.stat().st_mode & 0o777 == 0o700
    (file,) = said.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_every_start_of_every_node_is_heard_and_each_time_that_it_is_said(
    tmp_path: Path, said: Path
) -> None:
    speaker, listener = Silenced(tmp_path), Silenced(tmp_path)
    speaker.say(NODE, 7)
    speaker.say(16, 8)
    assert sorted(heard(listener, 1.0)) == [(16, 8), (NODE, 7)]
    assert heard(listener, 2.0) == []
    os.utime(said, (1, 1))  # a clock that stands still between two words tells no news
    assert sorted(heard(listener, 3.0)) == [(16, 8), (NODE, 7)]
    speaker.say(16, 8)
    assert sorted(heard(listener, 4.0)) == [(16, 8), (NODE, 7)]
    speaker.unsay(16, 8)
    speaker.unsay(17, 9)  # nobody had said it
    assert heard(listener, 5.0) == [(NODE, 7)]


def test_nobody_listens_more_often_than_that(tmp_path: Path) -> None:
    speaker, listener = Silenced(tmp_path), Silenced(tmp_path)
    assert heard(listener, 1.0) == []
    speaker.say(1, 1)
    assert heard(listener, 1.0 + LISTEN_EVERY_S / 2) == []
    assert heard(listener, 1.0 + LISTEN_EVERY_S) == [(1, 1)]


def test_word_counts_for_the_time_to_live_of_a_node(
    tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 1000.0 + NODE_TTL_S)
    monkeypatch.setattr(silenced_module, "time", clock)
    speaker, listener = Silenced(tmp_path), Silenced(tmp_path)
    speaker.say(1, 1)
    speaker.say(2, 2)
    for name, at in (("1-1", 1000), ("2-2", 999)):
        os.utime(said / f"{int(name[0]):016x}-{name[2]}", (at, at))
    assert heard(listener, 1.0) == [(1, 1)]
    assert [path.name for path in said.iterdir()] == [f"{1:016x}-1"]


@pytest.mark.parametrize("excess", [0, 1])
def test_no_more_is_heard_at_once_than_may_be(tmp_path: Path, said: Path, excess: int) -> None:
    speaker, listener = Silenced(tmp_path), Silenced(tmp_path)
    for node_id in range(SILENCED_MAX + excess):
        speaker.say(node_id, 1)
    assert len(heard(listener, 1.0)) == SILENCED_MAX
    assert len(list(said.iterdir())) == SILENCED_MAX


def test_old_word_that_another_listener_takes_away_first_keeps_nobody_from_the_rest(
    tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker, listener = Silenced(tmp_path), Silenced(tmp_path)
    speaker.say(1, 1)
    speaker.say(2, 2)
    old = said / f"{1:016x}-1"
    os.utime(old, (1, 1))
    entries = sorted(os.scandir(said), key=lambda entry: entry.name)
    assert [entry.stat().st_size for entry in entries] == [0, 0]
    old.unlink()
    monkeypatch.setattr(silenced_module.os, "scandir", lambda _: iter(entries))
    assert heard(listener, 1.0) == [(2, 2)]


def test_what_was_said_before_the_hosts_last_boot_is_not_believed(
    tmp_path: Path, said: Path
) -> None:
    """The clock of files counts from the boot, so that word of before it lies in the future."""
    speaker, listener = Silenced(tmp_path), Silenced(tmp_path)
    speaker.say(1, 1)
    ahead = time.monotonic() + 3600
    os.utime(said / f"{1:016x}-1", (ahead, ahead))
    assert heard(listener, 1.0) == []
    assert list(said.iterdir()) == []
