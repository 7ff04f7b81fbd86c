"""Real vLLM engines, real processes, the real store: they share KV and give the same tokens.

Prompts are T + 2 tokens with T a multiple of the block, and every engine splits
its prefill at T, so that the tail runs through the same kernel shapes everywhere
(near-ties in bf16 would differ otherwise, for reasons that are not the store's).
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from connector_parts import wait_for
from engines import EngineProcess, EngineSettings, Generated, build_model, kv_transfer
from redis_servers import RedisServer, stopped, wait_until
from tiny_models import build_sliding

from kvstore import Limits
from kvstore.index.open import open_guarded
from kvstore.node.daemon import Node, NodeConfig
from kvstore.record import RECORD_BYTES
from kvstore.segment.header import SUPERBLOCK_BYTES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
BLOCK = 64
T = 8 * BLOCK
PREFIX = "kv:engines"
TESTS = Path(__file__).parents[4]
PATH = os.pathsep.join(
    [str(TESTS.parent), str(TESTS / "support" / "vllm_engines"), os.environ.get("PYTHONPATH", "")]
)


def prompts(count: int, seed: int, tokens: int = T + 2) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 500) for _ in range(tokens)] for _ in range(count)]


def tokens_of(results: list[Generated]) -> list[list[int]]:
    return [result.tokens for result in results]


class Store:
    """A Redis and a memory node that a test may take away."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.redis = RedisServer()
        self.url = self.redis.url
        self.opened = open_guarded(
            self.url, key_prefix=PREFIX, run_dir=run_dir, limits=Limits(redis_timeout_s=1.0)
        )
        self.node = Node(
            NodeConfig(run_dir=run_dir, size_bytes=256 << 20, key_prefix=PREFIX),
            self.opened.index,
        )
        self.node.start()

    def transfer(self, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
        settings = {"url": self.url, "run_dir": str(self.run_dir), "key_prefix": PREFIX}
        # A shared machine may take longer than a server would.
        patience = {"lookup_timeout_s": 1.0, "load_timeout_s": 30.0}
        return kv_transfer(role, **{**settings, **patience, "block_tokens": BLOCK, **extra})

    @property
    def blocks(self) -> int:
        return int(self.node.stats()["blocks"])

    def close(self) -> None:
        self.node.stop()
        self.opened.close()
        self.redis.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="kve") as path:
        store = Store(Path(path))
        yield store
        store.close()


Start = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    logs = tmp_path_factory.mktemp("logs")
    engines: list[EngineProcess] = []

    def one(
        connector: dict[str, Any] | None = None, path_of: Path | None = None, **settings: Any
    ) -> EngineProcess:
        settings = {"max_batched_tokens": T, "env": {"PYTHONPATH": PATH}, **settings}
        engine = EngineProcess(
            path_of or model,
            EngineSettings(connector=connector, **settings),
            log=logs / f"engine{len(engines)}.log",
        )
        engines.append(engine)
        return engine

    yield one
    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(EngineProcess.close, engines))


@pytest.fixture(scope="module")
def alone(start: Start) -> EngineProcess:
    """An engine without a store: what every other one must answer."""
    return start(None)


@pytest.fixture(scope="module")
def producer(start: Start, store: Store) -> EngineProcess:
    """With its scheduler in a process of its own, as under `vllm serve`."""
    return start(store.transfer("kv_producer"), in_process=False)


@pytest.fixture(scope="module")
def consumer(start: Start, store: Store) -> EngineProcess:
    return start(store.transfer("kv_consumer"))


