"""Ctrl-C in a call to a node of another host comes out of it, and costs that node nothing."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

import pytest
from signal_handlers import handling, raising, signals_in

from kvstore import Client
from kvstore.system import tcp
from kvstore.transport.stream.channel import Channel


def get(client: Client) -> None:
    client.get("there")


def put(client: Client) -> None:
    assert client.put(os.urandom(8).hex(), b"v")


READS = [(Channel, "_limit"), (Channel, "quiet"), (select, "poll"), (tcp, "addresses")]
SAVES = [(Channel, "_limit")]


@pytest.mark.parametrize(
    ("call", "owner", "name"),
    [(get, *where) for where in READS] + [(put, *where) for where in SAVES],
)
def test_an_interruption_costs_a_node_of_another_host_nothing(
    writer: Client,
    reader: Client,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Client], None],
    owner: object,
    name: str,
) -> None:
    assert writer.put("there", b"there")
    if owner is not tcp:  # of the first connection
        assert reader.get("there") == b"there"
    with monkeypatch.context() as patched:
        signals_in(patched, owner, name)
        with handling(raising(KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
            call(reader)
    assert reader.get("there") == b"there"
    put(reader)
