"""The first answer of a node of this host: clients start together, on a machine that is busy."""

from __future__ import annotations

import signal
import threading
import time

import pytest  # noqa: TC002  # as in every other test
from redis_servers import RedisServer  # noqa: TC002  # as in every other test
from stores import NodeProcess

from kvstore import Client, PutStatus
from kvstore.client.nodes import control
from kvstore.limits import Limits

TIMEOUT_S = 0.5


def client_of(node: NodeProcess) -> Client:
    limits = Limits(redis_timeout_s=5.0, request_timeout_s=TIMEOUT_S)
    return Client(**{**node.client_options, "limits": limits})


def test_a_first_put_is_stored_where_the_node_takes_longer_than_a_request_may(
    redis_server: RedisServer,
) -> None:
    with NodeProcess(redis_server) as node, client_of(node) as client:
        node.signal(signal.SIGSTOP)
        goes_on = threading.Timer(3 * TIMEOUT_S, node.signal, (signal.SIGCONT,))
        goes_on.start()
        try:
            assert client.put("k", b"v").status is PutStatus.STORED
        finally:
            goes_on.join()


def test_a_node_that_never_answers_costs_a_new_client_that_time_once(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FIRST_ANSWER_TIMEOUT_S", 2 * TIMEOUT_S)
    given: list[float] = []
    connect = control.ControlChannel._connect

    def noted(channel: control.ControlChannel, give_up_at: float) -> None:
        given.append(give_up_at - time.monotonic())
        connect(channel, give_up_at)

    with NodeProcess(redis_server) as node, client_of(node) as client:
        monkeypatch.setattr(control.ControlChannel, "_connect", noted)
        node.signal(signal.SIGSTOP)
        for _ in range(2):
            assert client.put("k", b"v").status is PutStatus.REJECTED
            time.sleep(control.REOPEN_AFTER_S)
        node.signal(signal.SIGCONT)
    first, *others = given
    assert TIMEOUT_S < first <= 2 * TIMEOUT_S
    assert others
    assert max(others) <= TIMEOUT_S
