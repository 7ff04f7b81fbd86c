"""Run by test_bindings.py, in a process whose libcuda.so.1 is fake_driver.cpp: what
`kvstore node --vram` owns, an engine's process saves to and reads, through the real cuda-python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from contract.cuda import get, put
from redis_servers import wait_until

from kvstore.nodedir import NodeDir
from kvstore.spi import BlockSession, DeviceReservation, VramSaver, cuda_device, vram_for_saves
from kvstore.transport.stream.security import StreamSecurity
from kvstore.types import STORED

MIB = 1 << 20
KEY, CHECKED = b"k" * 32, b"c" * 32
SECRET = "a secret for tests"
PATIENCE_S = 60.0


@pytest.fixture
def options(redis_server, tmp_path) -> dict[str, object]:
    return {"url": redis_server.url, "run_dir": tmp_path, "key_prefix": f"kv:{tmp_path.name}"}


@pytest.fixture
def process(options):
    arguments = ("--url", options["url"], "--run-dir", str(options["run_dir"]))
    arguments += ("--key-prefix", options["key_prefix"], "--vram", "8MiB", "--device", "1")
    arguments += ("--listen", "127.0.0.1:0")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", "node", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVSTORE_SECRET": SECRET},
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("kvstore node vram-1: ready, 8 MiB of VRAM of device 1"), ready
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def test_an_engine_saves_to_the_nodes_vram_and_the_next_one_reads_it(
    process, options, tmp_path
) -> None:
    device = cuda_device(1)
    payload = os.urandom(MIB)
    store = BlockSession(**options, device=device)
    saver = vram_for_saves(store, device, 4 * MIB)
    assert isinstance(saver, VramSaver)
    (granted,) = saver.reserve([KEY], MIB, 7)
    assert isinstance(granted, DeviceReservation)
    put(device, granted.buffer.address, payload)
    assert store.commit([granted]) == [STORED]
    saver.stop()
    store.close()

    store = BlockSession(**options, device=device)
    (found,) = store.match([KEY])
    with store.device_view(found) as view:
        assert get(device, view.memory.address, MIB) == payload
        assert view.valid()
    store.close()

    (elsewhere := tmp_path / "elsewhere").mkdir(0o700)
    security = StreamSecurity(secret=SECRET.encode())
    far = BlockSession(**{**options, "run_dir": elsewhere}, security=security)
    (view,) = far.views(far.match([KEY]), None, PATIENCE_S)
    assert view is not None, "another host gets it by stream"
    assert view.buffer == payload
    far.close()

    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    directory = NodeDir(options["run_dir"], "vram-1")
    wait_until(lambda: not directory.path.exists(), "nothing of it is left")
