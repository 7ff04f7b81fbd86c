"""In the real engine: weights that change under a path and in place, sleep, and a reset of all."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from connector_parts import wait_for
from engines import EngineProcess, EngineSettings, ModelShape, build_model, kv_transfer
from redis_servers import RedisServer

from kvstore import Limits
from kvstore.client.nodes.directory import HERE_BELIEVED_S
from kvstore.index.open import open_guarded
from kvstore.node.daemon import Node, NodeConfig

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]
BLOCK = 64
T = 4 * BLOCK
PREFIX = "kv:weights"
TESTS = Path(__file__).parents[4]
PATH = os.pathsep.join(
    [str(TESTS.parent), str(TESTS / "support" / "vllm_engines"), os.environ.get("PYTHONPATH", "")]
)


class Host:
    """A node, and engines beside it; another host is another run directory."""

    def __init__(self, redis: RedisServer, run_dir: Path) -> None:
        self.redis, self.run_dir = redis, run_dir
        self.opened = open_guarded(
            redis.url, key_prefix=PREFIX, run_dir=run_dir, limits=Limits(redis_timeout_s=1.0)
        )
        config = NodeConfig(run_dir=run_dir, size_bytes=64 << 20, key_prefix=PREFIX)
        self.node = Node(config, self.opened.index).start()

    def engine(self, model: Path, log: Path, **extra: Any) -> EngineProcess:
        transfer = kv_transfer(
            "kv_both",
            url=self.redis.url,
            run_dir=str(self.run_dir),
            key_prefix=PREFIX,
            block_tokens=BLOCK,
            lookup_timeout_s=1.0,
            load_timeout_s=30.0,
            **extra,
        )
        settings = EngineSettings(
            connector=transfer, max_batched_tokens=T, env={"PYTHONPATH": PATH}
        )
        return EngineProcess(model, settings, log=log)

    @property
    def blocks(self) -> int:
        return int(self.node.stats()["blocks"])

    def close(self) -> None:
        self.node.stop()
        self.opened.close()


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with (
        RedisServer() as redis,
        tempfile.TemporaryDirectory(prefix="kw1") as here,
        tempfile.TemporaryDirectory(prefix="kw2") as there,
    ):
        both = [Host(redis, Path(here)), Host(redis, Path(there))]
        yield both
        for host in both:
            host.close()


def prompt(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 500) for _ in range(T + 2)]]


def cached(engine: EngineProcess, wanted: list[list[int]]) -> int:
    (result,) = engine.generate(wanted, max_tokens=4)
    return result.cached_tokens


def test_other_weights_at_the_same_path_share_nothing_and_the_same_ones_do(
    hosts: list[Host], tmp_path: Path
) -> None:
    here, _ = hosts
    first = build_model(tmp_path / "first")
    second = build_model(tmp_path / "second", ModelShape(seed=8))
    mounted, wanted, found = tmp_path / "mounted", prompt(1), []
    for weights in (first, second, first):
        shutil.rmtree(mounted, ignore_errors=True)
        shutil.copytree(weights, mounted)
        with here.engine(mounted, tmp_path / f"engine{len(found)}.log") as engine:
            found.append(cached(engine, wanted))
            engine.drain()
    assert found == [0, 0, T]


@pytest.mark.covers("sleep, reset, new weights", "engine")
def test_an_engine_that_sleeps_changes_its_weights_and_resets(
    hosts: list[Host], tmp_path: Path
) -> None:
    """All in process: nothing steps the engine but a request."""
    here, there = hosts
    model = build_model(tmp_path / "model")
    other = build_model(tmp_path / "other", ModelShape(seed=8))
    wanted = prompt(2)
    with (
        closing(here.engine(model, tmp_path / "one.log")) as one,
        closing(there.engine(model, tmp_path / "two.log")) as two,
    ):
        assert cached(two, wanted) == 0
        two.drain()
        wait_for(lambda: there.blocks == T // BLOCK, "the other engine's blocks")
        assert cached(one, wanted) == 0, "the hosts have no way to each other"

        # Sleep, with saves in flight: nobody loses anything.
        one.call("sleep", level=1)
        one.call("wake_up")
        cached(one, wanted)
        one.drain()
        wait_for(lambda: here.blocks == T // BLOCK, "its own blocks")
        one.call("sleep", level=1)
        one.call("wake_up")
        assert (here.blocks, there.blocks) == (T // BLOCK, T // BLOCK)
        assert cached(one, wanted) == T, "its own cache is empty, the store is not"

        # While the store is down, too.
        here.node.stop()
        one.call("sleep", level=1)
        one.call("wake_up")
        assert one.call("reset", connector=False)
        here.node = Node(here.node.config, here.opened.index).start()
        # What the former start held is right while it is mapped, and not what this is about.
        time.sleep(2 * HERE_BELIEVED_S)

        # Other weights in place: nothing older, from the store or from the engine.
        before = one.generate(wanted, max_tokens=4)
        one.drain()
        assert before[0].cached_tokens == 0
        one.call("sleep", level=2)
        one.call("wake_up")
        one.call("reload", path=str(other))
        one.call("set_weight_version", version="1")
        after = one.generate(wanted, max_tokens=4)
        one.drain()
        assert after[0].cached_tokens == 0
        assert after[0].tokens != before[0].tokens
        one.call("sleep", level=1)
        one.call("wake_up")
        again = one.generate(wanted, max_tokens=4)
        assert again[0].cached_tokens == T, "of these weights it finds what it saved"
        assert again[0].tokens == after[0].tokens
        one.drain()

        # A reset that was asked for: on all nodes, for all engines.
        assert cached(two, wanted) == T
        assert one.call("reset", connector=True)
        wait_for(lambda: (here.blocks, there.blocks) == (0, 0), "all nodes to have dropped it")
        two.call("sleep", level=1)
        two.call("wake_up")
        assert cached(two, wanted) == 0
