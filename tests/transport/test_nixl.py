"""Reading through NIXL, between real processes: this one's reader and the node's sidecar."""

import pytest
from contract.transport import TransportContract
from nixl_places import NixlPlace, needs_nixl, same_host

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
        ends = {"test_a_node_that_has_ended_is_no_exception", "test_after_close_everything_fails"}
        place = request.getfixturevalue("own" if request.node.name in ends else "shared")
        yield place
        if place.node.announcement is not None and request.node.name not in ends:
            place.tidy()
