"""Reading a node in VRAM through NIXL: real agents in real processes, and the model of a device.

Its memory is a file: what NIXL registers is DRAM, and all else is as on a device."""

import os
import signal
import time

import pytest
from contract.transport import TransportContract, reads
from nixl_places import NixlVramPlace, needs_nixl
from redis_servers import wait_until

from kvstore.testing.cuda import ModelCuda
from kvstore.transport.base import Read

pytestmark = needs_nixl
LONG_S = 60.0
PLACE = NixlVramPlace


class TestFromVram(TransportContract):
    @pytest.fixture
    def place(self, nixl_place):
        return nixl_place


def test_the_first_read_is_of_vram_itself(own):
    """The probe is what the memory ends with: another one there, and nothing is read."""
    process = own.sidecar.pid
    at = own.node.address + own.node.config.segment_bytes
    own.spoil(at)
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: own.sidecar.pid not in (None, process), "another is started", LONG_S)
    block = own.save(b"1" * 100_000)
    give_up_at = time.monotonic() + 5.0
    while time.monotonic() < give_up_at:
        assert reads(own.read(block, timeout_s=1.0)[0]) != [Read.HIT]
        time.sleep(0.1)
    assert "other bytes" in own.transport._peer(own.word).reason


def test_memory_that_cannot_be_registered_leaves_streams(tmp_path, monkeypatch, caplog):
    """As where there is neither nvidia-peermem nor dma-buf: said once in a while, and blocks
    come another way."""
    from kvstore.node import nixl_sidecar

    real = nixl_sidecar.NixlProcess

    no_file, other_end = os.pipe()  # of a driver, that is not here

    def refuse(role, arguments, *, pass_fds):
        arguments[-4] = str(no_file)
        return real(role, arguments, pass_fds=(no_file,))

    monkeypatch.setattr(nixl_sidecar, "NixlProcess", refuse)
    device = ModelCuda(tmp_path)
    place = NixlVramPlace(tmp_path, device=device, ready=False)
    try:
        wait_until(lambda: "cannot be read through NIXL" in caplog.text, "it is said", LONG_S)
        assert "DeviceError" in caplog.text
        block = place.save(b"1" * 100_000)
        wanted = place.wanted(block)
        stream = place.transport._stream
        assert reads(stream.read(place.word, [wanted], time.monotonic() + LONG_S)) == [Read.HIT]
        assert wanted.into[0] == b"1" * 100_000
    finally:
        place.close()
        os.close(no_file)
        os.close(other_end)
