"""Blocks in VRAM of another host: found in the index, and pulled by stream or through NIXL. The
other host is another run directory; Redis, processes and NIXL's agents are real."""

import multiprocessing
import tempfile
from pathlib import Path

import pytest
from contract.transport import SECURITY
from nixl_places import needs_nixl, same_host
from redis_servers import wait_until
from vram_producer import (
    BLOCK_BYTES,
    NAMESPACE,
    PATIENCE_S,
    Producer,
    found_of,
    host_bytes,
    key_of,
    payload_of,
)

from kvstore import Limits
from kvstore.client.nodes.saving.remote_writer import NOBODY
from kvstore.node import NodeConfig
from kvstore.spi import BlockSession, NodeUnavailableError
from kvstore.testing.cuda import ModelCuda

MIB = 1 << 20
spawn = multiprocessing.get_context("spawn")
PATIENT = Limits(stream_timeout_s=10.0)


def like(run_dir, nixl: str = "") -> NodeConfig:
    listens = {"listen": ("127.0.0.1", 0), "security": SECURITY, "nixl": nixl}
    return NodeConfig(run_dir=run_dir, **listens)


def elsewhere(node, run_dir, **options) -> BlockSession:
    """A client on another host."""
    given = {**node.client_options, "run_dir": run_dir, "security": SECURITY, "limits": PATIENT}
    return BlockSession(**given, **options)


@pytest.fixture
def far(node):
    with tempfile.TemporaryDirectory(prefix="kve-") as run_dir:
        session = elsewhere(node, Path(run_dir))
        yield session
        session.close()


@pytest.fixture
def far_with_device(node, tmp_path):
    """Whose own host has VRAM of its own, which says nothing of this one's."""
    (tmp_path / "far").mkdir()
    with tempfile.TemporaryDirectory(prefix="kve-") as run_dir:
        session = elsewhere(node, Path(run_dir), device=ModelCuda(tmp_path / "far"))
        yield session
        session.close()


@pytest.fixture
def producer(node, model_dir):
    producer = Producer(node.client_options, model_dir, 2 * MIB, like=like(node.run_dir))
    yield producer
    producer.close()


@pytest.mark.parametrize("reader", ["far", "far_with_device"])
def test_blocks_of_another_host_are_found_and_come_by_stream(producer, reader, request):
    session = request.getfixturevalue(reader)
    assert producer.save(0, 1, 2) == ["vram"] * 3
    found = found_of(session, [0, 1, 2])
    assert host_bytes(session, found) == [payload_of(n) for n in range(3)]
    assert session.remote.counts["stream_bytes"] == 3 * BLOCK_BYTES
    places = [session.reader.remote_location(one.key, one.record) for one in found]
    there = session.remote.there([(one.key, at) for one, at in zip(found, places, strict=True)])
    assert there == [True] * 3


def test_who_does_not_listen_is_out_of_reach(node, model_dir, far):
    producer = Producer(node.client_options, model_dir, 2 * MIB)
    producer.save(0)
    assert found_of(far, [0]) == [None]
    producer.close()


def test_saves_from_another_host_find_no_slot_there(producer, far):
    """A node in VRAM is not asked, and there is no other."""
    producer.save(0)
    assert host_bytes(far, found_of(far, [0])) == [payload_of(0)], "it can be reached"
    with pytest.raises(NodeUnavailableError, match=NOBODY):
        far.commit(far.reserve([key_of(1)], BLOCK_BYTES, NAMESPACE))


def listening(options, model_dir: str, run_dir: str, pipe) -> None:
    config = like(Path(run_dir), "read-only")
    producer = Producer({**options, "verify": "always"}, Path(model_dir), 2 * MIB, like=config)
    pipe.send(producer.save(*range(5)))
    pipe.recv()


@needs_nixl
def test_checked_blocks_come_through_nixl_and_a_killed_owner_is_a_miss(node, model_dir, far):
    pipe, theirs = spawn.Pipe()
    with same_host():
        arguments = (node.client_options, str(model_dir), str(node.run_dir), theirs)
        process = spawn.Process(target=listening, args=arguments, daemon=True)
        process.start()
        assert pipe.poll(PATIENCE_S)
        assert pipe.recv() == ["vram"] * 5

        def read() -> bool:
            """Whichever way: by stream until NIXL has proved itself."""
            found = found_of(far, range(5))
            if None in found:  # on a busy machine a node may be late, and is left alone for a while
                return False
            for n, data in enumerate(host_bytes(far, found)):
                assert data in (None, payload_of(n))
            return far.remote.counts["nixl_hits"] >= 5

        wait_until(read, "they come through NIXL", PATIENCE_S)
        process.kill()
        process.join(PATIENCE_S)
        wait_until(lambda: found_of(far, range(5)) == [None] * 5, "they are misses", PATIENCE_S)
