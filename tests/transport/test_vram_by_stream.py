"""The contract suite over streams from a node in VRAM, and what such a node refuses."""

import os
import time

import pytest
from contract.transport import TransportContract, reads
from vram_parts import StreamedVram

from kvstore.segment import cuda
from kvstore.testing.cuda import ModelCuda
from kvstore.transport.base import Read
from kvstore.transport.cuda_memory import NAME as CUDA_IPC
from kvstore.transport.cuda_memory import DeviceAddress
from kvstore.transport.stream.requests import SavePayload, put
from kvstore.transport.stream.transport import NAME as STREAM
from kvstore.types import Kind, PutStatus

PATIENCE_S = 20.0


@pytest.fixture
def device(tmp_path):
    (tmp_path / "model").mkdir()
    return ModelCuda(tmp_path / "model")


@pytest.fixture
def place(tmp_path, device):
    place = StreamedVram(tmp_path, device)
    yield place
    place.close()


class TestVramByStream(TransportContract):
    @pytest.fixture
    def place(self, tmp_path, device):
        place = StreamedVram(tmp_path, device)
        yield place
        place.close()


def test_it_is_announced_to_other_hosts_without_the_way_to_its_memory(place):
    there, here = place.node.announcement.transports, place.word.transports
    assert there == {CUDA_IPC: place.device.uuid, STREAM: here[STREAM]}
    assert DeviceAddress.parse(here[CUDA_IPC]) is not None


def test_it_takes_no_saves_from_other_hosts(place):
    payload = memoryview(b"p" * 1000)
    offered = [SavePayload(os.urandom(32), (payload,), Kind.BLOCK, 0)]
    deadline = time.monotonic() + PATIENCE_S
    (result,) = put(place.transport, place.word, offered, (7, b""), deadline, answer_by=deadline)
    assert result.status is PutStatus.REJECTED
    assert "device" in result.reason
    block = place.save(b"1" * 100_000)
    assert reads(place.read(block)[0]) == [Read.HIT], "the connection goes on"


def test_a_device_that_hangs_fails_reads_in_time_and_no_others_wait_for_it(place, monkeypatch):
    block = place.save(b"1" * 100_000)
    assert reads(place.read(block)[0]) == [Read.HIT]
    monkeypatch.setattr(cuda, "CUDA_IPC_DRAIN_S", 0.1)
    place.device.hold.clear()
    began = time.monotonic()
    assert reads(place.read(block, timeout_s=5.0)[0]) == [Read.FAILED]
    assert reads(place.read(block, timeout_s=5.0)[0]) == [Read.FAILED]
    assert time.monotonic() - began < 5.0
