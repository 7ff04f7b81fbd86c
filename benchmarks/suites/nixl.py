"""Suite `nixl` measures get_many of one node through NIXL, by stream and from shared memory.

Without RDMA, NIXL reads over UCX's same-host transport (cma): that measures what our
side of it costs, and says nothing about a network.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import house
from benchmarks.report import Row, machine, median, ratios, spread
from benchmarks.suites.index import interleaved
from benchmarks.suites.stream import MIB, NODE_BYTES, PATIENT, SECURITY, WARM_UP
from kvstore import Client
from kvstore.errors import UsageError
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.index import open_index
from kvstore.node import Node, NodeConfig

SHAPES = ((32, MIB), (8, 8 * MIB), (32, 64 << 10), (256, 4 << 10), (1, MIB))
"""(blocks in a get_many, bytes of a block)."""
REPETITIONS = 60
REPETITIONS_QUICK = 10
WAYS = ("nixl", "stream", "shm")
READY_TIMEOUT_S = 30.0
SAME_HOST = {"UCX_TLS": "tcp,cma,self", "UCX_NET_DEVICES": "lo"}


class Owner:
    """Runs a node that can be read in every way."""

    def __init__(self, run_dir: Path, url: str) -> None:
        config = NodeConfig(
            run_dir=run_dir,
            name="nixl",
            key_prefix="kv:nixl",
            size_bytes=NODE_BYTES,
            listen=("127.0.0.1", 0),
            security=SECURITY,
            nixl="read-only",
        )
        index = GuardedIndex(open_index(url, key_prefix=config.key_prefix))
        self._node = Node(config, index).start()

    def close(self) -> None:
        self._node.stop()


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    repetitions = REPETITIONS_QUICK if options.quick else REPETITIONS
    if not Path("/dev/infiniband").exists():
        for name, value in SAME_HOST.items():
            os.environ.setdefault(name, value)
    rows: list[Row] = []
    with house(64 * MIB) as here:
        about = machine(here.url)
        here.worker(Owner)
        given: dict[str, Any] = {
            "key_prefix": "kv:nixl",
            "run_dir": here.run_dir,
            "limits": PATIENT,
            "security": SECURITY,
        }
        # "shm" writes as well, and only what has a checksum is read through NIXL.
        clients = {
            way: Client(
                here.url,
                transports=(way,),
                verify="always" if way == "shm" else "never",
                **given,
            )
            for way in WAYS
        }
        try:
            _wait_for_nixl(clients)
            for count, size_bytes in SHAPES:
                rows += _shape(clients, count, size_bytes, repetitions)
        finally:
            for client in clients.values():
                client.close()
    return about, rows


def _wait_for_nixl(clients: dict[str, Client]) -> None:
    assert clients["shm"].put("first", b"value")
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while clients["nixl"].get("first") is None:
        if time.monotonic() > give_up_at:
            raise UsageError("nixl", "(no read)", "does not work here: see scripts/rdma-check")
        time.sleep(0.1)


def _shape(clients: dict[str, Client], count: int, size_bytes: int, repetitions: int) -> list[Row]:
    keys = [f"{count} of {size_bytes}, {i}" for i in range(count)]
    values = [os.urandom(size_bytes) for _ in keys]
    assert all(clients["shm"].put_many(zip(keys, values, strict=True)))
    out = [memoryview(bytearray(size_bytes)) for _ in keys]

    def get_many(way: str) -> None:
        assert None not in clients[way].get_many(keys, out=out), clients[way].stats()

    calls = {way: partial(get_many, way) for way in WAYS}
    interleaved(calls, WARM_UP)
    took = interleaved(calls, repetitions)
    for way in WAYS:
        for view in out:
            view[:] = bytes(size_bytes)
        get_many(way)
        assert [bytes(view) for view in out] == values
    return [
        {
            "op": way,
            "blocks": count,
            "block_kib": size_bytes >> 10,
            "latency_us_p50": round(median(took[way]) * 1e6),
            "gb_per_s": round(count * size_bytes / median(took[way]) / 1e9, 2),
            "shm_ratio": round(median(ratios(took["shm"], took[way])), 3),
            "stream_ratio": round(median(ratios(took["stream"], took[way])), 3),
            "spread": round(spread(took[way]), 2),
        }
        for way in WAYS
    ]
