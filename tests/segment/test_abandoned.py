"""Whose memory is freed, by whoever looks: a node that may come back keeps its own."""

import os
import signal
import threading
from pathlib import Path

import pytest
from clocks import died_ago
from stores import announcement

from kvstore.limits import RESTART_WITHIN_S
from kvstore.nodedir import NodeDir
from kvstore.segment import abandoned
from kvstore.segment.abandoned import Sweeper, foreign_files, free_abandoned, segment_base, segments
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm
from kvstore.system.filelock import is_locked

BLOCK = Superblock(7, 3, 0, 128 << 10)
LONG_AGO_S = RESTART_WITHIN_S + 60


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def shm_dir(tmp_path) -> Path:
    made = tmp_path / "shm"
    made.mkdir()
    return made


class Killed:
    """A node whose process was killed: its segment, and the word that it left in its directory."""

    def __init__(self, shm_dir: Path, run_dir: Path, *, died_s_ago: float = 0.0) -> None:
        self.base = segment_base(shm_dir, 7, 3)
        self.directory = NodeDir(run_dir, "n")
        self.directory.path.mkdir(parents=True, exist_ok=True)
        self.directory.lock.touch()
        paths = {"data_path": f"{self.base}.data", "head_path": f"{self.base}.head"}
        self.directory.announce(announcement(node_id=7, epoch=3, **paths))
        self.owner = self._start()
        self.files = [Path(path) for path in paths.values()]
        self.died(died_s_ago)

    def _start(self) -> int:
        """A fork of this process, which starts at once: only a process that was killed leaves
        what a killed one leaves."""
        reader, writer = os.pipe()
        if (owner := os.fork()) == 0:
            try:
                signal.alarm(60)
                held = OwnedShm(self.base, BLOCK, home=str(self.directory.path))
                os.write(writer, b"1")
                while held:
                    signal.pause()
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb") as told:
            assert told.read(1), "the owner has its segment"
        return owner

    def died(self, s_ago: float) -> None:
        died_ago(s_ago, files=self.files)

    def kill(self) -> "Killed":
        if self.owner:
            os.kill(self.owner, signal.SIGKILL)
            os.waitpid(self.owner, 0)
            self.owner = 0
        return self

    def there(self) -> list[bool]:
        return [path.exists() for path in self.files]


@pytest.fixture
def node(shm_dir, run_dir):
    made = Killed(shm_dir, run_dir, died_s_ago=LONG_AGO_S)
    yield made
    made.kill()


def test_a_dead_nodes_segment_is_freed_after_its_time_and_not_before(node, shm_dir):
    node.kill().died(RESTART_WITHIN_S - 60)
    table = node.base.with_suffix(".table")  # of what it has on disk
    table.write_bytes(bytes(1 << 20))
    assert free_abandoned(shm_dir) == []
    node.died(LONG_AGO_S)
    os.utime(table, (0, 0))
    (freed,) = free_abandoned(shm_dir)
    assert freed.base == node.base
    assert freed.size_bytes > (128 << 10) + (1 << 20)
    assert list(shm_dir.iterdir()) == []


def test_a_living_nodes_segment_stays_however_old_its_last_sign_of_life_is(node, shm_dir):
    assert free_abandoned(shm_dir, homeless=True) == []
    assert [s.owned for s in segments(shm_dir)] == [True]
    assert node.there() == [True, True]


def test_a_segment_that_was_taken_over_meanwhile_stays(node, shm_dir, monkeypatch):
    """It came back between the look at its time and its lock, and was killed once more."""
    node.kill()
    look = abandoned._look

    def look_and_be_overtaken(base):
        seen = look(base)
        if not overtaken:
            overtaken.append(base)
            OwnedShm(base, BLOCK._replace(epoch=4), reopen=True).close(keep=True)
            node.died(1)
        return seen

    overtaken: list[Path] = []
    monkeypatch.setattr(abandoned, "_look", look_and_be_overtaken)
    assert free_abandoned(shm_dir) == []
    assert node.there() == [True, True]
    assert not is_locked(node.files[1]), "its node may start again"


