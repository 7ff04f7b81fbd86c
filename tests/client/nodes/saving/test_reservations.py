"""What a client was granted is given back, whatever becomes of its request."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis_servers import RedisServer, wait_until
from stores import NodeProcess, node_stats

from kvstore import Client, DeadlineError
from kvstore.client.base import Later, Reservation, ReserveAnswer
from kvstore.client.nodes.control import ControlChannel, Ticket
from kvstore.client.nodes.reaper import EVERY_S
from kvstore.client.nodes.saving import link as link_module
from kvstore.client.nodes.saving.link import Grants, Holdings
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.protocol.control import Op
from kvstore.protocol.control_requests import Wants
from kvstore.spi import BlockSession, NodeUnavailableError
from kvstore.transport.stream.security import StreamSecurity
from kvstore.types import Key

SECRET = "a secret that both sides know"
LENGTH = 100_000
FREE_WITHIN_S = 2.0
KEYS = [bytes([i]) * 32 for i in range(4)]


@pytest.fixture
def mortal(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with NodeProcess(redis_server) as process:
        yield process


@pytest.fixture(scope="module")
def lasting(redis_server: RedisServer) -> Iterator[NodeProcess]:
    """One that nobody kills."""
    with NodeProcess(redis_server) as process:
        yield process


@pytest.fixture
def patient(lasting: NodeProcess) -> Iterator[BlockSession]:
    with closing(BlockSession(**lasting.client_options)) as session:
        yield session


@pytest.fixture
def session(mortal: NodeProcess) -> Iterator[BlockSession]:
    with closing(BlockSession(**mortal.client_options)) as session:
        yield session


def reserved(session: BlockSession, key: Key) -> Reservation:
    (slot,) = session.reserve([key], LENGTH, 1)
    assert isinstance(slot, Reservation)
    return slot


def open_reservations(node: NodeProcess) -> int:
    with Client(**node.client_options) as other:
        return int(node_stats(other)["reserved"])


def restart(node: NodeProcess, session: BlockSession) -> None:
    node.kill()
    wait_until(lambda: session.writer.no_node() is not None, "the client lets go of the dead node")
    node.start()
    wait_until(lambda: session.writer.no_node() is None, "the next start is found")


def test_a_commit_while_no_node_is_there_lets_the_slots_go(
    mortal: NodeProcess, session: BlockSession
) -> None:
    slot = reserved(session, KEYS[0])
    mortal.kill()
    wait_until(lambda: session.writer.no_node() is not None, "the client lets go of the dead node")
    with pytest.raises(NodeUnavailableError):
        session.commit([slot])
    mortal.start()
    wait_until(lambda: session.writer.no_node() is None, "the next start is found")
    # The next start keeps the slot for its writer until that is known not to write (rule 5).
    wait_until(lambda: open_reservations(mortal) == 0, "the slot is free", 5.0)


def test_a_commit_for_two_starts_of_a_node_lets_the_slots_of_both_go(
    mortal: NodeProcess, session: BlockSession
) -> None:
    slots = [reserved(session, KEYS[0])]
    restart(mortal, session)
    slots.append(reserved(session, KEYS[1]))
    assert [bool(result) for result in session.commit(slots)] == [False, True]
    wait_until(lambda: open_reservations(mortal) == 0, "both are free", 5.0)


def test_what_a_dead_node_granted_is_not_given_back_to_the_next_one(
    mortal: NodeProcess, session: BlockSession
) -> None:
    """An empty node grants the same slots and generations as the one before it did."""
    old = reserved(session, KEYS[0])
    mortal.kill()
    wait_until(lambda: session.writer.no_node() is not None, "the client lets go of the dead node")
    mortal.forget()
    mortal.start()
    wait_until(lambda: session.writer.no_node() is None, "the next start is found")
    new = reserved(session, KEYS[1])
    assert new[-2:] == old[-2:]
    session.abort([old])
    assert open_reservations(mortal) == 1
    new.buffer[:] = bytes(LENGTH)
    assert all(session.commit([new]))


def test_more_than_one_request_holds_is_given_back_whole(
    lasting: NodeProcess, patient: BlockSession
) -> None:
    keys = [i.to_bytes(32, "big") for i in range(BATCH_KEYS_MAX + 1)]
    patient.abort([r for r in patient.reserve(keys, 100, 1) if isinstance(r, Reservation)])
    assert open_reservations(lasting) == 0


def test_when_the_second_request_of_a_reserve_fails_nothing_is_reserved(
    lasting: NodeProcess, patient: BlockSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [i.to_bytes(32, "big") for i in range(BATCH_KEYS_MAX + 1)]
    link = patient.writer.link()
    reserve = link.reserve_later

    def fails_for_one(wants: Wants, namespace_id: int, granted: Grants) -> Later[ReserveAnswer]:
        if len(wants) == 1:
            raise DeadlineError("the node did not answer in time")
        return reserve(wants, namespace_id, granted)

    monkeypatch.setattr(link, "reserve_later", fails_for_one)
    with pytest.raises(DeadlineError):
        patient.reserve(keys, 100, 1)
    assert open_reservations(lasting) == 0


def test_a_reserve_that_was_interrupted_leaves_nothing_reserved(
    lasting: NodeProcess, patient: BlockSession
) -> None:
    assert patient.writer.no_node() is None
    patient.abort([reserved(patient, KEYS[0])])

    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    lasting.signal(signal.SIGSTOP)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            patient.reserve([KEYS[1]], LENGTH, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
        lasting.signal(signal.SIGCONT)
    assert reserved(patient, KEYS[1])


def test_an_answer_that_is_interrupted_on_its_way_to_the_caller_is_nobodys(
    lasting: NodeProcess, patient: BlockSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient.abort([reserved(patient, KEYS[0])])
    collect = ControlChannel.collect

    def interrupted(self: ControlChannel, ticket: Ticket) -> object:
        collect(self, ticket)
        monkeypatch.setattr(ControlChannel, "collect", collect)
        raise KeyboardInterrupt

    monkeypatch.setattr(ControlChannel, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        patient.reserve(KEYS, LENGTH, 7)
    assert open_reservations(lasting) == 0
    assert reserved(patient, KEYS[1])
    assert kept.traceback, "what is kept of the call keeps nothing reserved"


def test_what_another_thread_reads_for_a_caller_that_gave_up_is_not_held(
    patient: BlockSession, lasting: NodeProcess
) -> None:
    link = patient.writer.link()
    granted = Grants()
    link.reserve_later(Wants(KEYS, LENGTH), 7, granted)
    granted.close()
    assert link.control._out_of_step
    link.control._out_of_step = False  # so that the answer is read
    assert link.control.request(Op.STAT)["reserved"] == len(KEYS)
    assert not link.held.reserved
    link.control.doubt()
    assert link.control.request(Op.STAT)["reserved"] == 0


def test_a_reservation_that_nobody_has_is_given_back_for_a_client_that_asks_nothing(
    lasting: NodeProcess, patient: BlockSession
) -> None:
    view = memoryview(reserved(patient, KEYS[2]).buffer)[10:20]
    time.sleep(3 * EVERY_S)
    assert open_reservations(lasting) == 1, "somebody can write to it"
    view.release()
    wait_until(lambda: open_reservations(lasting) == 0, "it is given back", FREE_WITHIN_S)


def test_memory_that_somebody_can_write_to_outlives_its_client(lasting: NodeProcess) -> None:
    with closing(BlockSession(**lasting.client_options)) as session:
        view = memoryview(reserved(session, KEYS[3]).buffer)[10:20]
    time.sleep(3 * EVERY_S)
    assert open_reservations(lasting) == 1
    view[:] = bytes(10)
    view.release()
    wait_until(lambda: open_reservations(lasting) == 0, "it is given back", FREE_WITHIN_S)


def test_a_record_that_a_dead_node_left_keeps_nobody_from_saving_elsewhere(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """No other node can replace the record: without a save it would be a miss for ever."""
    listens = {"options": ("--listen", "127.0.0.1:0"), "environment": {"KVSTORE_SECRET": SECRET}}
    with (
        NodeProcess(redis_server, **listens) as dies,
        NodeProcess(redis_server, key_prefix=dies.key_prefix, **listens) as lives,
    ):
        with closing(BlockSession(**dies.client_options)) as neighbour:
            slot = reserved(neighbour, KEYS[0])
            slot.buffer[:] = bytes(LENGTH)
            assert all(neighbour.commit([slot]))
        word = dies.directory.announcement()
        assert word is not None
        dies.kill()
        away = {**dies.client_options, "run_dir": tmp_path}
        with closing(
            BlockSession(**away, security=StreamSecurity(secret=SECRET.encode()))
        ) as session:
            # What comes about by itself when its heartbeats are over.
            redis_server.admin().delete(f"{dies.key_prefix}:node:{word.node_id:016x}")
            wait_until(lambda: not session.match([KEYS[0]]), "the node is known to be gone")
            slot = reserved(session, KEYS[0])
            slot.buffer[:] = bytes(LENGTH)
            assert all(session.commit([slot]))
            wait_until(lambda: session.match([KEYS[0]]), "it is there again")
            assert session.view(session.match([KEYS[0]])[0])
        assert open_reservations(lives) == 0


def test_the_lease_of_a_dead_node_is_kept_until_no_answer_of_it_can_be_taken(
    mortal: NodeProcess, session: BlockSession
) -> None:
    """A grant that came before the node died is taken by whoever waits for it."""
    (writer,) = session.writer.writers()
    link = writer.link()
    assert link.control.request(Op.STAT)
    leases = list(mortal.directory.leases.iterdir())
    retire, seen = link.retire, []

    def retire_late() -> None:
        writer.settle()  # as another thread that gives something of its own back at this moment
        seen.append(list(mortal.directory.leases.iterdir()))
        retire()

    link.retire = retire_late  # type: ignore[method-assign]
    mortal.kill()
    wait_until(lambda: session.writer.no_node() is not None, "the client lets go of the dead node")
    assert seen == [leases]


def test_what_is_held_can_be_said_while_another_thread_unpins() -> None:
    held = Holdings()

    class Unpinning:
        """A pin, in the place of a reference to one: to look at it ends it."""

        @property
        def handle(self) -> tuple[int, int]:
            held.pins.discard(self)  # type: ignore[arg-type]
            return (id(self), 1)

    held.pins = {Unpinning() for _ in range(3)}  # type: ignore[misc]
    _, pinned = held.said()
    assert len(pinned) == 3


def test_a_slot_that_reaches_out_of_the_segment_is_granted_to_nobody(
    patient: BlockSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view of it would be shorter than the block, and what follows another's memory."""
    last = len(patient.writer.link().memory.shm.payload) - LENGTH
    monkeypatch.setattr(link_module, "grants", lambda count, raw: [[0, 1, last]])
    assert len(reserved(patient, KEYS[0]).buffer) == LENGTH
    monkeypatch.setattr(link_module, "grants", lambda count, raw: [[0, 1, last + 1]])
    with pytest.raises(NodeUnavailableError):
        reserved(patient, KEYS[1])
