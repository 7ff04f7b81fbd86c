"""A producer with a pool in VRAM over the model of a device, and who reads from it."""

import pytest
from stores import NodeThread
from vram_producer import Producer

from kvstore.spi import BlockSession
from kvstore.testing.cuda import ModelCuda

MIB = 1 << 20


@pytest.fixture
def node(redis_server):
    with NodeThread(redis_server, size_bytes=64 * MIB) as memory:
        yield memory


@pytest.fixture
def model_dir(tmp_path):
    return tmp_path


@pytest.fixture
def producer(node, model_dir):
    producer = Producer(node.client_options, model_dir, 2 * MIB)
    yield producer
    producer.device.hold.set()
    producer.close()


@pytest.fixture
def device(model_dir):
    """The device as a consumer's process sees it."""
    return ModelCuda(model_dir)


@pytest.fixture
def consumer(node, device):
    session = BlockSession(**node.client_options, device=device)
    yield session
    session.close()
