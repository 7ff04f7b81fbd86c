"""vLLM's own tiering manager over the store: real Redis, real memory nodes, vLLM's own memory.

An engine here is `TieringOffloadingSpec`'s scheduler side, which makes our tier as it would from
a command line; what its workers would copy from a device is written into its host memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from stores import NodeProcess

from kvstore import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from redis_servers import RedisServer

pytestmark = pytest.mark.vllm

CHUNK_BYTES = 64 << 10
CHUNKS = 16
PATIENCE_S = 20.0


def config(settings: dict[str, Any], behind: Sequence[Any] = (), **changes: Any) -> Any:
    """`behind` are further tiers, which are asked after ours."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    tier = {
        "type": "KVStoreTier",
        "module_path": "connector.adapters.vllm.tier",
        "weights_id": "w",
        **settings,
    }
    fields = {
        "groups": (OffloadingGroupConfig(16, ("layer",), 0),),
        "worker_kv_bytes_per_block": CHUNK_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": {
            "cpu_bytes_to_use": CHUNKS * CHUNK_BYTES,
            "secondary_tiers": [tier, *behind],
        },
        "engine_id": uuid4().hex,
        "model": OffloadingModelConfig("m", "bfloat16"),
        "cache": OffloadingCacheConfig(16, 1),
        "parallel": OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    }
    return OffloadingConfig(**{**fields, **changes})


