"""What another user's node says of its segment is not enough to open it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from other_users import needs_root
from stores import announcement

from kvstore.nodedir import NodeDir
from kvstore.segment.trusted_files import files_of

OTHER = os.geteuid() + 1
NOT_THEIRS = f"/dev/shm/kvstore-{OTHER + 5}-0-1-abc"
NAMED = f"/dev/shm/kvstore-{OTHER}-0-1-abc"


@pytest.fixture
def anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeDir:
    monkeypatch.setattr(NodeDir, "owner", lambda _: OTHER)
    return NodeDir(tmp_path, "n")


def test_another_users_segment_is_where_segments_are_and_is_only_read(
    anothers: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = announcement(data_path=f"{NAMED}.data", head_path=f"{NAMED}.head")
    files = files_of(anothers, word)
    assert (str(files.data), str(files.head)) == (f"{NAMED}.data", f"{NAMED}.head")
    assert files.owner == OTHER
    monkeypatch.setattr("kvstore.segment.trusted_files.os.geteuid", lambda: OTHER + 1)
    files = files_of(anothers, word)
    assert (files.may_write, files.mapped) == (False, False)


@pytest.mark.parametrize(
    ("data", "head"),
    [
        ("/home/me/notes.data", "/home/me/notes.head"),
        (f"{NAMED}.data", "/home/me/notes.head"),
        (
            f"/dev/shm/kvstore-{OTHER + 5}-0-1-abc.data",
            f"/dev/shm/kvstore-{OTHER + 5}-0-1-abc.head",
        ),
        (f"/dev/shm/../home/kvstore-{OTHER}-0.data", f"/dev/shm/../home/kvstore-{OTHER}-0.head"),
        (f"{NAMED}.txt", f"{NAMED}.head"),
        ("", ""),
    ],
)
def test_whatever_else_another_user_names_is_no_segment(
    anothers: NodeDir, data: str, head: str
) -> None:
    with pytest.raises(ValueError, match=r"no segment of user|empty name"):
        files_of(anothers, announcement(data_path=data, head_path=head))


def test_in_ones_own_directory_any_name_is_ones_own_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeDir, "owner", lambda _: OTHER)
    monkeypatch.setattr("kvstore.segment.trusted_files.os.geteuid", lambda: OTHER)
    word = announcement(data_path="/home/me/notes.data", head_path="/home/me/other.head")
    files = files_of(NodeDir(tmp_path, "n"), word)
    assert (str(files.data), str(files.head)) == (word.data_path, word.head_path)
    assert files.may_write


def test_root_may_write_to_anothers_segment(
    anothers: NodeDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.segment.trusted_files.os.geteuid", lambda: 0)
    word = announcement(data_path=f"{NAMED}.data", head_path=f"{NAMED}.head")
    files = files_of(anothers, word)
    assert (files.may_write, files.mapped) == (True, False)


def test_a_segment_of_roots_is_mapped(anothers: NodeDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can end every process anyway."""
    monkeypatch.setattr(NodeDir, "owner", lambda _: 0)
    monkeypatch.setattr("kvstore.segment.trusted_files.os.geteuid", lambda: OTHER)
    named = "/dev/shm/kvstore-0-0-1-abc"
    files = files_of(anothers, announcement(data_path=f"{named}.data", head_path=f"{named}.head"))
    assert (files.may_write, files.mapped) == (False, True)


@needs_root
def test_a_link_to_ones_own_directory_is_the_word_of_who_made_it(tmp_path: Path) -> None:
    """Else another user swaps it for one of theirs between two looks."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    (mine / "nodes" / "n").mkdir(parents=True)
    (shared / "nodes").mkdir(parents=True)
    assert NodeDir(mine, "n").owner() == os.geteuid()
    link = shared / "nodes" / "n"
    link.symlink_to(mine / "nodes" / "n")
    os.lchown(link, OTHER, OTHER)
    assert NodeDir(shared, "n").owner() == OTHER
    link.unlink()
    (shared / "nodes").rmdir()
    (shared / "nodes").symlink_to(mine / "nodes")
    os.lchown(shared / "nodes", OTHER, OTHER)
    assert NodeDir(shared, "n").owner() == OTHER
    (shared / "nodes").unlink()
    (mine / "nodes").rename(shared / "nodes")
    os.chown(shared, OTHER, OTHER)
    assert NodeDir(shared, "n").owner() == OTHER
