"""Reading through NIXL, between real processes: this one's reader and the node's sidecar."""

import threading

import pytest
from contract.transport import TransportContract
from nixl_places import NixlPlace, needs_nixl, nixl_transport
from redis_servers import wait_until
from stores import announcement

from kvstore.transport.nixl.transport import NAME as NIXL
from kvstore.transport.stream.transport import NAME as STREAM

pytestmark = needs_nixl
PLACE = NixlPlace


class TestNixl(TransportContract):
    @pytest.fixture
    def place(self, nixl_place):
        return nixl_place


def test_a_host_without_threads_to_give_tries_it_again_later(monkeypatch):
    word = announcement(transports={NIXL: "", STREAM: "tcp://there:7400"})
    transport = nixl_transport()
    monkeypatch.setattr("kvstore.transport.proving.RETRY_AFTER_S", 0.01)
    tried = threading.Event()
    monkeypatch.setattr(transport, "_prove", lambda peer, node: tried.set())

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not transport.ready(word)
    wait_until(lambda: transport.ready(word) or tried.is_set(), "it is tried")
    transport.close()
