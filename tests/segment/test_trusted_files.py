"""What another user's node says of its segment is not enough to open it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
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
    assert not files_of(anothers, word).may_write


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
