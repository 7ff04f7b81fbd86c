"""Run by test_bindings.py, in a process whose libcuda.so.1 is fake_driver.cpp: what
comes through NIXL goes to memory of the driver, through the real cuda-python. That memory is a file
here, which the process that reads registers as DRAM."""

from __future__ import annotations

import os
import sys

from contract.cuda import get
from nixl_places import same_host
from redis_servers import wait_until
from stores import NodeProcess

from kvstore import Limits
from kvstore.cli.checks.base import ask_python
from kvstore.cli.checks.software import _TRY_TO_VRAM, TRY_TIMEOUT_S
from kvstore.spi import BlockSession, DeviceRange, cuda_device
from kvstore.transport.stream.security import StreamSecurity

MIB = 1 << 20
KEY = b"k" * 32
SECRET = "a secret for tests"
PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=10.0)
LONG_S = 60.0


def test_a_block_of_another_host_arrives_in_vram(redis_server, tmp_path) -> None:
    security = StreamSecurity(secret=SECRET.encode())
    listen = ("--listen", "127.0.0.1:0", "--nixl", "read-only")
    environment = {"KVSTORE_SECRET": SECRET}
    with (
        same_host(),
        NodeProcess(redis_server, options=listen, environment=environment) as node,
    ):
        options = {**node.client_options, "limits": PATIENT, "security": security}
        payload = os.urandom(MIB)
        near = BlockSession(**options, verify="always")
        (granted,) = near.reserve([KEY], MIB, 7)
        granted.buffer[:] = payload
        assert near.commit([granted])
        near.close()

        device, staging = cuda_device(0), memoryview(bytearray(4 * MIB))
        far = BlockSession(**{**options, "run_dir": tmp_path}, nixl_device=device)

        def came() -> bool:
            (found,) = far.match([KEY]) or [None]
            if found is None:
                return False
            (view,) = far.views_on_device([found], staging, LONG_S)
            if view is None or not isinstance(view.buffer, DeviceRange):
                return False
            assert get(device, view.buffer.address, MIB) == payload
            return view.valid()

        wait_until(came, "it comes to VRAM", LONG_S)
        assert far.why_not_to_vram == ""
        far.close()


def test_the_doctor_tries_it() -> None:
    with same_host():
        well, said = ask_python(sys.executable, _TRY_TO_VRAM, TRY_TIMEOUT_S)
    assert well, said
    assert said.startswith("NIXL takes VRAM of device 0")
