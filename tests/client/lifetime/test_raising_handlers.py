"""A handler of signals raises in a call of a client: Ctrl-C comes out of it as it is; what is an
`Exception` may end as a miss or a rejected put, as a failure of the peer would. Either way nothing
stays held, and the client works on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import pytest
from redis_servers import wait_until
from signal_handlers import ERRORS, handling, raising, signals_in
from stores import NodeProcess  # noqa: TC002

from kvstore import Client
from kvstore.client.nodes.control import ControlChannel
from kvstore.client.nodes.saving.link import NodeLink
from kvstore.client.nodes.saving.writer import Writer
from kvstore.index.redis.connection import Link
from kvstore.types import Value

VALUE = os.urandom(100_000)


def get(client: Client) -> Value:
    return client.get("not there")


def put(client: Client) -> object:
    return client.put(os.urandom(8).hex(), VALUE)


def pin(client: Client) -> object:
    return client.pin("there")


POINTS = [
    (Link, "_replies", get),
    (ControlChannel, "_messages", put),
    (ControlChannel, "_accept", put),
    (ControlChannel, "_accept", pin),
    (NodeLink, "_granted", put),
    (Writer, "_pinned", pin),
]


@pytest.mark.parametrize("error", [KeyboardInterrupt, *ERRORS])
@pytest.mark.parametrize(
    ("owner", "name", "call"), POINTS, ids=[f"{n}-{c.__name__}" for _, n, c in POINTS]
)
def test_what_a_handler_raises_leaves_nothing_held_and_a_client_that_works(
    node: NodeProcess,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    call: Callable[[Client], object],
    error: type[BaseException],
) -> None:
    with Client(**node.client_options) as client, Client(**node.client_options) as other:
        assert client.put("there", VALUE)
        with monkeypatch.context() as patched, handling(raising(error)):
            signals_in(patched, owner, name)
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    call(client)
            else:
                with suppress(Exception):
                    call(client)
        if error is KeyboardInterrupt:
            assert client.stats()["client"]["index_failures"] == 0
            assert put(client), "the node is asked again at once"
        held = lambda: [other.stats()["node"][what] for what in ("reserved", "pinned")]  # noqa: E731
        wait_until(lambda: held() == [0, 0], "nothing is held", 10.0)
        wait_until(lambda: bool(put(client)), "the client works on", 10.0)
