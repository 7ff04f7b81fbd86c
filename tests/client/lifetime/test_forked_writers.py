"""A writer that forks: what it holds ends with it, and its children write to none of it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest
from redis_servers import wait_until
from stores import NodeProcess
from warm_processes import WarmProcess

from kvstore import PutStatus
from kvstore.client.base import Reservation
from kvstore.spi import BlockSession

KEY = b"k" * 32
LENGTH = 100_000


def reserve_and_fork(options: dict) -> None:
    """Reserve `KEY`, say the number of a child that waits, and wait."""
    session = BlockSession(**options)
    (slot,) = session.reserve([KEY], LENGTH, 1)
    assert isinstance(slot, Reservation)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    print(child, flush=True)
    signal.pause()


@pytest.fixture
def session(node: NodeProcess) -> Iterator[BlockSession]:
    with closing(BlockSession(**node.client_options)) as session:
        yield session


def test_the_keys_of_a_killed_writer_are_free_although_a_child_of_it_lives(node, session):
    writer = WarmProcess(reserve_and_fork, node.client_options, stdout=subprocess.PIPE)
    child = int(writer.stdout.readline())
    try:
        (busy,) = session.reserve([KEY], LENGTH, 1)
        assert busy.status is PutStatus.IN_PROGRESS
        writer.kill()
        writer.wait(10)
        granted = []

        def free() -> bool:
            (answer,) = session.reserve([KEY], LENGTH, 1)
            granted.append(answer)
            return isinstance(answer, Reservation)

        wait_until(free, "the key is free")
        os.kill(child, 0)
        session.abort([granted[-1]])
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_cannot_write_to_a_slot_of_its_parents_and_the_parent_still_can(session):
    """Also when it is given back to nobody and the client is closed: the buffer keeps it mapped."""
    (slot,) = session.reserve([KEY], LENGTH, 1)
    slot.buffer[:] = b"p" * LENGTH
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        if slot.buffer[0] == ord("p"):
            slot.buffer[0] = ord("c")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    slot.buffer[1] = ord("q")
    assert bytes(slot.buffer[:3]) == b"pqp"
    assert [result.status for result in session.commit([slot])] == [PutStatus.STORED]
