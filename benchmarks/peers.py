"""Measures other stores under the shapes of `local`: one writer and one reader in this process.

memcpy stands next to them. Each peer stores and returns whole values; which copies it makes on
the way is its own business. A peer that is not installed is one row that says so.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import redis

from benchmarks.memory import PAGE_BYTES, Buffers, Memory, memcpy
from benchmarks.mooncake import GET_MOONCAKE, Mooncake
from benchmarks.report import Row, median, micros, percentile, ratios, spread
from kvstore.index.embedded_redis.server import EmbeddedRedis

CASE_BYTES = 512 << 20
REPETITIONS_MIN, REPETITIONS_MAX = 5, 100
SETS = 2
"""Values of so many repetitions are kept apart, so that a get is not of what was just put."""
LARGEST_BYTES = 256 << 20
"""A repetition that moves more is left out."""


class Peer(Protocol):
    def memory(self, size_bytes: int) -> Memory:
        """Return where the values to put are, and where values go."""
        ...

    def forget(self, keys: Sequence[str]) -> None:
        """Prepare for other values under the same keys; not timed."""
        ...

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> None: ...

    def get(self, keys: Sequence[str], out: Sequence[memoryview]) -> None:
        """Read every value whole into `out`; raises when one is missing."""
        ...

    def close(self) -> None: ...


class PlainRedis:
    """Keeps the payload itself in Redis, over its Unix socket: one MSET, one MGET."""

    def __init__(self) -> None:
        self._where = tempfile.TemporaryDirectory(prefix="kvb-")
        self._server = EmbeddedRedis.acquire(Path(self._where.name))
        self._client = redis.Redis.from_url(self._server.url)
        self._client.config_set("maxmemory", 0)

    def memory(self, size_bytes: int) -> Memory:
        return Memory(size_bytes)

    def forget(self, keys: Sequence[str]) -> None:
        pass

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> None:
        self._client.mset(dict(zip(keys, map(bytes, values), strict=True)))

    def get(self, keys: Sequence[str], out: Sequence[memoryview]) -> None:
        for target, value in zip(out, self._client.mget(keys), strict=True):
            assert isinstance(value, bytes)
            target[:] = value

    def close(self) -> None:
        self._client.close()
        self._server.close()
        self._where.cleanup()


class LMCache:
    """LMCache has no put and get of values outside an engine: there is nothing to drive here."""

    def __init__(self) -> None:
        raise RuntimeError("stores paged KV tensors of an engine only; measure it with one")


PEERS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "redis": ("redis", "pip install redis", PlainRedis),
    "mooncake-shm": ("mooncake", GET_MOONCAKE, partial(Mooncake, "shm")),
    "mooncake-tcp": ("mooncake", GET_MOONCAKE, partial(Mooncake, "tcp")),
    "lmcache": ("lmcache", "pip install lmcache", LMCache),
}
"""By name: the module that must be installed, how to get it, and the driver."""


def run(name: str, sizes: Sequence[int], batches: Sequence[int]) -> list[Row]:
    """Return its rows, or one that has in `said` what it lacks and how to get that."""
    module, how, make = PEERS[name]
    if find_spec(module) is None:
        return [{"op": name, "said": f"the module {module} is not installed here: {how}"}]
    try:
        peer: Peer = make()
    except ImportError as e:
        return [{"op": name, "said": f"{e}: {how}"}]
    except RuntimeError as e:
        return [{"op": name, "said": str(e)}]
    try:
        shapes = [(s, b) for b in batches for s in sizes if s * b <= LARGEST_BYTES]
        largest = max(batch * max(size_bytes, PAGE_BYTES) for size_bytes, batch in shapes)
        sources, targets = peer.memory(largest * SETS), peer.memory(largest)
        return [
            row
            for size_bytes, batch in shapes
            for row in _case(name, peer, (sources, targets), size_bytes, batch)
        ]
    finally:
        peer.close()


def _case(
    name: str, peer: Peer, memory: tuple[Memory, Memory], size_bytes: int, batch: int
) -> list[Row]:
    sources = Buffers(memory[0], batch * SETS, size_bytes)
    targets = Buffers(memory[1], batch, size_bytes)
    wanted = CASE_BYTES // (size_bytes * batch)
    repetitions = max(REPETITIONS_MIN, min(REPETITIONS_MAX, wanted))
    took: dict[str, list[float]] = {"put": [], "get": [], "memcpy": []}
    for number in range(repetitions + SETS):
        places = range(number % SETS * batch, (number % SETS + 1) * batch)
        sums = [sources.stamp(place, number << 16 | place) for place in places]
        keys = [f"{size_bytes}/{place}" for place in places]
        views = [sources.views[place] for place in places]
        addresses = [sources.addresses[place] for place in places]
        peer.forget(keys)
        spans = {
            "put": _seconds(partial(peer.put, keys, views)),
            "memcpy": _seconds(partial(memcpy, targets.addresses, addresses, size_bytes)),
            "get": _seconds(partial(peer.get, keys, targets.views)),
        }
        if targets.checksums(range(batch)) != sums:
            raise AssertionError(f"{name}: wrong bytes")
        if number >= SETS:  # the first ones make room and connections
            for op, seconds in spans.items():
                took[op].append(seconds)
    return [
        _row(f"{name} {op}", size_bytes, batch, took[op], took["memcpy"]) for op in ("put", "get")
    ]


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _row(op: str, size_bytes: int, batch: int, took: list[float], copied: list[float]) -> Row:
    return {
        "op": op,
        "size_bytes": size_bytes,
        "batch": batch,
        "readers": 1,
        "gb_per_s": round(size_bytes * batch / median(took) / 1e9, 3),
        "memcpy_ratio": round(median(ratios(copied, took)), 3),
        "latency_us_p50": micros(median(took)),
        "latency_us_p99": micros(percentile(took, 99)),
        "spread": round(spread(took), 3),
        "floor_us_p50": None,
        "memcpy_us_p50": micros(median(copied)),
        "repetitions": len(took),
    }
