"""Starts the stores of others for `scripts/conformance --peer`, as `scripts/bench serve` does."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conformance.bench import ROOT

Found = tuple[dict[str, Any], dict[str, Any]]
"""A kv_transfer_config, and further fields of `Bench`."""
LMCACHE_MIB = 128
LMCACHE_CHUNK_TOKENS = 128
"""A multiple of every block size that an engine has here: it refuses others."""
MOONCAKE_MIB = 16
"""Of each engine: all of them together are the store."""
MOONCAKE_ENGINES = 8


def _example(venv: Path, folder: Path, closing: contextlib.ExitStack) -> Found:
    """vLLM's connector that shows how to write one: a folder of files."""
    extra = {"shared_storage_path": "{dir}"}
    name = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    without = {
        "older-version": "it is a part of vLLM, and has no version of its own",
        "evicted-before-load": "it evicts nothing",
    }
    return {**name, "kv_connector_extra_config": extra}, {"version": "of vLLM", "without": without}


def _nixl(venv: Path, folder: Path, closing: contextlib.ExitStack) -> Found:
    """vLLM's connector over NIXL: the engine that decodes reads from the one that has computed."""
    recompute = {"kv_load_failure_policy": "recompute", "kv_buffer_device": "cpu"}
    found = next(venv.glob("lib/python3*/site-packages/nixl-*.dist-info"), None)
    if found is None:
        raise SystemExit(f"nixl: not in {venv}: scripts/bench serve --install-peers makes it")
    return {"kv_connector": "NixlConnector", "kv_role": "kv_both", **recompute}, {
        "python": venv / "bin" / "python",
        "env": {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_TLS": "tcp,sm,self"},
        "version": "NIXL " + found.name.removesuffix(".dist-info").rpartition("-")[2],
    }


def _server(name: str, mib: int, engines: int) -> Callable[..., Found]:
    def started(venv: Path, folder: Path, closing: contextlib.ExitStack) -> Found:
        sys.path.insert(0, str(ROOT))
        from benchmarks.serving import stores

        place = stores.Place(folder, folder, mib * engines << 20, engines, venv)
        try:
            if name == "LMCacheMPConnector":
                store = stores.start_lmcache(place, LMCACHE_CHUNK_TOKENS)
            else:
                store = stores.CONNECTORS[name](place)
        except stores.StoreMissingError as e:
            raise SystemExit(f"{name}: {e}") from e
        closing.callback(store.close)
        assert store.connector is not None
        assert store.server is not None
        recompute = {"kv_load_failure_policy": "recompute"}
        command = store.server.process.args
        assert isinstance(command, list)
        names = [command[i + 1] for i, word in enumerate(command) if word == "--shm-name"]
        more = {
            "python": store.python,
            "version": f"{name.removesuffix('Connector')} {store.version}",
            "env": store.env,
            "pids": [store.server.pid],
            "store_mib": mib * engines,
            "payload": [path for name in names for path in Path("/dev/shm").glob(f"*{name}*")],
        }
        return {**store.connector, **recompute}, more

    return started


PEERS: dict[str, Callable[[Path, Path, contextlib.ExitStack], Found]] = {
    "example": _example,
    "lmcache": _server("LMCacheMPConnector", LMCACHE_MIB, 1),
    "mooncake": _server("MooncakeStoreConnector", MOONCAKE_MIB, MOONCAKE_ENGINES),
    "nixl": _nixl,
}


@contextlib.contextmanager
def peer(name: str, venv: Path) -> Iterator[Found]:
    """Start what a peer needs and end it afterwards; `venv` is what `scripts/bench serve
    --install-peers` made."""
    with tempfile.TemporaryDirectory(prefix="kvc") as folder, contextlib.ExitStack() as closing:
        sys.path.insert(0, str(ROOT))
        from benchmarks.serving.peers_venv import older

        connector, more = PEERS[name](venv, Path(folder), closing)
        if (before := older(venv, name)).exists():
            more["older"] = str(before)
        yield connector, more
