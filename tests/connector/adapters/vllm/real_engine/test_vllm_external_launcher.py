"""Real vLLM engines of two processes that torchrun starts, over the real store.

Each process has a scheduler and one worker; both must do the same in every step.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from connector_parts import wait_for
from engines import build_model, kv_transfer
from launched_engine import LaunchedEngine
from redis_servers import RedisServer

from kvstore import Limits
from kvstore.index.open import open_guarded
from kvstore.node.daemon import Node, NodeConfig

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two cores"),
]
BLOCK = 32
T = 8 * BLOCK
PREFIX = "kv:launched"
TESTS = Path(__file__).parents[4]
PATH = os.pathsep.join(
    [str(TESTS.parent), str(TESTS / "support" / "vllm_engines"), os.environ.get("PYTHONPATH", "")]
)


def prompts(count: int, seed: int, tokens: int = T + 2) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 500) for _ in range(tokens)] for _ in range(count)]


def tokens_of(answers: list[Any]) -> list[Any]:
    return [[result["tokens"] for result in answer] for answer in answers]


def cached_of(answers: list[Any]) -> list[Any]:
    return [[result["cached_tokens"] for result in answer] for answer in answers]


class Store:
    """A Redis and a memory node whose bytes a test may change."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.redis = RedisServer()
        self.opened = open_guarded(
            self.redis.url, key_prefix=PREFIX, run_dir=run_dir, limits=Limits(redis_timeout_s=1.0)
        )
        before = set(Path("/dev/shm").iterdir())
        self.node = Node(
            NodeConfig(run_dir=run_dir, size_bytes=32 << 20, key_prefix=PREFIX), self.opened.index
        )
        self.node.start()
        made = set(Path("/dev/shm").iterdir()) - before
        self._payload = max(made, key=lambda path: path.stat().st_size)

    def settings(self, **extra: Any) -> dict[str, Any]:
        """`EngineSettings` of one process."""
        transfer = kv_transfer(
            url=self.redis.url,
            run_dir=str(self.run_dir),
            key_prefix=PREFIX,
            block_tokens=BLOCK,
            **{"lookup_timeout_s": 1.0, "load_timeout_s": 30.0, "verify": "always", **extra},
        )
        return {
            "connector": transfer,
            "max_batched_tokens": T,
            "max_model_len": 1024,
            "prefix_caching": False,
            "kv_blocks": 44,
            "extra": {
                "distributed_executor_backend": "external_launcher",
                "tensor_parallel_size": 2,
            },
        }

    @property
    def blocks(self) -> int:
        return int(self.node.stats()["blocks"])

    def spoil(self) -> None:
        """Change every byte of every payload."""
        payload = np.memmap(self._payload, np.uint8, "r+")
        payload[payload != 0] ^= 0xFF

    def close(self) -> None:
        self.node.stop()
        self.opened.close()
        self.redis.close()


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="kve") as path:
        store = Store(Path(path))
        yield store
        store.close()


Start = Callable[..., LaunchedEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[LaunchedEngine] = []
    model = build_model(tmp_path / "llama")

    def one(settings: list[dict[str, Any]]) -> LaunchedEngine:
        engines.append(LaunchedEngine(tmp_path / f"e{len(engines)}", model, settings, PATH))
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()


@pytest.mark.covers("external_launcher (torchrun)", "engine")
def test_two_processes_load_what_two_others_saved_and_stay_together_when_one_cannot(
    start: Start, store: Store
) -> None:
    """One test, for its engines take half a minute to start."""
    wanted, spoilt, crowd = prompts(3, seed=1), prompts(2, seed=2), prompts(6, seed=3)

    first = start([store.settings()] * 2)
    computed = first.call("generate", prompts=wanted, max_tokens=16, abort_after_s={})
    other = first.call("generate", prompts=spoilt, max_tokens=16, abort_after_s={})
    # 44 blocks of 32 tokens hold four of six requests: the others are preempted.
    crowded = first.call("generate", prompts=crowd, max_tokens=64, abort_after_s={})
    first.call("drain")
    for answers in (computed, other, crowded):
        assert tokens_of(answers)[0] == tokens_of(answers)[1]
        assert cached_of(answers)[0] == cached_of(answers)[1]
        assert cached_of(answers)[0][0] == 0
    wait_for(lambda: store.blocks >= 11 * 8 * 2, "the blocks of both shards to be saved")
    first.close()

    # Only the second process would notice wrong bytes.
    second = start([store.settings(verify="never"), store.settings()])
    loaded = second.call("generate", prompts=wanted, max_tokens=16, abort_after_s={})
    assert cached_of(loaded) == [[T] * 3] * 2
    assert tokens_of(loaded) == tokens_of(computed)
    again = second.call("generate", prompts=crowd, max_tokens=64, abort_after_s={})
    assert tokens_of(again) == tokens_of(crowded)
    assert all(sum(cached) >= 4 * T for cached in cached_of(again))

    store.spoil()
    recomputed = second.call("generate", prompts=spoilt, max_tokens=16, abort_after_s={})
    assert tokens_of(recomputed) == tokens_of(other)
    assert cached_of(recomputed)[0] == cached_of(recomputed)[1]
    assert sum(cached_of(recomputed)[0]) < 2 * T
    said = second.log.read_text(errors="replace")
    assert said.count("Recovered from KV load failure") >= 2, "in both: not a mere miss"

    assert second.call("reset", connector=True) == [True, True]
    second.call("generate", prompts=wanted, max_tokens=4, abort_after_s={})

    one, another = prompts(2, seed=4)
    parted = second.call(
        "generate",
        max_tokens=4,
        abort_after_s={},
        by_rank=[{"prompts": [one]}, {"prompts": [another]}],
    )
    for answer in parted:
        assert "all processes must be given the same prompts" in answer["error"]
