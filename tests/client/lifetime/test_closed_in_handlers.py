"""A handler of signals closes the client in the middle of what it interrupts: nothing hangs."""

import contextlib
import signal

import pytest
from own_python import holds_in_child
from redis_servers import wait_until
from stores import node_stats

from kvstore import Client, KVStoreError
from kvstore.client.nodes.control import ControlChannel
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.saving.link import NodeLink
from kvstore.client.nodes.saving.writer import Writer


def put(client: Client) -> None:
    client.put("j", b"2" * 100_000)


def get(client: Client) -> None:
    client.get("k")


def unpin(client: Client) -> None:
    client.pin("k").close()


POINTS = {
    "the search for nodes": (NodeDirectory, "writables", put),
    "a new link": (Writer, "_joined", put),
    "a new mapping": (NodeDirectory, "_add", get),
    "the end of a pin": (NodeLink, "give_up", unpin),
    "its end over the connection": (ControlChannel, "_send", unpin),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_handler_that_closes_the_client_ends_and_so_does_what_it_interrupts(node, point):
    """In a process of its own: what hangs there hangs nobody here."""
    owner, name, call = POINTS[point]
    with Client(**node.client_options) as first:
        first.put("k", b"1" * 100_000)
    assert holds_in_child(lambda: closed_within(node, owner, name, call))
    with Client(**node.client_options) as other:
        wait_until(lambda: node_stats(other)["pinned"] == 0, "its pins are gone")


def closed_within(node, owner: type, name: str, call) -> bool:
    """Whether the client was closed in the middle, and has no link left."""
    client = Client(**node.client_options)
    signal.signal(signal.SIGUSR1, lambda *_: client.close())
    real, called = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        result = real(*args, **kwargs)
        if not called:
            called.append(name)
            signal.raise_signal(signal.SIGUSR1)
        return result

    static = isinstance(vars(owner)[name], staticmethod)
    setattr(owner, name, staticmethod(interrupted) if static else interrupted)
    with contextlib.suppress(KVStoreError):  # "this client is closed"
        call(client)
    return bool(called) and not client.session.writer.links() and not client.session.nodes.mapped
