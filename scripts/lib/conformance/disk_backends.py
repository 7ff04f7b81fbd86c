"""Puts into, and gets from, the disk backend of a store, each by the lowest interface that it has
for others: `python disk_backends.py NAME`, with the Python of an environment that has it.

A program of its own, which imports nothing of this project. It imports the store and forks a
process with a backend of its own for each line `[DIR, SOCKET, LOG, HOST]` of JSON on standard
input; its number is the answer. That process is asked over the socket: a line is
`["put" | "get", VERSION, KEYS]`, another one back what is said for each key: of a put whether it
was taken, of a get the digest of the bytes, null for a miss, or `{"error": ...}`. At the end it
closes the backend and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version as version_of
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

BLOCK_BYTES = 64 << 10
DEVICE_BYTES = 24 << 20
"""Of a backend that wants its file beforehand."""
WAIT_S, OFFLOAD_WAIT_S = 30.0, 10.0
UNREAD = b"\xee"
"""What the memory is full of before a get: a backend that fills nothing gives that."""
HOST = "127.0.0.1"
CLONE_NEWUTS = 0x04000000
MIB = 1 << 20


class Backend(Protocol):
    def put(self, keys: Sequence[int], version: int) -> list[bool]: ...

    def get(self, key: int) -> bytes | None: ...

    def close(self) -> None: ...


def value(key: int, version: int) -> bytes:
    """Return the bytes of a key."""
    return hashlib.shake_256(b"%d %d" % (key, version)).digest(BLOCK_BYTES)


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def name_of(key: int) -> bytes:
    return hashlib.sha256(b"%d" % key).digest()


def _until(done: Callable[[], Any], patience_s: float = WAIT_S) -> Any:
    """Wait for what `done` returns. Raises `TimeoutError`."""
    give_up_at = time.monotonic() + patience_s
    while (result := done()) is None:
        if time.monotonic() > give_up_at:
            raise TimeoutError("not done in time")
        time.sleep(0.002)
    return result


class Folder:
    """The model: a file for each key with a checksum before the bytes. No store, only a control."""

    checked = True

    def __init__(self, folder: Path) -> None:
        self._at = folder

    def put(self, keys: Sequence[int], version: int) -> list[bool]:
        for key in keys:
            raw = value(key, version)
            (self._at / f"{key}").write_bytes(digest(name_of(key) + raw).encode() + raw)
        return [True] * len(keys)

    def get(self, key: int) -> bytes | None:
        try:
            raw = (self._at / f"{key}").read_bytes()
        except OSError:
            return None
        says, found = raw[:64], raw[64:]
        right = says == digest(name_of(key) + found).encode()
        return found if right or not self.checked else None

    def close(self) -> None:
        pass


class Unchecked(Folder):
    """The same without looking at the checksum: the planted bug, which must be found."""

    checked = False


class VllmFs:
    """vLLM's `fs` tier, by what its tiering manager calls."""

    def __init__(self, folder: Path) -> None:
        from vllm.v1.kv_offload import config as c  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        settings = c.OffloadingConfig(
            groups=(c.OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=BLOCK_BYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="engine",
            model=c.OffloadingModelConfig("m", "bfloat16"),
            cache=c.OffloadingCacheConfig(16, 1),
            parallel=c.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        )
        self._memory = mmap.mmap(-1, BLOCK_BYTES)
        view = memoryview(self._memory).cast("B", (1, BLOCK_BYTES))
        spec: Any = SimpleNamespace(config=settings, blocks_per_chunk=1)
        self._tier = FileSystemTierManager(spec, view, "fs", root_dir=str(folder))
        self._request = ReqContext(req_id="request")
        self._jobs = 0

    def put(self, keys: Sequence[int], version: int) -> list[bool]:
        taken = []
        for key in keys:
            self._memory[:] = value(key, version)
            taken.append(self._job(self._tier.submit_store, self._key(key), False))
        return taken

    def get(self, key: int) -> bytes | None:
        from vllm.v1.kv_offload.base import LookupResult
        from vllm.v1.kv_offload.tiering.base import ScheduleEndContext

        name = self._key(key)

        def asked() -> Any:
            said = self._tier.lookup(name, self._request)
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
            return None if said is LookupResult.RETRY else said

        self._memory[:] = UNREAD * BLOCK_BYTES
        there = _until(asked) is LookupResult.HIT
        loaded = there and self._job(self._tier.submit_load, name, True)
        self._tier.on_request_finished(self._request)
        return self._memory[:] if loaded else None

    def _key(self, key: int) -> Any:
        from vllm.v1.kv_offload.base import make_offload_key

        return make_offload_key(name_of(key), 0)

    def _job(self, submit: Callable[[Any], None], name: Any, load: bool) -> bool:
        import numpy as np
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        submit(TransferJob(self._jobs, [name], np.arange(1), load, self._request))
        (job,) = _until(lambda: list(self._tier.get_finished_jobs()) or None)
        return bool(job.success)

    def close(self) -> None:
        self._tier.shutdown()


class LMCache:
    """An L2 adapter of LMCache's server, by what its storage manager calls."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    @classmethod
    def fs(cls, folder: Path) -> LMCache:
        return cls._made("fs", {"base_path": str(folder)})

    @classmethod
    def raw_block(cls, folder: Path) -> LMCache:
        path = folder / "device"
        if not path.exists():
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, DEVICE_BYTES)
        sizes = {"slot_bytes": BLOCK_BYTES + 4096, "meta_total_bytes": 2 * MIB}
        return cls._made("raw_block", {"device_path": str(path), **sizes})

    @classmethod
    def _made(cls, kind: str, settings: dict[str, Any]) -> LMCache:
        from lmcache.v1.distributed import l2_adapters as made
        from lmcache.v1.distributed.l2_adapters import fs_l2_adapter, raw_block_l2_adapter

        modules = {
            "fs": fs_l2_adapter.FSL2AdapterConfig,
            "raw_block": raw_block_l2_adapter.RawBlockL2AdapterConfig,
        }
        return cls(made.create_l2_adapter(modules[kind].from_dict(settings)))

    def put(self, keys: Sequence[int], version: int) -> list[bool]:
        taken = []
        for key in keys:  # one at a time: a task tells no more than whether all was right
            task = self._adapter.submit_store_task(
                [self._key(key)], [self._object(value(key, version))]
            )
            done = _until(lambda: self._adapter.pop_completed_store_tasks() or None)
            taken.append(done[task].is_successful())
        return taken

    def get(self, key: int) -> bytes | None:
        name, target, adapter = self._key(key), self._object(UNREAD * BLOCK_BYTES), self._adapter
        ask = adapter.submit_lookup_and_lock_task([name], None)
        if not _until(lambda: adapter.query_lookup_and_lock_result(ask)).test(0):
            return None
        load = adapter.submit_load_task([name], [target])
        loaded = _until(lambda: adapter.query_load_result(load)).test(0)
        adapter.submit_unlock([name])
        return bytes(target.byte_array) if loaded else None

    def _key(self, key: int) -> Any:
        from lmcache.v1.distributed.api import ObjectKey

        return ObjectKey(name_of(key), "m", 0)

    def _object(self, raw: bytes) -> Any:
        import torch
        from lmcache.v1 import memory_management as memory

        pages = mmap.mmap(-1, BLOCK_BYTES)
        pages.write(raw)
        data = torch.frombuffer(pages, dtype=torch.uint8)
        about = memory.MemoryObjMetadata(data.shape, torch.uint8, 0, BLOCK_BYTES, 1)
        about.fmt = memory.MemoryFormat.KV_2LTD
        return memory.TensorMemoryObj(data, about, None)

    def close(self) -> None:
        self._adapter.close()


class Mooncake:
    """A store of Mooncake with `enable_ssd_offload`, whose backend writes buckets, and a master."""

    def __init__(self, folder: Path) -> None:
        os.environ |= {
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "4",
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 * MIB),
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
            "MC_TCP_BIND_ADDRESS": HOST,
        }
        master = _free_port()
        self._master = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "mooncake_master"),
                f"--rpc_port={master}",
                f"--rpc_address={HOST}",
                f"--metrics_port={_free_port()}",
                "--enable_metric_reporting=false",
                "--enable_offload=true",
                "--default_kv_lease_ttl=200",
            ],
            stdout=sys.stderr,
        )
        _until(lambda: _answers(master))
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            HOST,
            "P2PHANDSHAKE",
            64 * MIB,
            64 * MIB,
            "tcp",
            "",
            f"{HOST}:{master}",
            None,
            True,
            str(folder),
        )
        if code:
            raise RuntimeError(f"setup failed with {code}")
        self._memory = mmap.mmap(-1, BLOCK_BYTES)
        self._address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._memory))
        self._store.register_buffer(self._address, BLOCK_BYTES)

    def put(self, keys: Sequence[int], version: int) -> list[bool]:
        names = [name_of(key).hex() for key in keys]
        taken = [
            self._store.put(name, value(key, version)) == 0
            for name, key in zip(names, keys, strict=True)
        ]
        there = [name for name, was in zip(names, taken, strict=True) if was]
        with contextlib.suppress(TimeoutError):  # its buckets are refused: they stay in memory
            _until(lambda: all(map(self._on_disk, there)) or None, OFFLOAD_WAIT_S)
        self._store.batch_replica_clear(
            [name for name in there if self._on_disk(name)], self._store.get_hostname()
        )
        return taken

    def _on_disk(self, name: str) -> bool:
        return any(one.is_local_disk_replica() for one in self._store.get_replica_desc(name))

    def get(self, key: int) -> bytes | None:
        self._memory[:] = UNREAD * BLOCK_BYTES
        size = self._store.get_into(name_of(key).hex(), self._address, BLOCK_BYTES)
        return self._memory[:size] if size > 0 else None

    def close(self) -> None:
        self._store.close()
        del self._store  # which takes leave of its master
        self._master.kill()
        self._master.wait()


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _answers(port: int) -> bool | None:
    try:
        socket.create_connection((HOST, port), 1.0).close()
    except OSError:
        return None
    return True


class Refuses(Folder):
    def __init__(self, folder: Path) -> None:
        raise OSError("no")


class Dies(Folder):
    def put(self, keys: Sequence[int], version: int) -> list[bool]:
        os._exit(1)


class Hangs(Folder):
    def get(self, key: int) -> bytes | None:
        time.sleep(3600)
        return None


CONTROLS = {"folder": Folder, "unchecked": Unchecked}
CONTROLS |= {"refuses": Refuses, "dies": Dies, "hangs": Hangs}
BACKENDS: dict[str, tuple[Callable[[Path], Backend], str, str]] = {
    **{name: (control, "", "json") for name, control in CONTROLS.items()},
    "vllm-fs": (VllmFs, "vllm", "vllm.v1.kv_offload.tiering.fs.manager"),
    "lmcache-fs": (LMCache.fs, "lmcache", "lmcache.v1.distributed.storage_manager"),
    "lmcache-raw-block": (LMCache.raw_block, "lmcache", "lmcache.v1.distributed.storage_manager"),
    "mooncake-bucket": (Mooncake, "mooncake-transfer-engine-non-cuda", "json"),
}
"""How each is made, its package, and what is imported before it is forked."""


def _said(backend: Backend, what: str, version: int, keys: Sequence[int]) -> list[Any]:
    if what == "put":
        try:
            return [*backend.put(keys, version)]
        except Exception as error:
            return [{"error": repr(error)[:200]}] * len(keys)
    said: list[Any] = []
    for key in keys:
        try:
            raw = backend.get(key)
            said.append(None if raw is None else digest(raw))
        except Exception as error:
            said.append({"error": repr(error)[:200]})
    return said


def work(name: str, folder: str, at: str, log: str, host: str) -> None:
    """Be the process of one backend."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if host and not ctypes.CDLL(None).unshare(CLONE_NEWUTS):
        socket.sethostname(host)
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(at)
        lines = channel.makefile("rw")
        make, package, _ = BACKENDS[name]
        backend = make(Path(folder))
        about = f"{package} {version_of(package)}" if package else name
        print(json.dumps(about), file=lines, flush=True)
        for line in lines:
            what, version, keys = json.loads(line)
            print(json.dumps(_said(backend, what, version, keys)), file=lines, flush=True)
        backend.close()


def main() -> None:
    name = sys.argv[1]
    importlib.import_module(BACKENDS[name][2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if pid := os.fork():
            os.write(ANSWERS, b"%d\n" % pid)
            continue
        status = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            work(name, *json.loads(line))
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)


if __name__ == "__main__":
    ANSWERS = os.dup(1)
    os.dup2(2, 1)  # what a peer prints is no answer
    main()
