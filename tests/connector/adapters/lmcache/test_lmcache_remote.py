"""LMCache's own remote backend, as it runs inside an engine's process, over real memory nodes."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from lmcache_objects import PATIENCE_S, PATIENT
from stores import NodeProcess

if TYPE_CHECKING:
    from redis_servers import RedisServer

pytestmark = pytest.mark.lmcache

CHUNK_TOKENS = 16
SECRET = {"KVSTORE_SECRET": "a secret that both hosts know"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache reports its use over the network unless told not to."""
    for name, value in {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", **SECRET}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Return LMCache's loop: it runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE_S)
    loop.close()


class Engine:
    """LMCache's backend, allocator and configuration of one engine's worker."""

    def __init__(self, node: NodeProcess, loop: asyncio.AbstractEventLoop, **settings: Any) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        prefix = "remote_storage_plugin.kvstore."
        own = {
            "module_path": "connector.adapters.lmcache",
            "class_name": "KVStoreConnectorAdapter",
            **node.engine_settings,
            "weights_id": "w",
            "limits": PATIENT,
            **settings,
        }
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            max_local_cpu_size=0.05,
            remote_storage_plugins=["kvstore"],
            remote_serde="naive",
            extra_config={prefix + name: value for name, value in own.items()},
        )
        metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(4, 2, CHUNK_TOKENS, 2, 16),
            chunk_size=CHUNK_TOKENS,
        )
        self.memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self.backend = RemoteBackend(
            config, metadata, loop, self.memory, dst_device="cpu", plugin_name="kvstore"
        )
        assert self.backend.connection is not None, "LMCache could not make it"
        self.connector = self.backend.connection.getWrappedConnector()

    def chunk(self, seed: int, tokens: int = CHUNK_TOKENS) -> Any:
        """Return a chunk of so many tokens, filled from its seed."""
        import torch
        from lmcache.v1.memory_management import MemoryFormat

        shape = torch.Size([2, 4, tokens, 32])
        obj = self.memory.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        view = memoryview(obj.byte_array).cast("B")
        view[:] = random.Random(seed).randbytes(len(view))
        return obj

    def save(self, keys: list[Any], objs: list[Any]) -> None:
        done = threading.Semaphore(0)
        self.backend.batched_submit_put_task(
            keys, objs, on_complete_callback=lambda _: done.release()
        )
        for _ in keys:
            assert done.acquire(timeout=PATIENCE_S)

    def close(self) -> None:
        self.backend.close()


def cache_keys(count: int, **changes: Any) -> list[Any]:
    import torch
    from lmcache.utils import CacheEngineKey

    fields = {"model_name": "m", "world_size": 1, "worker_id": 0, "dtype": torch.bfloat16}
    return [
        CacheEngineKey(chunk_hash=random.getrandbits(63), **{**fields, **changes})
        for _ in range(count)
    ]


def payload(obj: Any) -> bytes:
    return bytes(memoryview(obj.byte_array).cast("B"))


@pytest.fixture
def engine(node: NodeProcess, loop: asyncio.AbstractEventLoop) -> Iterator[Engine]:
    made = Engine(node, loop)
    yield made
    made.close()


def until(done: Any) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


@pytest.mark.covers("LMCache inside the engine's process", "memory")
def test_chunks_come_back_in_another_process_and_from_another_host(
    redis_server: RedisServer, loop: asyncio.AbstractEventLoop
) -> None:
    listen = ("--listen", "127.0.0.1:0")
    with (
        NodeProcess(redis_server, options=listen, environment=SECRET) as here,
        NodeProcess(
            redis_server, options=listen, environment=SECRET, key_prefix=here.key_prefix
        ) as there,
    ):
        first, second, third = (Engine(node, loop) for node in (here, here, there))
        keys = cache_keys(5)
        objs = [first.chunk(i) for i in range(5)]
        expected = [payload(obj) for obj in objs]
        first.save(keys, objs)
        for other in (second, third):
            assert other.backend.batched_contains([*keys, *cache_keys(1)]) == 5
            assert other.backend.contains(keys[3])
            assert not other.backend.contains(cache_keys(1)[0])
            loaded = other.backend.batched_get_blocking([*keys, *cache_keys(1)])
            assert [None if obj is None else payload(obj) for obj in loaded] == [*expected, None]
            one = other.backend.get_blocking(keys[2])
            assert payload(one) == expected[2]
            assert one.metadata.shape == objs[2].metadata.shape
        for each in (first, second, third):
            each.close()


def test_a_chunk_that_is_not_full_comes_back_with_its_shape(engine: Engine) -> None:
    keys, obj = cache_keys(1), engine.chunk(1, tokens=5)
    expected = payload(obj)
    engine.save(keys, [obj])
    loaded = engine.backend.get_blocking(keys[0])
    assert list(loaded.metadata.shape) == [2, 4, 5, 32]
    assert payload(loaded) == expected


