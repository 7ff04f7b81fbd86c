"""A node and clients on its host and on another one (two_hosts.py), and a reader without either
(reader_parts.py)."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from reader_parts import Nodes, ReaderOf, Remote, readable
from redis_servers import RedisServer
from stores import NodeProcess
from two_hosts import client_of, listening_node

from kvstore import Client
from kvstore.client.reader import Reader
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm


@pytest.fixture(scope="module")
def lasting(redis_server: RedisServer) -> Iterator[NodeProcess]:
    """A node that clients with another run directory can only reach by a stream."""
    with listening_node(redis_server) as process:
        yield process


@pytest.fixture
def far(lasting: NodeProcess) -> NodeProcess:
    """The same with nobody else's blocks in it."""
    with client_of(lasting) as client:
        client.session.writer.clear(client.namespace.id)
    return lasting


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """The run directory of another host."""
    with tempfile.TemporaryDirectory(prefix="kve-") as directory:
        yield Path(directory)


@pytest.fixture
def writer(far: NodeProcess) -> Iterator[Client]:
    """On the node's host."""
    with client_of(far) as client:
        yield client


@pytest.fixture
def reader(far: NodeProcess, elsewhere: Path) -> Iterator[Client]:
    """On another one."""
    with client_of(far, elsewhere) as client:
        yield client


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedShm]:
    segment = OwnedShm(tmp_path / "s", Superblock(7, 1, 0, 128 << 10))
    yield segment
    segment.close()


@pytest.fixture
def nodes(owned: OwnedShm) -> Nodes:
    return Nodes(owned)


@pytest.fixture
def reader_of(nodes: Nodes) -> ReaderOf:
    def made(index: object, remote: object = None, **options: object) -> Reader:
        return Reader(index, readable(nodes, remote or Remote()), **options)  # type: ignore[arg-type]

    return made