def overtaken_at_the_lock(monkeypatch, does):
    """`does` happens before a lock is asked for or, when it is a generator, around that."""
    take = abandoned.try_lock

    def overtaken(head, **options):
        steps = does(head)
        if steps is None:
            return take(head, **options)
        lock = take(head, **options)
        for _ in steps:
            pass
        return lock

    monkeypatch.setattr(abandoned, "try_lock", overtaken)


def test_a_segment_whose_node_lives_again_by_the_time_of_the_lock_stays(node, shm_dir, monkeypatch):
    node.kill()
    alive = []
    overtaken_at_the_lock(
        monkeypatch,
        lambda _: alive.append(OwnedShm(node.base, BLOCK._replace(epoch=4), reopen=True)),
    )
    assert free_abandoned(shm_dir) == []
    assert node.there() == [True, True]
    alive[0].close(keep=True)


def test_what_another_has_freed_or_begun_to_is_left_to_it(node, shm_dir, monkeypatch):
    """The file that was locked has no name any more: the lock says nothing about what has."""
    node.kill()

    def begin_to_free(head):
        yield head.unlink()

    overtaken_at_the_lock(monkeypatch, begin_to_free)
    assert free_abandoned(shm_dir) == []
    assert node.there() == [True, False]


def test_a_segment_that_goes_before_its_lock_leaves_no_file_of_ours(node, shm_dir, monkeypatch):
    node.kill()

    def free(_):
        for path in node.files:
            path.unlink()

    overtaken_at_the_lock(monkeypatch, free)
    assert free_abandoned(shm_dir) == []
    assert list(shm_dir.iterdir()) == []


def test_files_that_go_between_two_looks_are_nobodys(shm_dir, monkeypatch):
    gone = [Path(f"{segment_base(shm_dir, 1, 1)}.head")]
    monkeypatch.setattr(abandoned, "_files", lambda _: gone)
    assert segments(shm_dir) == foreign_files(shm_dir) == []


def test_a_segment_that_may_not_be_looked_at_counts_as_owned(node, shm_dir, monkeypatch):
    node.kill()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(abandoned, "is_locked", refuse)
    assert [(s.owned, s.waits_s) for s in segments(shm_dir)] == [(True, 0.0)]
    assert free_abandoned(shm_dir) == []


def test_what_cannot_be_removed_is_not_called_freed(node, shm_dir, monkeypatch):
    node.kill()

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert free_abandoned(shm_dir) == []
    monkeypatch.undo()
    assert node.there() == [True, True]


def test_a_node_that_comes_back_while_its_segment_is_freed_finds_none(node, shm_dir, monkeypatch):
    node.kill()
    monkeypatch.setattr("kvstore.system.memory_files.LOCK_WAIT_S", 0.05)
    unlink, refused = Path.unlink, []

    def unlink_while_it_comes_back(path, **options):
        if path.suffix == ".data":
            with pytest.raises(ValueError, match="another process has the lock"):
                OwnedShm(node.base, BLOCK._replace(epoch=4), reopen=True)
            refused.append(path)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink_while_it_comes_back)
    assert len(free_abandoned(shm_dir)) == 1
    assert refused
    with pytest.raises(FileNotFoundError):
        OwnedShm(node.base, BLOCK._replace(epoch=4), reopen=True)


def test_a_segment_without_a_home_is_told_and_freed_when_asked_for(node, shm_dir):
    node.kill().died(1)
    assert [(s.home, s.homeless) for s in segments(shm_dir)] == [(node.directory.path, False)]
    assert free_abandoned(shm_dir, homeless=True) == []
    node.directory.announcement_path.unlink()
    assert [s.homeless for s in segments(shm_dir)] == [True]
    assert free_abandoned(shm_dir) == []  # its time is not over, and nobody asked
    assert len(free_abandoned(shm_dir, homeless=True)) == 1


def test_a_home_that_speaks_of_another_segment_is_none(node, shm_dir):
    node.kill().died(1)
    other = {"data_path": f"{node.base}0.data", "head_path": f"{node.base}0.head"}
    node.directory.announce(announcement(node_id=7, epoch=4, **other))
    assert [s.homeless for s in segments(shm_dir)] == [True]


