"""Drives Mooncake Store from PyPI by its own zero-copy batch calls, on this host.

It needs what `GET_MOONCAKE` says, in this environment. One `mooncake_master`, and one
`mooncake_client` that owns the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.memory import Memory
from benchmarks.serving.peers_venv import CUDART, DEBIAN, cuda_runtime, libraries

GET_MOONCAKE = (
    "`.venv/bin/pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13 "
    f"nvidia-cuda-runtime-cu12`, and `apt-get install {' '.join(DEBIAN)}`"
)
OWNED_GIB = 4
LOCAL_BUFFER_BYTES = 64 << 20
START_TIMEOUT_S = 20.0
HOST = "127.0.0.1"
QUIET = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR", "MC_TCP_BIND_ADDRESS": HOST}


class Mooncake:
    """Puts values from, and reads them into, memory that was registered with it."""

    def __init__(self, way: Literal["shm", "tcp"]) -> None:
        """`shm`: through the owner's process, which maps our memory. `tcp`: the wheel's transport.

        Raises `RuntimeError` when it cannot be started here.
        """
        os.environ.update(QUIET)
        if (runtime := cuda_runtime(Path(sys.prefix))) is not None:
            ctypes.CDLL(str(runtime / CUDART), ctypes.RTLD_GLOBAL)  # its wheel loads it, GPU or not
        from mooncake.store import MooncakeDistributedStore

        self._way = way
        self._programs: list[subprocess.Popen[bytes]] = []
        try:
            master, owner = _free_port(), _free_port()
            self._run(
                "mooncake_master",
                master,
                f"--rpc_port={master}",
                f"--rpc_address={HOST}",
                f"--metrics_port={_free_port()}",
                "--enable_metric_reporting=false",
            )
            self._run(
                "mooncake_client",
                owner,
                f"--host={HOST}",
                f"--port={owner}",
                f"--global_segment_size={OWNED_GIB}GB",
                "--metadata_server=P2PHANDSHAKE",
                f"--master_server_address={HOST}:{master}",
            )
            self._store = MooncakeDistributedStore()
            if way == "shm":
                failed = self._store.setup_dummy(0, LOCAL_BUFFER_BYTES, f"{HOST}:{owner}")
            else:
                failed = self._store.setup(
                    HOST, "P2PHANDSHAKE", 0, LOCAL_BUFFER_BYTES, "tcp", "", f"{HOST}:{master}"
                )
            _check([failed], "setup")
        except BaseException:
            self._end_programs()
            raise

    def _run(self, program: str, port: int, *options: str) -> None:
        command = [str(Path(sys.executable).parent / program), *options]
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"LD_LIBRARY_PATH": libraries(Path(sys.prefix))},
        )
        self._programs.append(process)
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((HOST, port), 1.0).close()
                return
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"{program} does not start here: {GET_MOONCAKE}")
            time.sleep(0.05)

    def memory(self, size_bytes: int) -> Memory:
        """Return memory that values may be put from and read into."""
        memory = Memory(size_bytes, self._from_pool if self._way == "shm" else None)
        _check([self._store.register_buffer(memory.bytes.ctypes.data, size_bytes)], "register")
        return memory

    def _from_pool(self, size_bytes: int) -> Any:
        address = self._store.alloc_from_mem_pool(size_bytes)
        if not address:
            raise RuntimeError(f"no {size_bytes} bytes of memory that it shares with its owner")
        return (ctypes.c_uint8 * size_bytes).from_address(address)

    def forget(self, keys: Sequence[str]) -> None:
        """Remove the keys: it keeps the first value of a key."""
        self._store.batch_remove(list(keys), True)

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> None:
        sizes = [value.nbytes for value in values]
        _check(self._store.batch_put_from(list(keys), _addresses(values), sizes), "put")

    def get(self, keys: Sequence[str], out: Sequence[memoryview]) -> None:
        sizes = [target.nbytes for target in out]
        _check(self._store.batch_get_into(list(keys), _addresses(out), sizes), "get")

    def close(self) -> None:
        # Its own close can block; its processes have nothing to lose.
        self._end_programs()

    def _end_programs(self) -> None:
        for process in reversed(self._programs):
            process.kill()
            process.wait(START_TIMEOUT_S)


def _addresses(views: Sequence[memoryview]) -> list[int]:
    return [ctypes.addressof(ctypes.c_uint8.from_buffer(view)) for view in views]


def _check(codes: Sequence[int], what: str) -> None:
    if bad := sorted({code for code in codes if code < 0}):
        raise RuntimeError(f"{what} failed with {bad}")


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
