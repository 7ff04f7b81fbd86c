"""The channel to a node, to one that does not answer."""

import socket
import time

import pytest

from kvstore.client.control import PROBE_TIMEOUT_S, ControlChannel
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
