"""Replicas of one host that share a store find what one engine would find that had all requests."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.serving.scenarios import SCENARIOS
from benchmarks.serving.sessions import sessions
from benchmarks.suites import replicas


def test_requests_of_a_session_go_to_the_engines_in_turn() -> None:
    (session,) = sessions(None, count=1, requests_max=8, seed=7)
    engines = [SCENARIOS["replicas"].engine_of(request, 2, seed=1) for request in session]
    assert engines == [request.number % 2 for request in session]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_replicas_find_in_the_store_what_one_engine_with_all_requests_finds() -> None:
    options = Namespace(sessions=None, replicas=4, count=4, live=2)
    one, own, unlimited, stored = replicas.run(options)[1]
    assert (one["engines"], own["engines"], stored["store"]) == (1, 4, "kvstore")
    assert stored["of_one_engine"] >= 0.98
    assert stored["wrong"] == 0
    assert max(own["of_one_engine"], unlimited["of_one_engine"]) < 0.9, "pools are private"