def test_a_home_that_no_node_can_have_is_none(tmp_path, shm_dir):
    OwnedShm(segment_base(shm_dir, 7, 3), BLOCK, home=str(tmp_path / "nodes" / "..")).close(
        keep=True
    )
    (found,) = segments(shm_dir)
    assert found.homeless


def test_messages_name_the_node_and_its_run_directory(node, run_dir, shm_dir):
    Path(f"{segment_base(shm_dir, 9, 1)}.data").touch()
    assert [s.home_named for s in segments(shm_dir)] == [
        f"node n in run directory {run_dir}",
        "a node that it does not name",
    ]


def test_payload_alone_and_a_header_file_that_says_nothing_go_after_their_time(shm_dir):
    data, head = (
        Path(f"{segment_base(shm_dir, i, 1)}{s}") for i, s in ((1, ".data"), (2, ".head"))
    )
    data.touch()
    head.touch()
    assert free_abandoned(shm_dir, homeless=True) == []
    for path in (data, head):
        os.utime(path, (0, 0))
    assert len(free_abandoned(shm_dir)) == 2
    assert list(shm_dir.iterdir()) == []


def test_what_others_called_like_ours_is_named_and_left(shm_dir, monkeypatch):
    planted = Path(f"{segment_base(shm_dir, 1, 1)}.head")
    planted.touch()
    os.utime(planted, (0, 0))
    link = Path(f"{segment_base(shm_dir, 2, 1)}.head")
    link.symlink_to(planted)
    assert foreign_files(shm_dir) == [link]
    monkeypatch.setattr(abandoned.os, "geteuid", lambda: os.getuid() + 1)
    assert foreign_files(shm_dir) == sorted([planted, link])
    assert free_abandoned(shm_dir) == []
    assert planted.exists()


def test_a_pipe_or_a_link_beside_our_payload_is_not_waited_for(shm_dir):
    """Who sees the name of a segment can be there first when its header file is gone."""
    piped, linked = (segment_base(shm_dir, 7, epoch) for epoch in (1, 2))
    aim = shm_dir.parent / "somebody's file"
    aim.write_bytes(b"x")
    for base in (piped, linked):
        Path(f"{base}.data").write_bytes(bytes(4096))
    os.mkfifo(f"{piped}.head")
    Path(f"{linked}.head").symlink_to(aim)
    for name in shm_dir.iterdir():
        os.utime(name, (0, 0), follow_symlinks=False)
    found = []
    looking = threading.Thread(
        target=lambda: found.extend([*segments(shm_dir), free_abandoned(shm_dir)]), daemon=True
    )
    looking.start()
    looking.join(10)
    assert not looking.is_alive()
    *seen, freed = found
    assert [(segment.home, segment.owned) for segment in seen] == [(None, False)] * 2
    assert [segment.base for segment in freed] == sorted((piped, linked))
    assert list(shm_dir.iterdir()) == []
    assert aim.read_bytes() == b"x"


def test_no_two_starts_have_the_same_name(shm_dir):
    assert len({segment_base(shm_dir, 1, 1) for _ in range(100)}) == 100


def test_a_sweeper_is_due_at_once_and_then_at_intervals(run_dir, shm_dir):
    sweeper = Sweeper(run_dir, shm_dir=shm_dir)
    sweeper.every_s = 10
    assert [sweeper.due(now) for now in (5.0, 6.0, 14.9, 15.0, 15.1)] == [
        True,
        False,
        False,
        True,
        False,
    ]


def test_a_sweeper_frees_what_was_left_in_other_run_directories(node, tmp_path, shm_dir):
    node.kill()
    Sweeper(tmp_path / "another", shm_dir=shm_dir).sweep()
    assert node.there() == [False, False]


def test_a_sweeper_removes_the_directories_of_dead_nodes(node, run_dir, shm_dir):
    node.kill()
    Sweeper(run_dir, shm_dir=shm_dir).sweep()
    assert not node.directory.path.exists()
