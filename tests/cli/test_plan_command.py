from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from each_input import each

from kvstore import Client, Namespace
from kvstore.cli.commands.plan import SAMPLED_MIN, plan_of
from kvstore.cli.store import LIMITS
from kvstore.core.reuse import TIMES

if TYPE_CHECKING:
    from places import Place

MODEL = {"model": "a/model", "block_tokens": 16, "kv_group": 0}
BLOCK = 64 << 10


@pytest.fixture(scope="module")
def client(store: Place) -> Iterator[Client]:
    url = f"unix://{store.run_dir}/redis/redis.sock"
    with Client(url, run_dir=store.run_dir, limits=LIMITS) as client:
        yield client


def test_models_and_nodes_are_told_of(store: Place, client: Client) -> None:
    for head_first in (0, 8):
        fields = {**MODEL, "head_first": head_first}
        tokens = list(range(64))
        url = f"unix://{store.run_dir}/redis/redis.sock"
        space = Namespace(fields)
        with Client(
            url, namespace=space, run_dir=store.run_dir, limits=LIMITS, block_tokens=16
        ) as own:
            own.put_blocks(tokens, [bytes(BLOCK)] * 4)
    client.put("plain", b"value")
    said = store.here("plan", "--json")
    assert said.returncode == 0, said.stderr
    plan = json.loads(said.stdout)
    models = {one["model"]: one for one in plan["models"]}
    assert models["a/model"]["shards"] == 2
    assert models["a/model"]["block_bytes"] == BLOCK
    assert models["a/model"]["token_bytes"] == 2 * BLOCK / 16
    assert models["default"]["token_bytes"] is None
    (node,) = plan["nodes"]
    assert list(node["hit_rate"]) == [f"{times:g}" for times in TIMES]
    assert node["recommended_bytes"] is None
    assert "too few uses yet" in node["why_not"]
    shown = store.here("plan").stdout.decode()
    assert "a/model" in shown
    assert "a save counts" in shown


def stats(
    rates: dict[float, float], unlimited: float, sampled: int = SAMPLED_MIN
) -> dict[str, float]:
    told = {f"reuse_hit_rate:{times:g}": rates.get(times, 0.0) for times in TIMES}
    more = {"capacity_bytes": 1 << 30, "reuse_sampled": sampled}
    return {**more, **told, "reuse_hit_rate:unlimited": unlimited}


@each(
    "rates, unlimited, gib, why_not",
    [
        ({1: 0.41, 2: 0.55, 3: 0.58, 4: 0.59, 6: 0.6, 8: 0.6}, 0.6, 3, ""),
        ({0.5: 0.58, 1: 0.59}, 0.6, 0.5, ""),
        ({1: 0.1, 8: 0.4}, 0.6, None, "more than 8 times its size"),
        ({}, 0.0, None, "no block was used again"),
    ],
)
def test_the_smallest_size_that_finds_nearly_all_is_recommended(
    rates: dict[float, float], unlimited: float, gib: float | None, why_not: str
) -> None:
    planned = plan_of("node", stats(rates, unlimited))
    assert planned.recommended_bytes == (None if gib is None else int(gib * (1 << 30)))
    assert planned.why_not == why_not


def test_a_node_that_has_seen_little_is_left_alone() -> None:
    planned = plan_of("node", stats({1: 0.5}, 0.5, sampled=SAMPLED_MIN - 1))
    assert planned.recommended_bytes is None
    assert "too few uses" in planned.why_not
    fresh = plan_of("node", {"capacity_bytes": 1 << 30})
    assert (fresh.hit_rate, fresh.unlimited_hit_rate) == ({}, None)


def test_without_a_node_it_says_how_to_start_one(place: Place) -> None:
    said = place.here("plan")
    assert (said.returncode, said.stdout) == (1, b"")
    assert b"no memory node on this host: `kvstore up` starts one" in said.stderr
