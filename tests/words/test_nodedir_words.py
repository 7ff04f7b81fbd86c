"""What a node's directory says, what it leaves behind, and who may raise out of reading it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import died_ago, lives_now
from each_input import each
from stores import announcement

from kvstore import nodedir
from kvstore.errors import UsageError
from kvstore.limits import RESTART_WITHIN_S
from kvstore.nodedir import (
    NAME_CHARS_MAX,
    VERSION,
    Announcement,
    NodeDir,
    Stranger,
    stranger,
    strangers,
    sweep,
)
from kvstore.system.filelock import try_lock

WORD = announcement(node_id=7, epoch=5, counts={"blocks": 3}, transports={"stream": "tcp://a:1"})
FIELDS = dataclasses.asdict(WORD)


@pytest.fixture
def one(tmp_path: Path) -> NodeDir:
    """The directory of a dead node with a segment of two files."""
    directory = NodeDir(tmp_path, "n")
    directory.path.mkdir(parents=True)
    directory.lock.touch()
    files = [tmp_path / "n.data", tmp_path / "n.head"]
    for file in files:
        file.touch()
    directory.announce(WORD.with_files(*map(str, files)))
    return directory


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


# --- announcements ----------------------------------------------------------


@each(
    "changes",
    [
        {"version": VERSION + 1},
        {"version": None},
        {"epoch": "5"},
        {"epoch": True},
        {"counts": {"blocks": "3"}},
        {"counts": {"blocks": True}},
        {"counts": []},
        {"transports": {"stream": 5}},
        {"transports": []},
        {"name": 5, "transports": {}, "counts": {}},
    ],
)
def test_a_word_with_a_field_of_another_type_is_no_announcement(changes: dict[str, Any]) -> None:
    assert Announcement.unpack(json.dumps(FIELDS).encode()) == WORD
    assert Announcement.unpack(json.dumps({**FIELDS, **changes}).encode()) is None


@each("raw", [b"[5]", b'"version"', b"5", b"null", b"{", b"[" * 100_000])
def test_what_is_no_object_is_nobodys_word(raw: bytes) -> None:
    assert Announcement.unpack(raw) is None
    assert stranger(raw) is None


def test_a_node_of_another_version_is_a_stranger_with_a_name_that_can_be_shown() -> None:
    said = {"name": "n", "host": "h", "key_prefix": "kv:t"}
    raw = json.dumps({**said, "version": VERSION + 1}).encode()
    assert stranger(raw) == Stranger("n", "h", "kv:t", VERSION + 1)
    hidden = json.dumps({**said, "name": "\x1b[2J", "version": VERSION - 1}).encode()
    assert stranger(hidden) == Stranger("?", "h", "kv:t", VERSION - 1)
    assert stranger(WORD.pack()) is None
    for version in ("4", True, None):
        assert stranger(json.dumps({**said, "version": version}).encode()) is None


def test_strangers_are_the_living_ones_of_the_same_keys(tmp_path: Path) -> None:
    locks = []
    for name, prefix, version, lives in (
        ("a", "kv:t", VERSION + 1, True),
        ("b", "kv:other", VERSION + 1, True),
        ("c", "kv:t", VERSION, True),
        ("d", "kv:t", VERSION + 1, False),
    ):
        directory = NodeDir(tmp_path, name)
        directory.path.mkdir(parents=True)
        word = dataclasses.replace(WORD, name=name, key_prefix=prefix, version=version)
        directory.announce(word)
        directory.lock.touch()
        if lives:
            locks.append(try_lock(directory.lock))
    assert [other.name for other in strangers(tmp_path, "kv:t")] == ["a"]
    assert [other.name for other in strangers(tmp_path, None)] == ["a", "b"]
    for lock in locks:
        assert lock is not None
        lock.release()


# --- files ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "a-b", "-", "a" * NAME_CHARS_MAX])
def test_a_name_of_letters_digits_and_hyphens_is_one(tmp_path: Path, name: str) -> None:
    if name == "-":
        with pytest.raises(UsageError):
            NodeDir(tmp_path, name)
    else:
        assert NodeDir(tmp_path, name).name == name


@pytest.mark.usefixtures("open_umask")
def test_files_may_be_read_by_who_may_enter_and_written_by_the_node_alone(one: NodeDir) -> None:
    one.announce(WORD)
    one.say_room(5)
    lives_now(one)
    modes = {p.name: p.stat().st_mode & 0o777 for p in one.path.iterdir()}
    assert (modes["node.json"], modes["room"], modes["keep"]) == (0o644, 0o644, 0o600)
    assert not [name for name in modes if name.endswith(".new")]
    os.umask(0o077)
    one.announce(WORD)
    assert one.announcement_path.stat().st_mode & 0o777 == 0o644


def test_what_a_node_says_is_read_back(one: NodeDir) -> None:
    assert one.room() == 0
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for free_bytes in (0, 5, 2**63):
        one.say_room(free_bytes)
        assert one.room() == free_bytes
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert "not tried" in one.why_not_ready()
    for why in ("no index", ""):
        one.say_ready(why)
        assert one.why_not_ready() == why
    assert one.kept_resets() == {}
    one.keep_resets({"a": 1})
    assert one.kept_resets() == {"a": 1}


def test_a_segment_waits_for_so_long_from_the_last_sign_of_life(
    one: NodeDir, tmp_path: Path
) -> None:
    lives_now(one)
    left_s = one.kept_for_s()
    assert RESTART_WITHIN_S - 60 < left_s <= RESTART_WITHIN_S
    died_ago(RESTART_WITHIN_S + 1, keep=one.keep)
    assert one.kept_for_s() == 0.0
    died_ago(RESTART_WITHIN_S - 100, keep=one.keep)
    assert 0 < one.kept_for_s() <= 100
    (tmp_path / "n.data").unlink()
    assert one.kept_for_s() == 0.0


@pytest.mark.parametrize("paths", [("", ""), (5, None), (["a"], {})])
def test_a_word_that_names_no_files_keeps_and_removes_none(
    one: NodeDir, tmp_path: Path, paths: tuple[Any, Any]
) -> None:
    said = {**FIELDS, "head_path": paths[0], "data_path": paths[1]}
    one.announcement_path.write_text(json.dumps(said))
    lives_now(one)
    assert one.kept_for_s() == 0.0
    assert sweep(tmp_path) == ["n"]
    assert (tmp_path / "n.data").exists()


# --- sweeping ---------------------------------------------------------------


def test_only_nodes_that_are_named_are_swept(one: NodeDir, tmp_path: Path) -> None:
    assert sweep(tmp_path, names={"other"}) == []
    assert one.path.exists()
    assert sweep(tmp_path, names=["n"]) == ["n"]


def test_a_segment_that_comes_to_wait_while_its_lock_is_taken_stays(
    one: NodeDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came back and died again between the look and the lock."""
    real = nodedir.try_lock

    def late(path: Path, **options: Any) -> Any:
        lives_now(one)
        return real(path, **options)

    monkeypatch.setattr(nodedir, "try_lock", late)
    assert sweep(tmp_path) == []
    assert (tmp_path / "n.data").exists()
    assert sweep(tmp_path, kept=True) == ["n"]
    assert not (tmp_path / "n.data").exists()
    assert not one.path.exists()


