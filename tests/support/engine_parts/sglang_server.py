"""Whole SGLang servers on a CPU: HTTP, tokenizer, scheduler, radix cache, HiCache and its storage.

All of that is SGLang's own code in processes of its own. What stands in for something is here, and
nothing else does (SGLang 0.5.23, of which no package index has the kernels for CPUs):

- `sgl_kernel`, the package of those kernels: the names that are imported of it, which are for
  drafts, and raise. The arithmetic of the model is SGLang's own, of torch.
- Copies between the pool of the "device" and that of the host (sglang_copies.py).
- No memory is pinned: SGLang pins that of the host's pool and of adapters with CUDA, whatever the
  device.
- Latents (MLA) are always computed in their absorbed form: with torch's attention SGLang chooses
  the other one for the beginning of a prompt, which that attention cannot compute.
- SGLang leaves no 10 GB of the host's memory to others, and looks for no NCCL.
- Processes are forked, not spawned: SGLang is imported once for all servers of a test, which
  is nearly all that a small one costs (30 s of a processor, three times a server).

Run as a program it is the process that all servers are forked from: of each line on its standard
input it makes one, and answers with its pid.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sglang_copies

from kvstore.testing.ports import held_ports

IMPORT_TIMEOUT_S = 600.0
START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
PAGE_TOKENS = 16
KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
IMPORTS = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
)
OPTIONS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-tokenizer-init"),
    *("--max-total-tokens", "4096", "--max-running-requests", "8", "--page-size", str(PAGE_TOKENS)),
    *("--dtype", "float32", "--sleep-on-idle"),
    *("--enable-metrics", "--enable-cache-report", "--host", "127.0.0.1"),
)
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_NCCL_SO_PATH": "/nowhere",
}
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy"),
    *("write_through", "--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "page_first_direct"),
    *("--hicache-storage-backend", "dynamic", "--hicache-storage-prefetch-policy"),
    *("wait_complete", "--hicache-storage-backend-extra-config"),
)


class Answer(NamedTuple):
    """What a server says of one request."""

    tokens: list[int]
    cached_tokens: int
    """Of the prompt, those that it did not compute."""
    from_storage: int
    """Of these, those that it loaded from its storage backend."""


class SGLangServer:
    """One server with its processes. `start` of `SGLangServers` makes it."""

    def __init__(self, pid: int, port: int, log: Path) -> None:
        self.pid = pid
        self._port = port
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> SGLangServer:
        """Wait until it answers. Raises `RuntimeError` with the end of its log when it does not."""
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while "The server is fired up" not in self.log:
            if not self._runs() or time.monotonic() > give_up_at:
                raise RuntimeError(f"the server did not start:\n{self.log[-6000:]}")
            time.sleep(0.2)
        return self

    def generate(self, prompt: Sequence[int], tokens: int = 8, **request: Any) -> Answer:
        """Ask for the greedy continuation of a prompt of token ids."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, **request}
        url = f"http://127.0.0.1:{self._port}/generate"
        call = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=CALL_TIMEOUT_S) as response:
            answer = json.load(response)
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(answer["output_ids"], meta["cached_tokens"], details.get("storage", 0))

    def metrics(self) -> dict[str, float]:
        """Return the sums of /metrics over all labels but `cache_source`, which is in the name."""
        from prometheus_client.parser import text_string_to_metric_families

        url = f"http://127.0.0.1:{self._port}/metrics"
        with urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S) as response:
            text = response.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                source = sample.labels.get("cache_source")
                name = sample.name + (f"{{{source}}}" if source else "")
                found[name] = found.get(name, 0.0) + sample.value
        return found

    def close(self) -> None:
        """End the server and its processes: ask, then kill. Safe to call twice."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        while self._runs() and time.monotonic() < give_up_at:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _runs(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


class SGLangServers:
    """Starts servers out of one process that has imported SGLang. Use it as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held = contextlib.ExitStack()
        self._servers: list[SGLangServer] = []
        self._log = (folder / "sglang_servers.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def __enter__(self) -> SGLangServers:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        self._log.close()
        self._held.close()

    def start(
        self, model: Path, store: dict[str, Any] | None = None, *options: str, ranks: int = 1
    ) -> SGLangServer:
        """Start a server of the model at `model` on so many tensor-parallel ranks, with the store
        of these settings or none, and with more options of SGLang's; it answers after `wait`."""
        (port,) = self._held.enter_context(held_ports(1))
        args = ["--model-path", str(model), "--port", str(port), *OPTIONS]
        cores = sorted(os.sched_getaffinity(0))
        on = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        environment = {"SGLANG_CPU_OMP_THREADS_BIND": on} if ranks > 1 else {}
        args += ["--tp-size", str(ranks)]
        if store is not None:
            loader = {
                "backend_name": "kvstore",
                "module_path": "connector.adapters.sglang",
                "class_name": "KVStoreHiCache",
                "interface_v1": 1,
            }
            args += [*HICACHE, json.dumps({**loader, **store})]
        args += options  # of one that is given twice the last counts
        log = self._folder / f"sglang{len(self._servers)}.log"
        log.touch()
        asked = {"args": args, "log": str(log), "environment": environment}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], IMPORT_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(f"SGLang was not imported:\n{self._of_all[-6000:]}")
        server = SGLangServer(int(line), port, log)
        self._servers.append(server)
        return server

    @property
    def _of_all(self) -> str:
        return Path(self._log.name).read_text(errors="replace")


