"""Starts the store of each connector, and says how an engine is told of it.

A peer that is not installed, or does not start, raises `StoreMissingError` with the reason and the
command that gets it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from services import IsUp, Service, kvstore_command, listens

from benchmarks.serving.engines import BLOCK_TOKENS, last_error
from benchmarks.serving.floor import SETTING, write_possible
from benchmarks.serving.peers_venv import INSTALL, cuda_runtime, libraries
from benchmarks.serving.sessions import Session

ROOT = Path(__file__).parents[2]

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
MIB = 1 << 20
SEGMENT_STEP_BYTES = 16 * MIB
"""What Mooncake divides its segments by."""


class StoreMissingError(Exception):
    """Says why a connector cannot be measured here, and what to do."""


@dataclass(slots=True)
class Place:
    """Holds where a store may put things, and how large it is."""

    folder: Path
    """Of its log."""
    run_dir: Path
    """Of its sockets, whose paths must be short."""
    size_bytes: int
    engines: int
    peers: Path
    """Environment of the peers."""
    sessions: Sequence[Session] = ()
    """What will be sent; only the floor wants to know it."""


@dataclass(slots=True)
class Store:
    """Holds a started store."""

    python: Path
    """Interpreter of the engines that use it."""
    connector: dict[str, Any] | None = None
    """kv_transfer_config."""
    env: dict[str, str] = field(default_factory=dict)
    server: Service | None = None
    version: str = ""
    mark: str | None = None
    """In the command lines of its processes that engines start."""

    def kill(self) -> None:
        """Kill the server as the kernel would; without one there is nothing to kill."""
        if self.server is not None:
            self.server.process.kill()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


def start_none(place: Place) -> Store:
    """The engine alone: the reference."""
    return Store(Path(sys.executable), version="")


def start_floor(place: Place) -> Store:
    """No store, and engines that are told that everything possible is cached: the bound."""
    possible = place.folder / "possible.json"
    write_possible(possible, place.sessions, BLOCK_TOKENS)
    return Store(
        Path(sys.executable),
        {
            "kv_connector": "FloorConnector",
            "kv_connector_module_path": "benchmarks.serving.floor_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {SETTING: str(possible)},
        },
        {"PYTHONPATH": str(ROOT)},
    )


def start_kvstore(place: Place, *options: str, **extra: Any) -> Store:
    """`kvstore up`, and engines that are told its directory: everything else by default."""
    run_dir = place.run_dir
    words = "--run-dir", str(run_dir), "--size", str(place.size_bytes)
    command = kvstore_command("up", *options, *words)
    server = _started(command, place, {}, lambda service: "Ctrl-C ends it" in service.said())
    return Store(
        Path(sys.executable),
        {
            "kv_connector": "KVStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"run_dir": str(run_dir), **extra},
        },
        server=server,
        version=version("kvstore-llm") if _has("kvstore-llm") else "",
        mark=str(run_dir),
    )


def start_mooncake(place: Place) -> Store:
    """`mooncake_master`; each engine brings its part of the memory."""
    program = _program(place.peers, "mooncake_master")
    port, metrics = free_port(), free_port()
    command = [str(program), f"--rpc_port={port}", f"--rpc_address={HOST}"]
    command += [f"--metrics_port={metrics}", f"--metrics_host={HOST}"]
    env = {"LD_LIBRARY_PATH": libraries(place.peers)}
    if cuda_runtime(place.peers) is None:
        raise StoreMissingError(f"no libcudart.so.12 in {place.peers}: {INSTALL}")
    server = _started(command, place, env, listens(port))
    share = max(place.size_bytes // place.engines // SEGMENT_STEP_BYTES, 1) * SEGMENT_STEP_BYTES
    config = place.folder / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"{HOST}:{port}",
                "protocol": "tcp",
                "device_name": "",
                "mode": "embedded",
                "global_segment_size": share,
                "local_buffer_size": 64 * MIB,
            }
        )
    )
    return Store(
        place.peers / "bin" / "python",
        {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        },
        {
            **env,
            "MOONCAKE_CONFIG_PATH": str(config),
            "MC_TCP_BIND_ADDRESS": HOST,
            "VLLM_HOST_IP": HOST,
        },
        server,
        _version(place.peers, "mooncake_transfer_engine_non_cuda"),
    )


def start_lmcache(place: Place, chunk_tokens: int = BLOCK_TOKENS) -> Store:
    """`lmcache server`, whose chunks are the engine's blocks: finer than its default, and better
    here."""
    program = _program(place.peers, "lmcache")
    port, http, metrics = free_port(), free_port(), free_port()
    command = [str(program), "server", "--port", str(port), "--http-port", str(http)]
    command += ["--prometheus-port", str(metrics), "--eviction-policy", "LRU"]
    command += ["--l1-size-gb", str(place.size_bytes / (1 << 30))]
    command += ["--chunk-size", str(chunk_tokens), "--supported-transfer-mode", "auto"]
    command += ["--shm-name", f"kvb-{os.getpid()}-{port}"]
    env = {"LMCACHE_TRACK_USAGE": "false", "LD_LIBRARY_PATH": libraries(place.peers)}
    server = _started(command, place, env, listens(port))
    return Store(
        place.peers / "bin" / "python",
        {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{HOST}",
                "lmcache.mp.port": port,
            },
        },
        env,
        server,
        _version(place.peers, "lmcache"),
    )


VARIANTS: dict[str, Callable[[Place], Store]] = {
    **{
        f"kvstore/{tokens}": partial(start_kvstore, block_tokens=tokens)
        for tokens in (BLOCK_TOKENS, 64, 128)
    },
    "kvstore/head-start": lambda place: start_kvstore(place, "--policy", "head-start"),
}
"""Ours, with something else than the default; only when asked for."""

CONNECTORS: dict[str, Callable[[Place], Store]] = {
    "none": start_none,
    "kvstore": start_kvstore,
    "MooncakeStoreConnector": start_mooncake,
    "LMCacheMPConnector": start_lmcache,
    "floor": start_floor,
    **VARIANTS,
}


def _program(peers: Path, name: str) -> Path:
    program = peers / "bin" / name
    if not program.exists():
        raise StoreMissingError(f"no {name} in {peers}: {INSTALL}")
    return program


def _started(command: Sequence[str], place: Place, env: dict[str, str], up: IsUp) -> Service:
    """Return the server when it is up. Raises `StoreMissingError` when it ends or takes too
    long."""
    server = Service(command, place.folder / "server.log", env=env)
    try:
        return server.wait(up, START_TIMEOUT_S)
    except RuntimeError as e:
        how = str(e).partition(", see")[0]
        raise StoreMissingError(
            f"its server{how.removeprefix('it')}: {last_error(server.log)}"
        ) from e


def free_port() -> int:
    """Return a port that nobody listens on just now."""
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _has(distribution: str) -> bool:
    with contextlib.suppress(Exception):
        version(distribution)
        return True
    return False


def _version(venv: Path, name: str) -> str:
    """Return the version of a distribution in another environment."""
    for found in venv.glob(f"lib/python3*/site-packages/{name}-*.dist-info"):
        return found.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""
