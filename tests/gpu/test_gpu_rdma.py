"""A node in VRAM of a real device, read through NIXL on the same host (UCX's own transports for
devices). Over a network: scripts/rdma-check."""

import os
import time

import pytest
from contract.cuda import get
from contract.transport import PATIENCE_S, SECURITY, TransportContract, reads
from cuda_python import cuda_bindings
from nixl_places import NixlPlace, NixlVramPlace, needs_nixl, same_host
from redis_servers import wait_until

from kvstore.client.nodes.saving.writer import Writer
from kvstore.cuda.base import DeviceRange
from kvstore.cuda.bindings import open_device
from kvstore.segment.layout import Layout
from kvstore.transport.base import Read, Wanted
from kvstore.transport.nixl.transport import NixlTransport
from kvstore.transport.stream.transport import StreamTransport

cuda_bindings("driver")
pytestmark = [pytest.mark.gpu, needs_nixl]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    device = open_device()
    with same_host() as patch:
        patch.setenv("UCX_TLS", "tcp,cma,self,cuda")
        place = NixlVramPlace(tmp_path_factory.mktemp("run"), device=device)
        yield place
        place.close()


class TestFromVramOfADevice(TransportContract):
    @pytest.fixture
    def place(self, request, shared):
        if "end" in request.node.name or "close" in request.node.name:
            pytest.skip("it ends the node; over the model: test_nixl_vram.py")
        yield shared
        shared.tidy()


def test_what_is_registered_is_vram(shared):
    way = shared.sidecar.way()
    assert way[6] == shared.device.ordinal
    payload = os.urandom(1 << 20)
    outcomes, (got,) = shared.read(shared.save(payload))
    assert reads(outcomes) == [Read.HIT]
    assert got == payload


def test_what_is_read_arrives_in_vram_and_nowhere_else(shared, tmp_path):
    """What `nixl_destination: vram` asks for; over the model: test_nixl_to_vram.py."""
    place = NixlPlace(tmp_path)
    transport = NixlTransport(StreamTransport(SECURITY), Layout, shared.device)
    writer = Writer(place.nodes, name=None, timeout_s=PATIENCE_S, checksums=True)
    place.writer.close()
    place.writer = writer
    try:
        wait_until(lambda: transport.ready(place.word), "it is read", 3 * PATIENCE_S)
        assert transport.to_vram, transport.why_not_to_vram
        sizes = [1, 4096, 1 << 20, 11 << 20]
        landing = shared.device.allocate(sum(sizes))
        for number, size in enumerate(sizes):
            payload = os.urandom(size)
            at = DeviceRange(landing + sum(sizes[:number]), size, shared.device.ordinal)
            into = memoryview(bytearray(size))
            wanted = Wanted(*place.save(payload), (into,), at)
            (outcome,) = transport.read(place.word, [wanted], time.monotonic() + PATIENCE_S)
            assert (outcome.read, outcome.in_vram) == (Read.HIT, True), outcome.reason
            assert get(shared.device, at.address, size) == payload
            assert into == bytes(size)
    finally:
        transport.close()
        place.close()
