"""A node that gets no processor is told from one that is stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from stores import NodeProcess

from kvstore import BlockSession, Client, DeadlineError, Reservation
from kvstore.client.local import control
from kvstore.client.local.control import ControlChannel, Ticket
from kvstore.client.local.starved import processor_wanted_s
from kvstore.errors import PeerError
from kvstore.limits import Limits
from kvstore.testing.stopping import stop
from kvstore.types import PutStatus

PEER = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print(flush=True)
while True:
    pass
"""


@pytest.fixture
def busy_peer(tmp_path: Path) -> Iterator[tuple[int, socket.socket]]:
    path = tmp_path / "s"
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, str(path)], stdout=subprocess.PIPE, preexec_fn=_nice
    )
    assert process.stdout is not None
    process.stdout.readline()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        yield process.pid, connection
    process.kill()
    process.wait()
    process.stdout.close()


def _nice() -> None:
    os.nice(19)


def test_what_runs_or_stands_in_line_wants_the_processor_and_what_is_stopped_does_not(
    busy_peer: tuple[int, socket.socket],
) -> None:
    pid, connection = busy_peer
    before = processor_wanted_s(connection)
    if before is None:
        pytest.skip("this kernel does not tell how long a process waits for a processor")
    deadline = time.monotonic() + 10
    while (processor_wanted_s(connection) or 0.0) < before + 0.1:
        assert time.monotonic() < deadline
    stop(pid)
    stopped_at = processor_wanted_s(connection)
    time.sleep(0.2)
    assert processor_wanted_s(connection) == stopped_at


def test_of_a_peer_that_cannot_be_seen_nothing_is_told() -> None:
    with socket.socket(socket.AF_UNIX) as nobody:
        assert processor_wanted_s(nobody) is None


def test_a_first_put_waits_for_a_node_that_is_late_because_it_is_starved(
    redis_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers after twice the deadline; what the kernel says of it is played."""
    wanted = iter(range(1, 1000))
    monkeypatch.setattr(control, "processor_wanted_s", lambda _: float(next(wanted)))
    with NodeProcess(redis_server) as node:
        limits = Limits(redis_timeout_s=5.0, request_timeout_s=1.0)
        with Client(**{**node.client_options, "limits": limits}) as client:
            node.signal(signal.SIGSTOP)
            child = subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {node.process.pid}"])
            try:
                assert client.put("k", b"v").status is PutStatus.STORED
            finally:
                child.wait()


@pytest.mark.parametrize("patient", [False, True])
def test_a_patient_session_waits_for_every_answer_of_a_starved_node(
    redis_server, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """Also for one after the first, which others wait for until their deadline."""
    wanted = iter(range(1, 1000))
    with NodeProcess(redis_server) as node:
        limits = Limits(redis_timeout_s=5.0, request_timeout_s=1.0)
        options = {**node.client_options, "limits": limits}
        with closing(BlockSession(**options, patient=patient)) as session:
            assert session.pin([b"?" * 32]) == [None]
            monkeypatch.setattr(control, "processor_wanted_s", lambda _: float(next(wanted)))
            node.signal(signal.SIGSTOP)
            child = subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {node.process.pid}"])
            try:
                if patient:
                    assert isinstance(session.reserve([b"k" * 32], 100, 0)[0], Reservation)
                else:
                    with pytest.raises(DeadlineError):
                        session.reserve([b"k" * 32], 100, 0)
            finally:
                child.wait()


@pytest.mark.parametrize("call", ["put", "replace", "pin"])
def test_a_node_that_is_stopped_costs_a_new_client_no_more_than_its_deadline(
    redis_server, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is looked at before: what stood still until the deadline is not waited for beyond it."""
    put_off: list[float] = []
    receive = ControlChannel._receive

    def noted(channel: ControlChannel, ticket: Ticket, *, patient: bool = True) -> None:
        due_at = ticket.give_up_at
        try:
            receive(channel, ticket, patient=patient)
        finally:
            put_off.append(ticket.give_up_at - due_at)

    with NodeProcess(redis_server) as node:
        limits = Limits(redis_timeout_s=5.0, request_timeout_s=0.6)
        with closing(Client(**{**node.client_options, "limits": limits})) as client:
            monkeypatch.setattr(ControlChannel, "_receive", noted)
            node.signal(signal.SIGSTOP)
            if call == "pin":
                with pytest.raises(PeerError):
                    client.pin("k")
            else:
                result = client.put("k", b"v", replace=call == "replace")
                assert result.status is PutStatus.REJECTED
            node.signal(signal.SIGCONT)
    assert put_off == [0.0]
