"""LMCache servers of several hosts share chunks, and LMCache counts, lists and deletes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cluster
import pytest
from lmcache_objects import (
    PATIENCE_S,
    PATIENT,
    ROOT,
    SIZE,
    adapter_of,
    fills,
    load,
    look_up,
    object_keys,
    objects,
    spec_of,
    store,
)
from stores import MIB, NodeProcess

from kvstore.testing.hosts import Hosts, why_not

if TYPE_CHECKING:
    from pathlib import Path

    from redis_servers import RedisServer

pytestmark = pytest.mark.lmcache

SECRET = {"KVSTORE_SECRET": "a secret that both hosts know"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache reports its use over the network unless told not to."""
    for name, value in {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", **SECRET}.items():
        monkeypatch.setenv(name, value)


def listening(redis_server: RedisServer, **options: Any) -> NodeProcess:
    listen = ("--listen", "127.0.0.1:0")
    return NodeProcess(redis_server, options=listen, environment=SECRET, **options)


@pytest.fixture
def apart(redis_server: RedisServer) -> Iterator[tuple[Any, Any]]:
    """Adapters of two hosts: they share the index, and no memory."""
    with (
        listening(redis_server) as near,
        listening(redis_server, key_prefix=near.key_prefix) as far,
    ):
        adapters = [adapter_of(one, limits=PATIENT) for one in (near, far)]
        yield adapters[0], adapters[1]
        for adapter in adapters:
            adapter.close()


@pytest.fixture
def adapter(node: NodeProcess) -> Iterator[Any]:
    made = adapter_of(node, limits=PATIENT)
    yield made
    made.close()


def until(done: Any) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


@pytest.mark.covers("LMCache's server, chunks of other hosts", "memory")
def test_chunks_of_another_host_are_found_and_loaded(apart: tuple[Any, Any]) -> None:
    near, far = apart
    ours, theirs = object_keys(3), object_keys(70)  # more than are read at a time
    store(near, ours, objects([1, 2, 3]))
    store(far, theirs, objects([i + 10 for i in range(70)]))
    mixed = [ours[0], *theirs, *object_keys(1), ours[2]]
    expected = [True] * 71 + [False, True]
    assert look_up(near, mixed) == expected
    targets = objects([0] * len(mixed))
    assert load(near, mixed, targets) == expected
    there = [obj for obj, ok in zip(targets, expected, strict=True) if ok]
    assert fills(there) == [1, *(i + 10 for i in range(70)), 3]
    near.submit_unlock(mixed)
    until(lambda: near.report_status()["locked"] == 0)


def test_trap_a_chunk_that_has_left_the_other_host_is_a_miss(apart: tuple[Any, Any]) -> None:
    near, far = apart
    keys = object_keys(2)
    store(far, keys, objects([1, 2]))
    assert look_up(near, keys) == [True, True]
    far.delete(keys[:1])
    assert load(near, keys, objects([0, 0])) == [False, True]
    until(lambda: look_up(near, keys[:1]) == [False])


def test_what_is_deleted_is_gone_on_every_host_and_counted_no_more(apart: tuple[Any, Any]) -> None:
    near, far = apart
    keys = object_keys(3)
    store(far, keys, objects([1, 2, 3]))
    near.delete(keys[:1])  # of another host, by who has not stored it
    assert load(far, keys, objects([0] * 3)) == [False, True, True]
    until(lambda: far.get_usage().total_bytes_used == 2 * SIZE)
    far.delete([*keys[1:2], *object_keys(1)])
    assert far.get_usage().total_bytes_used == SIZE
    assert load(near, keys, objects([0] * 3)) == [False, False, True]
    assert near.get_usage().total_bytes_used == 0


def test_what_is_locked_is_not_deleted(adapter: Any) -> None:
    keys = object_keys(2)
    store(adapter, keys, objects([1, 2]))
    assert look_up(adapter, keys[:1]) == [True]
    adapter.delete(keys)
    assert load(adapter, keys, objects([0, 0])) == [True, False]
    assert adapter.get_usage().total_bytes_used == SIZE


def test_usage_is_what_was_stored_by_salt_and_what_the_node_evicts_leaves_it(
    redis_server: RedisServer,
) -> None:
    with NodeProcess(redis_server, size=8 * MIB) as small:
        adapter = adapter_of(small, max_capacity_gb=1, limits=PATIENT)
        assert adapter.supports_global_eviction
        salted = object_keys(3, cache_salt="ann")
        store(adapter, [*salted, *object_keys(1)], objects([1] * 4))
        usage = adapter.get_usage()
        assert dict(usage.bytes_by_cache_salt) == {"ann": 3 * SIZE, "": SIZE}
        assert usage.total_bytes_used == 4 * SIZE
        assert usage.total_capacity_bytes == 1 << 30
        store(adapter, salted, objects([1] * 3))  # there already
        assert adapter.get_usage().total_bytes_used == 4 * SIZE
        for _ in range(20):  # three times as much as the node holds
            store(adapter, object_keys(20), objects([9] * 20))
        until(lambda: "ann" not in adapter.get_usage().bytes_by_cache_salt)
        until(lambda: adapter.get_usage().total_bytes_used <= 8 * MIB)
        assert adapter.get_usage().total_bytes_used >= 4 * MIB
        store(adapter, salted, objects([1] * 3))  # a second life is counted once
        assert adapter.get_usage().bytes_by_cache_salt["ann"] == 3 * SIZE
        adapter.close()


@pytest.mark.covers("LMCache's quotas by cache salt", "memory")
def test_lmcaches_quota_of_a_salt_is_kept_and_others_are_left_alone(adapter: Any) -> None:
    """LMCache's own controller, policy and quotas, one pass at a time."""
    from lmcache.v1.distributed.config import EvictionConfig
    from lmcache.v1.distributed.eviction_policy.isolated_lru import IsolatedLRUEvictionPolicy
    from lmcache.v1.distributed.quota_manager import QuotaManager
    from lmcache.v1.distributed.storage_controllers.eviction_controller import (
        L2AdapterEvictionState,
        L2EvictionController,
    )

    quotas = QuotaManager()
    quotas.set_quota("ann", 10 * SIZE)
    quotas.set_quota("bob", 100 * SIZE)
    config = EvictionConfig("IsolatedLRU", trigger_watermark=1.0, eviction_ratio=0.5)
    state = L2AdapterEvictionState(
        adapter_id=0,
        adapter=adapter,
        eviction_config=config,
    )
    assert isinstance(state.eviction_policy, IsolatedLRUEvictionPolicy)
    evict = L2EvictionController([state], quota_manager=quotas)._check_and_evict
    ann, bob = (object_keys(12, cache_salt=salt) for salt in ("ann", "bob"))
    for keys in (ann, bob):
        store(adapter, keys, objects([1] * 12))
    evict(state)
    usage = dict(adapter.get_usage().bytes_by_cache_salt)
    assert usage == {"ann": 6 * SIZE, "bob": 12 * SIZE}
    assert sum(load(adapter, ann, objects([0] * 12))) == 6
    assert load(adapter, bob, objects([0] * 12)) == [True] * 12
    evict(state)
    assert dict(adapter.get_usage().bytes_by_cache_salt) == usage
    quotas.delete_quota("ann")
    evict(state)
    assert load(adapter, ann, objects([0] * 12)) == [False] * 12


def test_the_listing_names_what_is_there_page_by_page(adapter: Any) -> None:
    mine, others = object_keys(5), object_keys(2, model_name="other")
    store(adapter, mine, objects([1] * 5))
    store(adapter, others, objects([1] * 2))
    adapter.delete(mine[1:2])
    first = adapter.list_l2_keys(page_size=3)
    names = [entry.key.chunk_hash_hex for entry in first.entries]
    assert names == [key.chunk_hash.hex() for key in (mine[0], mine[2], mine[3])]
    assert {entry.size_bytes for entry in first.entries} == {SIZE}
    rest = adapter.list_l2_keys(page_size=10, cursor=first.next_page_token)
    assert [entry.key.to_object_key() for entry in rest.entries] == [mine[4], *others]
    assert rest.next_page_token is None
    of_model = adapter.list_l2_keys(model_name="other").entries
    assert [entry.key.model_name for entry in of_model] == ["other"] * 2
    for wrong in ({"page_size": 0}, {"cursor": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            adapter.list_l2_keys(**wrong)


def test_a_large_store_does_not_hold_up_lookups_or_loads(adapter: Any) -> None:
    """Tasks run side by side: one that cannot end until another has does not block it."""
    import threading

    keys = object_keys(2)
    store(adapter, keys, objects([1, 2]))
    gate = threading.Event()
    save = adapter._pages.save
    adapter._pages.save = lambda *args: (gate.wait(PATIENCE_S), save(*args))[1]
    held = adapter.submit_store_task(object_keys(1), objects([3]))
    assert look_up(adapter, keys) == [True, True]
    assert load(adapter, keys, objects([0, 0])) == [True, True]
    assert adapter.pop_completed_store_tasks() == {}
    gate.set()
    until(lambda: held in adapter.pop_completed_store_tasks())


def test_every_method_of_lmcaches_interface_is_known() -> None:
    """From LMCache's own class: one that is new there must be implemented or waived here."""
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

    from connector.adapters.lmcache import KVStoreL2Adapter

    inherited = {  # what LMCache's base class does for all adapters
        "register_listener",
        "set_backend_identity",
        "supports_global_eviction",
        "get_usage",  # of what `_notify_keys_stored` and `_notify_keys_deleted` were told
    }
    interface = {name for name in vars(L2AdapterInterface) if not name.startswith("_")}
    ours = {name for name in vars(KVStoreL2Adapter) if not name.startswith("_")}
    assert interface - ours == inherited
    assert ours - interface <= {"get_memory_tags", "submit_touch"}, "of LMCache 0.5.7"


@pytest.mark.timeout(400)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_lmcaches_own_benchmark_on_two_hosts(tmp_path: Path) -> None:
    """Network namespaces: what the benchmark stores on one, it finds and loads on the other."""
    patient = {"lookup_timeout_s": 5.0, "limits": PATIENT}
    with Hosts(2) as hosts:
        places = cluster.Places("lmcache", tmp_path)
        processes = cluster.start(hosts, places, "128MiB")

        def bench(host: str, *options: str) -> str:
            command = [
                *(sys.executable, "-m", "lmcache.cli.main", "bench", "l2"),
                *("--l2-adapter", json.dumps(spec_of(patient))),
                *("--num-keys", "32", "--in-flight", "4", "--data-size-kb", "64"),
                *("--rounds", "2", *options),
            ]
            done = subprocess.run(
                hosts.command(host, command),
                cwd=ROOT,
                env={**os.environ, **places.environment(hosts, host), "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=150,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        try:
            said = bench("a", "--no-skip-verify", "--lookup-max-hit-rate", "0.5")
            assert "All 128 keys data verified OK." in said
            found = bench("b", "--only", "lookup", "--lookup-max-hit-rate", "1")
            assert found.count("found=128/128") == 3
            assert bench("b", "--only", "load").count("loaded=128/128") == 3
        finally:
            cluster.stop(processes)
