"""A process that was forked from one that reads from other hosts."""

import os

from own_python import holds_in_child
from redis_servers import RedisServer
from stores import NodeProcess
from two_hosts import client_of, listening_node

from kvstore import Client

VALUE = os.urandom(1000)


def sockets(client: Client) -> set[tuple[str, int]]:
    """This end of each connection that it keeps to nodes of other hosts."""
    pools = client.session.remote.stream._pools.values()
    return {channel._socket.getsockname() for pool in pools for channel in pool._idle}


def test_a_child_reads_over_connections_of_its_own(writer: Client, reader: Client) -> None:
    """A reply does not name its blocks: on a connection that two processes read from, it would be
    whoever's reads first."""
    assert writer.put("k", VALUE)
    assert reader.get("k") == VALUE
    ours = sockets(reader)
    assert ours
    assert holds_in_child(lambda: reader.get("k") == VALUE and sockets(reader).isdisjoint(ours))
    assert sockets(reader) == ours, "the parent still has its own"
    assert reader.get("k") == VALUE


def test_a_child_that_closes_its_client_leaves_the_parents_connections(
    writer: Client, reader: Client
) -> None:
    assert writer.put("k", VALUE)
    assert reader.get("k") == VALUE
    ours = sockets(reader)
    (pool,) = reader.session.remote.stream._pools.values()
    assert holds_in_child(lambda: reader.close() is None)
    assert all(channel.quiet() for channel in pool._idle)
    assert reader.get("k") == VALUE
    assert sockets(reader) == ours


def test_a_child_reads_from_several_nodes_at_once(
    redis_server: RedisServer, far: NodeProcess, writer: Client, reader: Client
) -> None:
    """For which it needs threads: the parent's did not come along."""
    with (
        listening_node(redis_server, key_prefix=far.key_prefix) as second,
        client_of(second) as another,
    ):
        values = {"here": os.urandom(1000), "there": os.urandom(1000)}
        assert writer.put("here", values["here"])
        assert another.put("there", values["there"])

        def reads_both() -> bool:
            return reader.get_many(list(values)) == list(values.values())

        assert reads_both()
        assert holds_in_child(reads_both)
        assert reads_both()