# The process that servers are forked from


class _Forks:
    """Has what SGLang uses of `multiprocessing`, with forked processes."""

    def __init__(self) -> None:
        forks = multiprocessing.get_context("fork")
        self.Process, self.Pipe = forks.Process, forks.Pipe

    def set_start_method(self, *_: object, **__: object) -> None:
        """Stay with forks."""


def _kernels() -> types.ModuleType:
    """Return `sgl_kernel` as far as it is imported."""
    module = types.ModuleType("sgl_kernel")
    for name in KERNELS:

        def missing(*_: object, name: str = name, **__: object) -> None:
            raise NotImplementedError(f"nothing stands in for sgl_kernel.{name}")

        setattr(module, name, missing)
    return module


def _pin_nothing() -> None:
    import torch

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, pin_memory=False, **settings: make(*args, **settings)

    for name in ("tensor", "zeros", "empty", "full"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign,assignment]


def _import_sglang() -> None:
    sys.modules["sgl_kernel"] = _kernels()
    for name in IMPORTS:
        importlib.import_module(name)
    from sglang.srt.entrypoints import engine
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    def not_pinned(*args: Any, pin_memory: bool, **settings: Any) -> Any:
        return common.alloc_with_host_register(*args, pin_memory=False, **settings)

    _pin_nothing()
    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    engine.mp = _Forks()
    common.ALLOC_MEMORY_FUNCS["cpu"] = not_pinned
    sglang_copies.install(mha, mla)


def _serve(args: list[str], log: str, environment: dict[str, str]) -> None:
    """Be a server, as `python -m sglang.launch_server` is. Never returns."""
    code = 1
    try:
        os.environ.update(environment)
        os.setsid()
        for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY)):
            opened = os.open(path, flags | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(opened, number)
        os.dup2(1, 2)
        from sglang.launch_server import run_server
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

        try:
            run_server(prepare_server_args(args))
            code = 0
        finally:
            kill_process_tree(os.getpid(), include_parent=False)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """Start servers until the standard input ends, and kill them then."""
    answers = os.dup(1)
    os.dup2(2, 1)
    _import_sglang()
    running: set[int] = set()
    left = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.2)
        with contextlib.suppress(ChildProcessError):
            running.discard(os.waitpid(-1, os.WNOHANG)[0])
        if not ready:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, left = (left + data).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                _serve(**asked)
            running.add(pid)
            os.write(answers, b"%d\n" % pid)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
