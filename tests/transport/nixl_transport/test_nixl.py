"""Reading through NIXL, between real processes: this one's reader and the node's sidecar."""

import threading

import pytest
from contract.transport import TransportContract
from nixl_places import NixlPlace, needs_nixl, nixl_transport, same_host
from redis_servers import wait_until
from stores import announcement

from kvstore.transport.nixl.transport import NAME as NIXL
from kvstore.transport.stream.transport import NAME as STREAM

pytestmark = needs_nixl


@pytest.fixture(scope="module", autouse=True)
def on_same_host():
    with same_host():
        yield


@pytest.fixture(scope="module")
def shared(on_same_host, tmp_path_factory):
    """Starting both processes takes seconds: one place for all tests that leave it whole."""
    place = NixlPlace(tmp_path_factory.mktemp("run"))
    yield place
    place.close()


@pytest.fixture
def own(tmp_path):
    place = NixlPlace(tmp_path)
    yield place
    place.close()


class TestNixl(TransportContract):
    @pytest.fixture
    def place(self, request):
        ends = {
            "test_a_node_that_has_ended_is_no_exception",
            "test_after_close_everything_fails",
            "test_a_read_ends_when_another_thread_closes",
        }
        place = request.getfixturevalue("own" if request.node.name in ends else "shared")
        yield place
        if place.node.announcement is not None and request.node.name not in ends:
            place.tidy()


def test_a_host_without_threads_to_give_tries_it_again_later(monkeypatch):
    word = announcement(transports={NIXL: "", STREAM: "tcp://there:7400"})
    transport = nixl_transport()
    monkeypatch.setattr("kvstore.transport.nixl.transport.PEER_RETRY_AFTER_S", 0.01)
    tried = threading.Event()
    monkeypatch.setattr(transport, "_prove", lambda peer, node: tried.set())

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not transport.ready(word)
    wait_until(lambda: transport.ready(word) or tried.is_set(), "it is tried")
    transport.close()