def produce(producer: EngineProcess, store: Store, wanted: list[list[int]]) -> list[Generated]:
    """Run prompts on the producer and wait until their blocks are in the store."""
    before = store.blocks
    results = producer.generate(wanted)
    full = len(wanted) * (len(wanted[0]) // BLOCK)
    wait_for(lambda: store.blocks >= before + full, "the blocks to be saved")
    return results


@pytest.mark.smoke
@pytest.mark.covers("full attention", "engine")
def test_two_processes_share_kv_and_answer_alike(
    alone: EngineProcess, producer: EngineProcess, consumer: EngineProcess, store: Store
) -> None:
    wanted = prompts(4, seed=1)
    reference = tokens_of(alone.generate(wanted))
    assert tokens_of(produce(producer, store, wanted)) == reference
    loaded = consumer.generate(wanted)
    assert tokens_of(loaded) == reference
    assert [result.cached_tokens for result in loaded] == [T] * 4


@pytest.mark.long
def test_trap_negative_control_garbage_kv_fails_the_comparison(
    start: Start, alone: EngineProcess, producer: EngineProcess, store: Store
) -> None:
    wanted = prompts(3, seed=2)
    produce(producer, store, wanted)
    garbage = start(
        {
            **store.transfer("kv_consumer"),
            "kv_connector": "GarbageConnector",
            "kv_connector_module_path": "garbage_connector",
        }
    )
    results = garbage.generate(wanted)
    assert [result.cached_tokens for result in results] == [T] * 3
    assert tokens_of(results) != tokens_of(alone.generate(wanted))


@pytest.mark.smoke
@pytest.mark.covers("chunked prefill", "engine")
def test_chunked_prefill_and_long_prompts(
    alone: EngineProcess, producer: EngineProcess, consumer: EngineProcess, store: Store
) -> None:
    wanted = prompts(2, seed=3, tokens=3 * T + 2)  # four chunks
    reference = tokens_of(alone.generate(wanted))
    assert tokens_of(produce(producer, store, wanted)) == reference
    loaded = consumer.generate(wanted)
    assert tokens_of(loaded) == reference
    assert [result.cached_tokens for result in loaded] == [3 * T] * 2


@pytest.mark.long
def test_what_a_request_does_not_want_saved_is_in_no_segment(
    alone: EngineProcess, start: Start, tmp_path: Path
) -> None:
    """Of a prompt that must not be kept no byte reaches a node, and its answer is the same."""
    with tempfile.TemporaryDirectory(prefix="kve") as path:
        store = Store(Path(path))
        try:
            engine = start(store.transfer())
            produce(engine, store, prompts(1, seed=30))
            announced = store.node.announcement

            def memory() -> tuple[bytes, bytes]:
                """All but the node's signs of life."""
                heads = Path(announced.head_path).read_bytes()
                return Path(announced.data_path).read_bytes(), heads[SUPERBLOCK_BYTES:]

            before = memory()
            wanted = prompts(2, seed=31)
            skipped = engine.generate(wanted, kv_transfer_params={"skip_save": True})
            engine.drain()
            assert tokens_of(skipped) == tokens_of(alone.generate(wanted))
            assert memory() == before
            # The same engine, asked plainly: it is saved, so nothing else kept it out.
            produce(engine, store, prompts(1, seed=32))
            assert memory() != before
        finally:
            engine.close()
            store.close()


@pytest.mark.long
def test_after_ttl_s_nothing_that_an_engine_saved_is_in_a_segment(
    alone: EngineProcess, start: Start, tmp_path: Path
) -> None:
    """The next engine computes it, and its answer is the same."""
    with tempfile.TemporaryDirectory(prefix="kve") as path:
        store = Store(Path(path))
        engines = []
        try:
            memory = Path(store.node.announcement.data_path)
            engines.append(start(store.transfer(ttl_s=20)))
            wanted = prompts(2, seed=33)
            produce(engines[0], store, wanted)
            stored = store.node.stats()["stored"]
            assert stored > 0
            wait_until(lambda: store.blocks == 0, "all lives are over", 120.0)
            assert store.node.stats()["expired"] == stored
            assert written_pages(memory) <= 1, "where the node tried its memory"
            engines.append(start(store.transfer(ttl_s=20)))
            computed = engines[1].generate(wanted)
            assert [result.cached_tokens for result in computed] == [0, 0]
            assert tokens_of(computed) == tokens_of(alone.generate(wanted))
        finally:
            for engine in engines:
                engine.close()
            store.close()


def written_pages(memory: Path) -> int:
    """Pages of a segment that have anything but zeros in them."""
    raw = memory.read_bytes()
    return sum(any(raw[start : start + 4096]) for start in range(0, len(raw), 4096))


@pytest.mark.smoke
def test_aborts_while_loading_leave_the_engine_right(
    alone: EngineProcess, producer: EngineProcess, consumer: EngineProcess, store: Store
) -> None:
    wanted = prompts(4, seed=4)
    produce(producer, store, wanted)
    aborted = consumer.generate(wanted, abort_after_s={0: 0.0, 1: 0.002, 2: 0.004})
    assert [len(result.tokens) < 16 for result in aborted[:3]] == [True] * 3
    assert tokens_of(consumer.generate(wanted)) == tokens_of(alone.generate(wanted))


@pytest.mark.long
@pytest.mark.covers("preemption", "engine")
def test_trap_preemption_with_a_store_gives_what_no_store_gives(
    start: Start, alone: EngineProcess, store: Store
) -> None:
    """Six requests of 576 tokens in 80 blocks of 32: about four fit."""
    small = start(store.transfer(block_tokens=32), kv_blocks=80, max_model_len=1024)
    wanted = prompts(6, seed=5)
    reference = tokens_of(alone.generate(wanted, max_tokens=64))
    assert tokens_of(small.generate(wanted, max_tokens=64)) == reference
    small.drain()
    again = small.generate(wanted, max_tokens=64)
    assert tokens_of(again) == reference
    assert sum(result.cached_tokens for result in again) >= 4 * T


@pytest.mark.smoke
def test_trap_records_that_point_nowhere_are_computed_and_the_request_ends(
    alone: EngineProcess, producer: EngineProcess, start: Start, store: Store
) -> None:
    wanted = prompts(2, seed=6)
    produce(producer, store, wanted)
    redis = store.redis.admin()
    broken = 0
    for key in redis.scan_iter(count=1000):
        record = redis.get(key) if redis.type(key) == b"string" else b""
        if len(record) == RECORD_BYTES:
            redis.set(key, record[:-1] + bytes([record[-1] ^ 1]))
            broken += 1
    assert broken >= len(wanted) * T // BLOCK
    late = start(store.transfer("kv_consumer"))
    results = late.generate(wanted)
    assert tokens_of(results) == tokens_of(alone.generate(wanted))


@pytest.mark.long
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers need two cores")
@pytest.mark.covers("tensor parallel 1 and 2, mixed", "engine")
def test_engines_of_other_tensor_parallel_sizes_share_kv(start: Start, store: Store) -> None:
    """In float32: two workers add up in another order than one, which bf16 would show."""
    wide = {"dtype": "float32"}
    transfer = store.transfer(weights_id="mixed")
    two = {**wide, "tensor_parallel_size": 2}
    pair = start(transfer, in_process=False, cpus="0|1", extra=two)
    single = start(transfer, extra=wide)
    for writer, reader, shards, seed in ((pair, single, 2, 8), (single, pair, 1, 9)):
        wanted = prompts(3, seed=seed)
        before = store.blocks
        computed = writer.generate(wanted)
        assert [result.cached_tokens for result in computed] == [0] * 3
        if writer is single:
            single.drain()
        full = before + len(wanted) * T // BLOCK * shards
        wait_for(lambda full=full: store.blocks >= full, "the blocks to be saved")  # type: ignore[misc]
        loaded = reader.generate(wanted)
        assert [result.cached_tokens for result in loaded] == [T] * 3
        assert tokens_of(loaded) == tokens_of(computed)


class Switched(NamedTuple):
    """An engine that works layer by layer, and what is to go wrong in its loads."""

    engine: EngineProcess
    fault: Path
    log: Path


@pytest.fixture(scope="module")
def layerwise(
    start: Start, store: Store, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Switched]:
    fault = tmp_path_factory.mktemp("fault") / "fault"
    fault.write_text("")
    names = {"kv_connector": "SwitchedConnector", "kv_connector_module_path": "garbage_connector"}
    engine = start(
        {**store.transfer(layerwise=True), **names},
        env={"PYTHONPATH": PATH, "KVSTORE_TEST_FAULT": str(fault)},
        # vLLM undoes a failed load of a step only without it.
        extra={"async_scheduling": False},
    )
    assert engine.log is not None
    yield Switched(engine, fault, engine.log)
    fault.write_text("")


@pytest.mark.long
@pytest.mark.covers("layer by layer", "engine")
def test_layer_by_layer_loads_and_saves_give_the_same_tokens(
    alone: EngineProcess,
    producer: EngineProcess,
    consumer: EngineProcess,
    layerwise: Switched,
    store: Store,
) -> None:
    theirs, own = prompts(3, seed=11), prompts(2, seed=12, tokens=3 * T + 2)  # four chunks
    produce(producer, store, theirs)
    loaded = layerwise.engine.generate(theirs)
    assert [result.cached_tokens for result in loaded] == [T] * 3
    assert tokens_of(loaded) == tokens_of(alone.generate(theirs))
    reference = tokens_of(alone.generate(own))
    assert tokens_of(produce(layerwise.engine, store, own)) == reference
    again = consumer.generate(own)
    assert [result.cached_tokens for result in again] == [3 * T] * 2
    assert tokens_of(again) == reference


@pytest.mark.long
def test_trap_layer_by_layer_negative_control_garbage_kv_fails_the_comparison(
    alone: EngineProcess, producer: EngineProcess, layerwise: Switched, store: Store
) -> None:
    wanted = prompts(2, seed=13)
    produce(producer, store, wanted)
    layerwise.fault.write_text("zeros")
    results = layerwise.engine.generate(wanted)
    layerwise.fault.write_text("")
    assert [result.cached_tokens for result in results] == [T] * 2
    assert tokens_of(results) != tokens_of(alone.generate(wanted))


@pytest.mark.long
def test_blocks_that_vanish_while_layers_are_read_cost_a_recompute(
    alone: EngineProcess,
    producer: EngineProcess,
    consumer: EngineProcess,
    layerwise: Switched,
    store: Store,
) -> None:
    """The first layers have used them by then; what was computed so must not be kept."""
    wanted = prompts(2, seed=14)
    reference = tokens_of(alone.generate(wanted))
    produce(producer, store, wanted)
    layerwise.fault.write_text("vanish")
    results = layerwise.engine.generate(wanted)
    layerwise.fault.write_text("")
    assert [result.cached_tokens for result in results] == [T] * 2, "loads were planned"
    recovered = re.findall(r"Recovered from KV load failure: (\d+) req", layerwise.log.read_text())
    assert sum(map(int, recovered)) == 2, "in one step of the engine or in two"
    assert tokens_of(results) == reference
    assert tokens_of(layerwise.engine.generate(wanted)) == reference, "its own prefix cache"
    layerwise.engine.drain()
    again = consumer.generate(wanted)
    assert [result.cached_tokens for result in again] == [T] * 2, "computed again and saved"
    assert tokens_of(again) == reference


@pytest.mark.long
@pytest.mark.covers("sliding + full attention", "engine")
def test_a_model_with_sliding_windows_shares_kv(
    start: Start, store: Store, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two KV cache groups, with vLLM's hybrid KV cache manager."""
    model = build_sliding(tmp_path_factory.mktemp("hybrid"))
    transfer = store.transfer(weights_id="hybrid")
    writer = start(transfer, path_of=model)
    wanted = prompts(3, seed=10)
    before = store.blocks
    computed = writer.generate(wanted)
    writer.drain()
    assert store.blocks == before + 2 * len(wanted) * T // BLOCK, "both groups' blocks"
    reader = start(transfer, path_of=model)
    loaded = reader.generate(wanted)
    assert [result.cached_tokens for result in loaded] == [T] * 3
    assert tokens_of(loaded) == tokens_of(computed)


@pytest.mark.smoke
def test_a_stopped_redis_costs_nothing_here_a_dead_node_a_recompute(
    alone: EngineProcess, producer: EngineProcess, consumer: EngineProcess, store: Store
) -> None:
    """Runs last: it takes the store away."""
    wanted = prompts(8, seed=7)
    reference = tokens_of(alone.generate(wanted))
    produce(producer, store, wanted[:4])
    with stopped(store.redis):
        consumer.generate(prompts(1, seed=8))  # finds out that Redis hangs
        loaded = consumer.generate(wanted[:2])
        assert tokens_of(loaded) == reference[:2]
        assert [result.cached_tokens for result in loaded] == [T] * 2
    store.node.stop()
    assert tokens_of(consumer.generate(wanted[2:4])) == reference[2:4]
    assert tokens_of(producer.generate(wanted[4:6])) == reference[4:6]
    store.redis.kill()
    started = time.monotonic()
    assert tokens_of(consumer.generate(wanted[6:])) == reference[6:]
    assert tokens_of(producer.generate(wanted[6:])) == reference[6:]
    assert time.monotonic() - started < 60
