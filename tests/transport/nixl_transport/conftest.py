"""The places that tests of this folder read through NIXL; a module's `PLACE` says of which kind."""

import pytest
from nixl_places import same_host

ENDED = {
    "test_a_node_that_has_ended_is_no_exception",
    "test_after_close_everything_fails",
    "test_a_read_ends_when_another_thread_closes",
}
"""Tests of the contract that leave no place to go on with."""


@pytest.fixture(scope="module", autouse=True)
def on_same_host():
    with same_host():
        yield


@pytest.fixture(scope="module")
def shared(request, on_same_host, tmp_path_factory):
    """Starting both processes takes seconds: one place for all tests that leave it whole."""
    place = request.module.PLACE(tmp_path_factory.mktemp("run"))
    yield place
    place.close()


@pytest.fixture
def own(request, on_same_host, tmp_path):
    place = request.module.PLACE(tmp_path)
    yield place
    place.close()


@pytest.fixture
def nixl_place(request):
    ends = request.node.name in ENDED
    place = request.getfixturevalue("own" if ends else "shared")
    yield place
    if place.node.announcement is not None and not ends:
        place.tidy()
