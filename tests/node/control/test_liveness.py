"""A node's clients, by their leases: who may enter, who is known, who is dead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import UsageError
from kvstore.node.control.liveness import Sessions
from kvstore.system.filelock import FileLock, try_lock

A, B, C, D = ("a" * 32, "b" * 32, "c" * 32, "d" * 32)
ALICE = 1001


class Speaker:
    def send(self, reply: object) -> None:
        raise AssertionError

    def hang_up(self) -> None:
        raise AssertionError


class Leases:
    """The folder of leases, and the processes that hold them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: dict[str, FileLock] = {}

    def hold(self, *clients: str) -> None:
        for client_id in clients:
            lock = try_lock(self.path / client_id)
            assert lock is not None
            self.held[client_id] = lock

    def end(self, client_id: str) -> None:
        self.held.pop(client_id).release()


@pytest.fixture
def leases(tmp_path: Path) -> Iterator[Leases]:
    leases = Leases(tmp_path)
    yield leases
    for client_id in list(leases.held):
        leases.end(client_id)


@pytest.fixture
def sessions(leases: Leases) -> Sessions:
    return Sessions(leases.path, 4)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_client_is_known_over_its_connections(sessions: Sessions, leases: Leases) -> None:
    leases.hold(A, B)
    first, second = Speaker(), Speaker()
    session, known = sessions.enter(A, 1, first)
    assert (session.number, known, session.transport, session.reads_only) == (
        1,
        False,
        first,
        False,
    )
    again, known = sessions.enter(A, 2, second)
    assert (again is session, known, session.transport, session.hello) == (True, True, second, 2)
    other, known = sessions.enter(B, 1, Speaker())
    assert (other.number, known, len(sessions), sessions.admitted) == (2, False, 2, 2)
    assert sessions.all() == [session, other]
    assert (sessions.get(1), sessions.get(2), sessions.get(3)) == (session, other, None)
    assert sessions.leases() == [
        (leases.path / A, session.lease_fd),
        (leases.path / B, other.lease_fd),
    ]


@pytest.mark.parametrize("request_number", [4, 5])
def test_a_hello_that_was_overtaken_is_refused_and_changes_nothing(
    sessions: Sessions, leases: Leases, request_number: int
) -> None:
    leases.hold(A)
    newest = Speaker()
    session, _ = sessions.enter(A, 5, newest)
    with pytest.raises(UsageError, match="HELLO 5 before"):
        sessions.enter(A, request_number, Speaker())
    assert (session.transport, session.hello) == (newest, 5)


def test_who_has_no_locked_lease_does_not_enter_and_leaves_nothing_open(
    sessions: Sessions, leases: Leases
) -> None:
    before = descriptors()
    with pytest.raises(UsageError, match="has no lease file"):
        sessions.enter(A, 1, Speaker())
    (leases.path / A).touch()
    with pytest.raises(UsageError, match="not locked by its process"):
        sessions.enter(A, 1, Speaker())
    leases.hold(B)
    (leases.path / C).symlink_to(leases.path / B)
    with pytest.raises(UsageError, match="has no lease file"):
        sessions.enter(C, 1, Speaker())
    assert (len(sessions), sessions.admitted, descriptors()) == (0, 0, before + 1)


def test_no_more_enter_than_may_and_who_is_known_still_does(
    sessions: Sessions, leases: Leases
) -> None:
    leases.hold(A, B, C, D, "e" * 32)
    for client_id in (A, B, C, D):
        sessions.enter(client_id, 1, Speaker())
    with pytest.raises(UsageError, match="at most 4 a node"):
        sessions.enter("e" * 32, 1, Speaker())
    assert sessions.enter(A, 2, Speaker())[1]


def test_half_of_them_may_be_readers_each_by_a_name_of_its_user(
    sessions: Sessions, leases: Leases
) -> None:
    leases.hold(A)
    ours, _ = sessions.enter(A, 1, Speaker())
    speaker = Speaker()
    reader = sessions.enter_reader(ALICE, A, speaker)
    assert reader is not ours
    assert (reader.reads_only, reader.transport, reader.hello) == (True, speaker, 0)
    with pytest.raises(UsageError, match="is connected already"):
        sessions.enter_reader(ALICE, A, Speaker())
    sessions.enter_reader(ALICE + 1, A, Speaker())
    with pytest.raises(UsageError, match="at most 2 a node"):
        sessions.enter_reader(ALICE + 2, A, Speaker())
    assert sessions.leases() == [(leases.path / A, ours.lease_fd)]
    assert Sessions.dead(reader), "it ends with its connection"
    assert not Sessions.dead(ours)
    sessions.forget(reader)
    sessions.enter_reader(ALICE + 2, A, Speaker())


def test_only_who_has_no_connection_can_be_dead_and_a_free_lease_says_so(
    sessions: Sessions, leases: Leases
) -> None:
    leases.hold(A, B)
    session, _ = sessions.enter(A, 1, Speaker())
    sessions.enter(B, 1, Speaker())
    assert sessions.disconnected() == []
    session.transport = None
    assert sessions.disconnected() == [session]
    assert not Sessions.dead(session)
    leases.end(A)
    assert Sessions.dead(session)


def test_who_is_forgotten_leaves_no_lease_and_no_descriptor(
    sessions: Sessions, leases: Leases
) -> None:
    leases.hold(A)
    before = descriptors()
    session, _ = sessions.enter(A, 1, Speaker())
    (leases.path / A).unlink()
    sessions.forget(session)  # whoever removed it was first
    assert (len(sessions), sessions.get(1), descriptors()) == (0, None, before)
    leases.end(A)
    leases.hold(A)
    session, known = sessions.enter(A, 1, Speaker())
    assert (session.number, known) == (2, False)
    sessions.forget(session)
    assert not (leases.path / A).exists()


def test_a_thread_of_the_node_has_a_session_without_a_lease(sessions: Sessions) -> None:
    speaker = Speaker()
    session = sessions.enter_inside(speaker)
    assert (session.number, session.transport, session.reads_only) == (1, speaker, False)
    assert (sessions.get(1), len(sessions), sessions.all()) == (session, 0, [])
    assert sessions.enter_inside(speaker).number == 2
    sessions.leave_inside(session)
    assert sessions.get(1) is None
    sessions.leave_inside(session)


@pytest.mark.parametrize("keep", [False, True])
def test_at_the_end_leases_stay_only_for_the_next_start(
    sessions: Sessions, leases: Leases, keep: bool
) -> None:
    leases.hold(A)
    before = descriptors()
    sessions.enter(A, 1, Speaker())
    sessions.enter_reader(ALICE, B, Speaker())
    sessions.close(keep=keep)
    assert (leases.path / A).exists() == keep
    assert descriptors() == before