def test_prefetching_gives_the_leading_run_and_takes_no_more_memory(
    engine: Engine, loop: asyncio.AbstractEventLoop
) -> None:
    keys = cache_keys(4)
    engine.save([keys[i] for i in (0, 1, 3)], [engine.chunk(i) for i in (0, 1, 3)])

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE_S)

    assert run(engine.backend.batched_async_contains("id", keys)) == 2
    free = engine.memory.memory_allocator
    before = _used(free)
    loaded = run(engine.backend.batched_get_non_blocking("id", keys))
    assert len(loaded) == 2
    for obj in loaded:
        obj.ref_count_down()
    assert _used(free) == before, "what came after the gap was given back"


def _used(allocator: Any) -> int:
    return int(allocator.pin_allocator.total_allocated_size)


def test_saving_holds_the_memory_no_longer_than_it_takes(engine: Engine) -> None:
    keys, objs = cache_keys(3), [engine.chunk(i) for i in range(3)]
    engine.save(keys, objs)
    assert [obj.get_ref_count() for obj in objs] == [1] * 3


@pytest.mark.parametrize("given_up", ["while it waits", "when it was refused"])
def test_trap_a_save_that_never_began_gives_the_memory_back(
    engine: Engine,
    loop: asyncio.AbstractEventLoop,
    monkeypatch: pytest.MonkeyPatch,
    given_up: str,
) -> None:
    connector, (key,), obj = engine.connector, cache_keys(1), engine.chunk(1)
    refuse: list[Any] = []
    monkeypatch.setattr(connector._tasks, "submit", lambda task, failed: refuse.append(failed))

    async def give_up() -> None:
        saving = asyncio.ensure_future(connector.put(key, obj))
        await asyncio.sleep(0)
        assert obj.get_ref_count() == 2
        if given_up == "when it was refused":
            refuse.pop()()
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving

    asyncio.run_coroutine_threadsafe(give_up(), loop).result(PATIENCE_S)
    for failed in refuse:  # as when LMCache ends
        failed()
    assert obj.get_ref_count() == 1


def test_what_is_removed_is_gone_and_listed_no_more(
    engine: Engine, loop: asyncio.AbstractEventLoop
) -> None:
    keys = cache_keys(3)
    engine.save(keys, [engine.chunk(i) for i in range(3)])

    def listed() -> list[str]:
        listing = engine.connector.list()
        return list(asyncio.run_coroutine_threadsafe(listing, loop).result(PATIENCE_S))

    assert listed() == [key.to_string() for key in keys]
    assert engine.backend.remove(keys[0])
    assert not engine.backend.remove(keys[0])
    assert not engine.backend.contains(keys[0])
    assert listed() == [key.to_string() for key in keys[1:]]


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "n"},
        {"world_size": 2},
        {"worker_id": 1},
        {"dtype": "float16"},
        {"request_configs": {"lmcache.tag.user": "ann"}},
    ],
    ids=str,
)
def test_trap_every_part_of_the_key_counts(engine: Engine, change: dict[str, Any]) -> None:
    from dataclasses import replace

    import torch

    (key,) = cache_keys(1)
    engine.save([key], [engine.chunk(1)])
    if "dtype" in change:
        change = {"dtype": getattr(torch, change["dtype"])}
    assert not engine.backend.contains(replace(key, **change))
    assert not engine.backend.contains(key.get_first_layer())
    assert engine.backend.contains(key)


def test_trap_other_weights_are_misses(
    node: NodeProcess, engine: Engine, loop: asyncio.AbstractEventLoop
) -> None:
    keys = cache_keys(1)
    engine.save(keys, [engine.chunk(1)])
    other = Engine(node, loop, weights_id="w2")
    assert not other.backend.contains(keys[0])
    other.close()


def test_a_node_that_is_killed_is_misses_and_saves_that_lmcache_counts_as_failed(
    node: NodeProcess, engine: Engine
) -> None:
    keys = cache_keys(2)
    engine.save(keys[:1], [engine.chunk(1)])
    node.kill()
    node.forget()
    until(lambda: engine.backend.get_blocking(keys[0]) is None)
    obj = engine.chunk(2)
    engine.backend.submit_put_task(keys[1], obj)
    until(lambda: engine.backend.put_failed_count == 1)
    assert obj.get_ref_count() == 1
    assert engine.backend.batched_get_blocking(keys) == [None, None]


def test_every_method_of_lmcaches_connector_is_known() -> None:
    """From LMCache's own class: one that is new there must be implemented or waived here."""
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

    from connector.adapters.lmcache.remote import KVStoreRemoteConnector

    inherited = {
        "reshape_partial_chunk",  # chunks here have their shape with them
        "post_init",
        "support_ping",  # a store that is away is misses at once, and saves go on when it is back
        "ping",
    }
    interface = {name for name in vars(RemoteConnector) if not name.startswith("_")}
    ours = {name for name in vars(KVStoreRemoteConnector) if not name.startswith("_")}
    assert interface - ours == inherited
    assert ours <= interface


def test_the_weights_must_be_named(node: NodeProcess, loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(AssertionError, match="could not make"):
        Engine(node, loop, weights_id=None)