def test_the_lock_of_a_directory_that_was_removed_meanwhile_says_nothing(
    one: NodeDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = nodedir.try_lock

    def late(path: Path, **options: Any) -> Any:
        lock = real(path, **options)
        path.rename(tmp_path / "old")
        path.touch()
        return lock

    monkeypatch.setattr(nodedir, "try_lock", late)
    assert sweep(tmp_path) == []
    assert (tmp_path / "n.data").exists()


def test_a_sweep_gives_back_the_lock_of_what_stays(
    one: NodeDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: NodeDir) -> None:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(NodeDir, "remove", broken)
    assert sweep(tmp_path) == []
    assert not one.alive()


def test_a_segment_whose_file_is_gone_is_removed_all_the_same(
    one: NodeDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "n.head").unlink()
    assert sweep(tmp_path) == ["n"]
    assert not (tmp_path / "n.data").exists()
    assert caplog.text == ""


def test_what_stays_in_a_directory_keeps_nobody_from_the_rest(
    one: NodeDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stays(*_: object, **__: object) -> None:
        raise PermissionError(1, "immutable")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", stays)
        assert sweep(tmp_path) == ["n"]
    assert one.lock.exists()


def test_where_nobody_can_look_a_node_is_taken_for_alive(
    one: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = one.announcement()
    assert word is not None
    assert not one.alive()

    def refused(*_: object) -> Any:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(nodedir, "is_locked", refused)
    assert one.alive()
    assert one.lives_as(word)
    assert not one.lives_as(WORD)
    monkeypatch.setattr(nodedir, "read_small", refused)
    assert one.lives_as(word)