class Engine:
    """vLLM's scheduler side of offloading."""

    def __init__(self, node: NodeProcess, settings: dict[str, Any], **changes: Any) -> None:
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        spec = TieringOffloadingSpec(config({**node.engine_settings, **settings}, **changes))
        self.manager: Any = spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.memory = self.manager.primary_tier.get_kv_memoryview().cast("B")

    def request(self) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        request = ReqContext(req_id=uuid4().hex)
        self.manager.on_new_request(request)
        return request

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.005)

    def until(self, done: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < give_up_at
            self.step()

    def offload(self, keys: list[bytes], payloads: list[bytes]) -> None:
        """What a worker has copied from its device, saved to the store."""
        request = self.request()
        spec = self.manager.prepare_store(keys, request).store_spec
        for chunk, payload in zip(spec.chunk_ids, payloads, strict=True):
            self.memory[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES] = payload
        self.manager.complete_store(keys, request)
        self.until(self.idle)

    def drop(self, keys: list[bytes]) -> None:
        dropped = self.tier._store.writer.drop(self.tier._keys(keys))
        assert dropped == [True] * len(keys)

    def idle(self) -> bool:
        self.manager._process_finished_jobs()
        return not self.manager._jobs

    def find(self, keys: list[bytes]) -> list[bytes | None]:
        """What each key leads to, None for a miss; asked step by step as vLLM does."""
        from vllm.v1.kv_offload.base import LookupResult

        request = self.request()
        found: dict[bytes, Any] = {}

        def all_known() -> bool:
            for key in keys:
                if found.get(key) not in (LookupResult.HIT, LookupResult.MISS):
                    found[key] = self.manager.lookup(key, request)
            return all(found[k] in (LookupResult.HIT, LookupResult.MISS) for k in keys)

        self.until(all_known)
        hits = [key for key in keys if found[key] is LookupResult.HIT]
        chunks = dict(zip(hits, self.manager.prepare_load(hits, request).chunk_ids, strict=True))
        out = [
            bytes(self.memory[chunks[k] * CHUNK_BYTES : (chunks[k] + 1) * CHUNK_BYTES])
            if k in chunks
            else None
            for k in keys
        ]
        self.manager.complete_load(hits, request)
        self.manager.on_request_finished(request)
        return out

    def close(self) -> None:
        self.memory.release()
        self.manager.shutdown()


Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def node(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with NodeProcess(redis_server) as node:
        yield node


@pytest.fixture
def make(node: NodeProcess) -> Iterator[Make]:
    engines: list[Engine] = []

    def one(settings: dict[str, Any] | None = None, **changes: Any) -> Engine:
        engines.append(Engine(node, settings or {}, **changes))
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()


def chunks(count: int, group: int = 0) -> tuple[list[bytes], list[bytes]]:
    from vllm.v1.kv_offload.base import make_offload_key

    keys = [bytes(make_offload_key(os.urandom(32), group)) for _ in range(count)]
    return keys, [os.urandom(CHUNK_BYTES) for _ in range(count)]


@pytest.mark.covers("tier of vLLM's own offloading", "memory")
def test_what_one_engine_offloaded_another_finds_byte_for_byte(make: Make) -> None:
    producer, consumer = make(), make()
    keys, payloads = chunks(CHUNKS // 2)
    producer.offload(keys, payloads)
    assert consumer.find(keys) == payloads


def test_what_nobody_offloaded_is_a_miss_among_what_is_there(make: Make) -> None:
    producer, consumer = make(), make()
    keys, payloads = chunks(2)
    producer.offload(keys, payloads)
    unknown, _ = chunks(1)
    assert consumer.find([keys[0], *unknown, keys[1]]) == [payloads[0], None, payloads[1]]


def test_what_a_full_host_memory_dropped_comes_back_from_the_store(make: Make) -> None:
    engine = make()
    first, payloads = chunks(CHUNKS)
    engine.offload(first, payloads)
    engine.offload(*chunks(CHUNKS))
    assert engine.find(first[:4]) == payloads[:4]


def test_what_either_of_the_store_and_vllms_own_tier_of_files_has_lost_comes_from_the_other(
    make: Make, tmp_path: Path
) -> None:
    behind = [{"type": "fs", "root_dir": str(tmp_path)}]
    producer, consumer = make(behind=behind), make(behind=behind)
    keys, payloads = chunks(5)
    producer.offload(keys, payloads)
    producer.drop([*keys[:2], keys[4]])
    files = list(tmp_path.rglob("*.bin"))
    assert len(files) == len(keys)
    for path in files:
        if any(key[:32].hex() in path.name for key in keys[2:]):
            path.unlink()
    assert len(list(tmp_path.rglob("*.bin"))) == 2
    assert consumer.find(keys) == [*payloads[:4], None]


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"weights_id": "others"}, {}),
        ({}, {"kv_cache_layout": "HND"}),
        ({}, {"model": ("m", "float16")}),
        ({}, {"worker_kv_bytes_per_block": CHUNK_BYTES // 2}),
    ],
)
def test_engines_whose_chunks_hold_other_bytes_share_nothing(
    make: Make, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    from vllm.v1.kv_offload.config import OffloadingModelConfig

    if "model" in changes:
        changes = {"model": OffloadingModelConfig(*changes["model"])}
    keys, payloads = chunks(2)
    make().offload(keys, payloads)
    assert make(settings, **changes).find(keys) == [None, None]


def test_engines_that_hash_otherwise_share_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, payloads = chunks(1)
    make().offload(keys, payloads)
    monkeypatch.setattr("vllm.v1.core.kv_cache_utils.NONE_HASH", b"another seed", raising=False)
    assert make().find(keys) == [None]


def test_groups_of_one_token_run_are_apart(make: Make) -> None:
    keys, payloads = chunks(1)
    make().offload(keys, payloads)
    other = keys[0][:-4] + (1).to_bytes(4, "big")
    assert make().find([other]) == [None]


def test_a_chunk_that_is_gone_when_it_is_loaded_is_a_miss_and_not_asked_for_ever(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = make(), make()
    keys, payloads = chunks(3)
    producer.offload(keys, payloads)
    store = consumer.tier._store
    views, loads = store.views, []

    def one_is_gone(found: Any, *rest: Any) -> Any:
        loads.append(len(found))
        return (view if i != 1 else None for i, view in enumerate(views(found, *rest)))

    monkeypatch.setattr(store, "views", one_is_gone)
    assert consumer.find(keys) == [payloads[0], None, payloads[2]]
    assert loads == [3]


def test_a_chunk_that_goes_while_it_is_copied_is_a_miss(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied may be another's by then (rule 4)."""
    from connector.adapters.vllm import tier

    producer, consumer = make(), make()
    keys, payloads = chunks(3)
    producer.offload(keys, payloads)
    scatter, copied = tier.scatter, []

    def one_goes(*args: Any) -> None:
        scatter(*args)
        copied.append(args)
        if len(copied) == 2:
            consumer.drop(keys[1:2])

    monkeypatch.setattr(tier, "scatter", one_goes)
    assert consumer.find(keys) == [payloads[0], None, payloads[2]]


def test_without_a_node_and_an_index_everything_is_a_miss_and_vllm_goes_on(
    redis_server: RedisServer,
) -> None:
    node = NodeProcess(redis_server)
    engine = Engine(node, {"lookup_timeout_s": 0.2})
    try:
        keys, payloads = chunks(2)
        engine.offload(keys, payloads)
        node.kill()
        others, more = chunks(2)
        engine.offload(others, more)
        fresh, _ = chunks(1)
        assert engine.find([*others, *fresh]) == [*more, None]
    finally:
        engine.close()
        node.close()


def test_reset_waits_until_nothing_uses_vllms_memory(make: Make) -> None:
    engine = make()
    keys, payloads = chunks(4)
    request = engine.request()
    spec = engine.manager.prepare_store(keys, request).store_spec
    for chunk, payload in zip(spec.chunk_ids, payloads, strict=True):
        engine.memory[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES] = payload
    engine.manager.complete_store(keys, request)
    engine.tier.drain_jobs()
    assert engine.idle()


def test_settings_are_checked_when_the_tier_is_made(node: NodeProcess) -> None:
    with pytest.raises(UsageError, match="weights_id"):
        Engine(node, {"weights_id": None})
    with pytest.raises(UsageError, match="lookup_timeout_s"):
        Engine(node, {"lookup_timeout": 3})


def test_trap_chunks_whose_name_leaves_out_whose_tokens_they_have_are_refused(
    node: NodeProcess,
) -> None:
    """Of vLLM's own identity of a chunk, by which its file system tier names files, too."""
    from vllm.v1.kv_offload.config import OffloadingParallelConfig

    for dcp_size, right in ((1, True), (2, False)):
        parallel = OffloadingParallelConfig(0, 2, 2, 1, 1, dcp_size, 0, 1, None, False)
        if right:
            Engine(node, {}, parallel=parallel).close()
        else:
            with pytest.raises(UsageError, match="decode_context_parallel_size"):
                Engine(node, {}, parallel=parallel)
