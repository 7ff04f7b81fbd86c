"""The process beside a node, played by this one: how it ends. With NIXL: test_nixl_peers.py."""

import threading
import time

from stores import announcement

from kvstore.errors import DeadlineError, NodeUnavailableError
from kvstore.node import nixl_sidecar
from kvstore.node.nixl_sidecar import NixlSidecar

PATIENCE_S = 20.0


class Process:
    """One that takes as long to start as it is let."""

    made = None
    starting = threading.Event()
    may_start = threading.Event()
    pid = 1

    def __init__(self, *_):
        Process.made = self
        self.killed = threading.Event()
        self.starting.set()
        assert self.may_start.wait(PATIENCE_S)

    def ready(self, deadline):
        if not self.killed.wait(deadline - time.monotonic()):
            raise DeadlineError("it did not start in time")
        raise NodeUnavailableError("it was killed")

    def kill(self):
        self.killed.set()


def test_a_process_that_starts_while_the_node_stops_is_killed(monkeypatch):
    monkeypatch.setattr(nixl_sidecar, "NixlProcess", Process)
    sidecar = NixlSidecar(announcement(), "read-only")
    sidecar.start()
    assert Process.starting.wait(PATIENCE_S)
    stopping = threading.Thread(target=sidecar.stop)
    stopping.start()
    assert sidecar._stopping.wait(PATIENCE_S)
    Process.may_start.set()
    stopping.join()
    assert Process.made.killed.is_set()
    assert not sidecar._thread.is_alive()
