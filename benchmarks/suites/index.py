"""Suite `index` measures match and publish, next to bare redis-py commands on the same keys."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import redis

from benchmarks.local_workers import PATIENT
from benchmarks.processes import house
from benchmarks.report import Row, machine, median, micros, percentile, ratios, spread
from kvstore import Client
from kvstore.index.base import KeyRecord
from kvstore.index.redis.index import open_index
from kvstore.index.redis.key_space import KeySpace
from kvstore.types import Key

KEYS = (64, 512, 4096)
PUBLISHED = (1, 32, 512)
BLOCK_TOKENS = 16
PRESENT = {"all": 1.0, "half": 0.5, "none": 0.0}
NODE_BYTES = 256 << 20
REPETITIONS = 200
REPETITIONS_QUICK = 20
KEY_PREFIX = "kv:default"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    repetitions = REPETITIONS_QUICK if options.quick else REPETITIONS
    rows: list[Row] = []
    with house(NODE_BYTES) as here:
        about = machine(here.url)
        with Client(
            here.url, run_dir=here.run_dir, block_tokens=BLOCK_TOKENS, limits=PATIENT
        ) as client:
            bare = redis.Redis.from_url(here.url)
            for count in KEYS:
                for present, share in PRESENT.items():
                    rows += _match(client, bare, count, present, share, repetitions)
        rows += [_publish(here.url, here.run_dir, count, repetitions) for count in PUBLISHED]
    return about, rows


def _match(
    client: Client, bare: redis.Redis, count: int, present: str, share: float, repetitions: int
) -> list[Row]:
    """Time matches with prebuilt keys as connectors do it (`match`), and from tokens
    (`match_prefix`)."""
    salt = count * 10 + list(PRESENT).index(present)
    tokens = array("I", [salt, *range(1, count * BLOCK_TOKENS)])
    there = int(count * share)
    blocks = [i.to_bytes(8, "little") for i in range(there)]
    assert all(client.put_blocks(tokens, blocks))
    keys = client.namespace.block_keys(tokens, BLOCK_TOKENS)
    names = [KeySpace(KEY_PREFIX).redis_key(key) for key in keys]
    assert sum(value is not None for value in bare.mget(names)) == there
    assert len(client.session.match(keys)) == there
    assert client.match_prefix(tokens).blocks == there
    measured = interleaved(
        {
            "match": lambda: client.session.match(keys),
            "match_prefix": lambda: client.match_prefix(tokens),
            "mget": lambda: bare.mget(names),
        },
        repetitions,
    )
    return [_row(op, count, present, measured[op], measured["mget"]) for op in measured]


def _publish(url: str, run_dir: Path, count: int, repetitions: int) -> Row:
    """Time publishes against a bare MSET of the same keys and records, other keys each time for
    both."""
    index = open_index(url, key_prefix=KEY_PREFIX, publish_timeout_s=PATIENT.request_timeout_s)
    bare = redis.Redis.from_url(url)
    space = KeySpace(KEY_PREFIX)
    batches = [[KeyRecord(_key(n, i), bytes(44)) for i in range(count)] for n in range(2)]
    names = [{space.redis_key(key): record for key, record in batch} for batch in batches]
    turn = 0

    def publish() -> None:
        nonlocal turn
        turn += 1
        index.publish(batches[turn % 2])

    measured = interleaved(
        {"publish": publish, "mset": lambda: bare.mset(names[turn % 2])}, repetitions
    )
    index.close()
    return _row("publish", count, "all", measured["publish"], measured["mset"])


def _key(batch: int, i: int) -> Key:
    return b"%08d%024d" % (batch, i)


def interleaved(
    calls: Mapping[str, Callable[[], object]], repetitions: int
) -> dict[str, list[float]]:
    """Return the seconds of each call; they take turns, and each goes first as often."""
    names = list(calls)
    took: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repetitions):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            started = time.perf_counter()
            calls[name]()
            took[name].append(time.perf_counter() - started)
    return took


def _row(op: str, keys: int, present: str, took: list[float], bare: list[float]) -> Row:
    """Return one row. `mget_ratio` above 1 is slower than the bare command (MSET for a publish)."""
    return {
        "op": op,
        "keys": keys,
        "present": present,
        "latency_us_p50": micros(median(took)),
        "mget_ratio": round(median(ratios(took, bare)), 3),
        "latency_us_p99": micros(percentile(took, 99)),
        "spread": round(spread(took), 3),
    }
