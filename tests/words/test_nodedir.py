import dataclasses
import os
import socket
import threading

import pytest
from clocks import died_ago, lives_now
from each_input import each
from stores import announcement

from kvstore.errors import UsageError
from kvstore.limits import RESTART_WITHIN_S
from kvstore.nodedir import VERSION, Announcement, NodeDir, node_dirs, sweep
from kvstore.system.filelock import try_lock

WORD = announcement(
    node_id=2**64 - 1,
    epoch=5,
    data_path="/dev/shm/d",
    head_path="/dev/shm/h",
    control_path="/run/c",
)


def test_an_announcement_gives_back_what_it_was_made_of():
    assert Announcement.unpack(WORD.pack()) == WORD


def test_an_announcement_says_which_disks_there_are_or_nothing_of_them():
    word = dataclasses.replace(WORD, disks={"0": "ab /mnt/d", "15": "cd /mnt/e f"})
    assert Announcement.unpack(word.pack()) == word
    older = WORD.pack().replace(b', "disks": {}', b"")
    assert b"disks" not in older
    assert Announcement.unpack(older) == WORD


@each(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        WORD.pack()[:-2],
        dataclasses.replace(WORD, version=VERSION + 1).pack(),
        dataclasses.replace(WORD, version=VERSION - 1).pack(),
        WORD.pack().replace(b'"size_bytes": 4194304', b'"size_bytes": "4"'),
        WORD.pack().replace(b'"epoch": 5, ', b""),
        WORD.pack().replace(b'"disks": {}', b'"disks": {"0": 1}'),
        WORD.pack().replace(b'"disks": {}', b'"disks": []'),
    ],
)
def test_anything_else_is_no_announcement(raw):
    assert Announcement.unpack(raw) is None


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 33, "a b", "ä\n"])
def test_a_name_that_could_be_a_path_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match=r"^name="):
        NodeDir(tmp_path, name)


def make(tmp_path, name: str) -> NodeDir:
    directory = NodeDir(tmp_path, name)
    directory.path.mkdir(parents=True)
    data, head = tmp_path / f"{name}.data", tmp_path / f"{name}.head"
    data.touch()
    head.touch()
    word = Announcement.unpack(WORD.pack())
    raw = word.pack().replace(b"/dev/shm/d", str(data).encode())
    directory.announcement_path.write_bytes(raw.replace(b"/dev/shm/h", str(head).encode()))
    directory.lock.touch()
    return directory


def test_a_sweep_removes_the_dead_with_their_segments_and_leaves_the_living(tmp_path):
    make(tmp_path, "dead")
    alive = make(tmp_path, "alive")
    for name in ("dead", "alive"):  # what they have on disk
        (tmp_path / f"{name}.table").touch()
    lock = try_lock(alive.lock)
    assert sweep(tmp_path) == ["dead"]
    left = ["alive.data", "alive.head", "alive.table", "nodes"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    assert [d.name for d in node_dirs(tmp_path)] == ["alive"]
    lock.release()


def test_a_sweep_of_nothing_is_fine(tmp_path):
    assert sweep(tmp_path) == []


def test_a_directory_without_a_lock_file_is_left_alone(tmp_path):
    """A node that is just starting has made its directory and not yet its lock."""
    NodeDir(tmp_path, "starting").path.mkdir(parents=True)
    assert sweep(tmp_path) == []
    assert NodeDir(tmp_path, "starting").path.exists()


def test_a_segment_that_waits_for_its_node_is_swept_when_its_time_is_over_or_it_is_asked_for(
    tmp_path,
):
    for name in ("lately", "long-ago", "named"):
        lives_now(make(tmp_path, name))
    died_ago(RESTART_WITHIN_S + 1, keep=NodeDir(tmp_path, "long-ago").keep)
    assert sweep(tmp_path) == ["long-ago"]
    assert 0 < NodeDir(tmp_path, "lately").kept_for_s() <= RESTART_WITHIN_S
    assert sweep(tmp_path, kept=True, names={"named"}) == ["named"]
    assert sweep(tmp_path, kept=True) == ["lately"]
    assert [p.name for p in tmp_path.iterdir()] == ["nodes"]


def test_a_directory_whose_segment_is_gone_waits_for_nothing(tmp_path):
    """As after a reboot, which empties shared memory."""
    directory = make(tmp_path, "n")
    lives_now(directory)
    (tmp_path / "n.head").unlink()
    assert directory.kept_for_s() == 0
    assert sweep(tmp_path) == ["n"]


def test_a_restarted_node_is_not_the_start_that_announced_the_word(tmp_path):
    directory = make(tmp_path, "n")
    word = directory.announcement()
    assert not directory.lives_as(word)
    lock = try_lock(directory.lock)
    assert directory.lives_as(word)
    directory.announce(dataclasses.replace(word, epoch=word.epoch + 1))
    assert directory.alive()
    assert not directory.lives_as(word)
    directory.announcement_path.unlink()
    assert not directory.lives_as(word)
    lock.release()


ASKS = {
    "node.json": [NodeDir.announcement, NodeDir.stranger, lambda one: one.lives_as(WORD)],
    "lock": [NodeDir.alive],
    "room": [NodeDir.room],
    "ready": [NodeDir.why_not_ready],
    "resets": [NodeDir.kept_resets],
}


@each("kind", ["pipe", "link to a pipe", "directory", "socket", "without end"])
@each("name", ASKS)
def test_whatever_the_owner_of_a_shared_directory_puts_there_nobody_waits_for_it(
    name, kind, tmp_path
):
    """Its clients may be another user's (node/control/permissions.py)."""
    run_dir = tmp_path / f"{name} is a {kind}"
    one = NodeDir(run_dir, "n")
    one.path.mkdir(parents=True)
    one.lock.touch()
    place = one.path / name
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link to a pipe":
        os.mkfifo(run_dir / "pipe")
        place.symlink_to(run_dir / "pipe")
    elif kind == "directory":
        place.mkdir()
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(place))
    else:
        place.touch()
        os.truncate(place, 1 << 40)
    answers = []
    asking = threading.Thread(
        target=lambda: answers.extend([ask(one) for ask in ASKS[name]]), daemon=True
    )
    asking.start()
    asking.join(10)
    assert len(answers) == len(ASKS[name])
