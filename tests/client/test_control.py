"""The channel to a node, to one that does not answer."""

import contextlib
import socket
import threading
import time

import msgpack
import pytest

from kvstore.client.control import PROBE_TIMEOUT_S, ControlChannel
from kvstore.core import wire
from kvstore.core.wire import Op
from kvstore.errors import DeadlineError, NodeUnavailableError
from kvstore.nodedir import NodeDir

TIMEOUT_S = 60.0


@pytest.fixture
def channel(tmp_path):
    """To a stopped node: the kernel takes connections, and nobody answers."""
    directory = NodeDir(tmp_path, "node")
    directory.leases.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory.socket))
        server.listen(8)
        channel = ControlChannel(directory, (1, 1), TIMEOUT_S, lambda: ((), ()))
        yield channel
        channel.close()


def test_asking_whether_a_stopped_node_answers_again_costs_no_whole_deadline(channel):
    channel._breaker.failed(time.monotonic() - TIMEOUT_S)
    begun = time.monotonic()
    with pytest.raises(DeadlineError):
        channel.request(Op.STAT)
    assert PROBE_TIMEOUT_S <= time.monotonic() - begun < TIMEOUT_S / 2
    with pytest.raises(NodeUnavailableError, match="did not answer lately"):
        channel.request(Op.STAT)


def test_who_reads_nonsense_for_another_ends_that_ones_wait_too(tmp_path):
    directory = NodeDir(tmp_path, "node")
    directory.leases.mkdir(parents=True)

    def nonsense(body):
        raise ValueError("no sense")

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory.socket))
        server.listen(8)
        channel = ControlChannel(directory, (1, 1), TIMEOUT_S, lambda: ((), ()))
        threading.Thread(target=answer_all, args=(server,), daemon=True).start()
        first = channel.post(Op.STAT, accept=nonsense)
        second = channel.post(Op.STAT)
        for ticket in (second, first):
            with pytest.raises(NodeUnavailableError):
                channel.collect(ticket)
        channel.close()


def answer_all(server):
    connection, _ = server.accept()
    unpacker = msgpack.Unpacker()
    with connection, contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            unpacker.feed(data)
            for op, request, *_ in unpacker:
                connection.sendall(wire.packed([request, True, [1, 1] if op == Op.HELLO else None]))
