"""Pools beside the KV pool (hybrid, SWA, indexer, draft): SGLang's own, by its v2 interface."""

from __future__ import annotations

import hashlib
import inspect
import random
from typing import TYPE_CHECKING, Any

import pytest
from sglang_pools import (
    HEADS,
    INDEXER_PAGE_TOKENS,
    PAGE_TOKENS,
    backend,
    fill,
    hashes,
    indexer_pool,
    mamba_pool,
    mha_pool,
    mla_pool,
    slots,
    states,
)

if TYPE_CHECKING:
    from stores import NodeProcess

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


def transfer(name: str, keys: list[str], indices: Any = None, trailing: bool = False) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    policy = PoolHitPolicy.TRAILING_PAGES if trailing else PoolHitPolicy.ALL_PAGES
    return PoolTransfer(PoolName(name), host_indices=indices, keys=keys, hit_policy=policy)


def beside(name: str, layout: str = "page_first") -> tuple[Any, Any]:
    """Return a main pool, and the pool that such a model has beside it."""
    if name == "indexer":
        anchor = mla_pool(layout, INDEXER_PAGE_TOKENS)
        return anchor, indexer_pool(anchor, layout)
    return mha_pool(layout), mamba_pool() if name == "mamba" else mha_pool(layout)


def attached(node: NodeProcess, name: str, main: Any, pool: Any, **changes: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    made = backend(node, main, is_mla_model=name == "indexer", **changes)
    made.register_mem_host_pool_v2(main, PoolName.KV)
    made.register_mem_host_pool_v2(pool, PoolName(name))
    return made


def pages_of(pool: Any, *pages: int) -> Any:
    import torch

    return torch.tensor(pages) if pool.page_size == 1 else slots(pool, *pages)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("name", ["mamba", "swa", "indexer", "draft", "draft_swa"])
@pytest.mark.covers("SGLang's pools of hybrid and draft models", "memory")
def test_pages_of_a_second_pool_come_back_byte_for_byte(
    node: NodeProcess, name: str, layout: str
) -> None:
    one, other = beside(name, layout), beside(name, layout)
    for pool in (*one, *other):
        fill(pool)
    writer, reader = attached(node, name, *one), attached(node, name, *other)
    keys = hashes(3)
    source, target = pages_of(one[1], 4, 0, 2), pages_of(other[1], 1, 5, 3)
    untouched = states(other[1], pages_of(other[1], 0, 2, 4))
    (saved,) = writer.batch_set_v2([transfer(name, keys, source)]).values()
    assert saved == [True] * 3
    mixed = [keys[0], *hashes(1), *keys[1:]]
    where = pages_of(other[1], 1, 4, 5, 3)
    result = reader.batch_get_v2([transfer(name, mixed, where)])
    assert list(result.values()) == [[True, False, True, True]]
    assert str(next(iter(result))) == name
    assert states(other[1], target) == states(one[1], source)
    assert states(other[1], pages_of(other[1], 0, 2))[:1] == untouched[:1]
    assert writer.batch_exists(keys) == 0, "they are pages of that pool only"
    writer.close()
    reader.close()


def test_indices_that_do_not_fit_the_keys_move_nothing(node: NodeProcess) -> None:
    main, pool = beside("swa")
    store = attached(node, "swa", main, pool)
    keys = hashes(2)
    for wrong in (None, slots(pool, 0)):
        (got,) = store.batch_set_v2([transfer("swa", keys, wrong)]).values()
        assert got == [False, False]
    assert store.batch_set_v2([transfer("swa", [], None)]) != {}
    store.close()


def file_backend(tmp_path: Any) -> Any:
    """SGLang's own backend, which defines what the answers mean."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "m")
    return HiCacheFile(config, str(tmp_path))


@pytest.mark.parametrize("seed", range(25))
def test_what_can_be_restored_is_what_sglangs_own_backend_says(
    node: NodeProcess, tmp_path: Any, seed: int
) -> None:
    chance = random.Random(seed)
    main, pool = beside("mamba")
    swa = mha_pool()
    ours, theirs = attached(node, "mamba", main, pool), file_backend(tmp_path)
    for store in (ours, theirs):
        store.register_mem_host_pool_v2(swa, "swa")
    theirs.register_mem_pool_host(main)
    theirs.register_mem_host_pool_v2(pool, "mamba")
    theirs.register_mem_host_pool_v2(main, "kv")
    keys = hashes(5)
    for key in keys:
        if chance.random() < 0.85:
            assert ours.batch_set_v1([key], slots(main, 0)) == [True]
            theirs.batch_set_v2([transfer("kv", [key], slots(main, 0))])
        for name, one in (("mamba", pool), ("swa", swa)):
            if chance.random() < 0.7:
                for store in (ours, theirs):
                    store.batch_set_v2([transfer(name, [key], pages_of(one, 0))])
    asked = [
        transfer("mamba", keys[: chance.randint(0, 1)], trailing=True),
        transfer("swa", keys[: chance.randint(1, 3)], trailing=chance.random() < 0.5),
    ]
    for transfers in (asked, asked[:1], [], None):
        mine, its = ours.batch_exists_v2(keys, transfers), theirs.batch_exists_v2(keys, transfers)
        assert mine.kv_hit_pages == its.kv_hit_pages
        assert mine.restorable_prefix_pages == its.restorable_prefix_pages
        if its.kv_hit_pages:
            assert mine.extra_pool_hit_pages == its.extra_pool_hit_pages
    ours.close()


def test_a_pool_in_groups_of_blocks_never_decides(node: NodeProcess) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    main, pool = beside("swa")
    store = attached(node, "swa", main, pool)
    keys = hashes(2)
    store.batch_set_v1(keys, slots(main, 0, 1))
    grouped = transfer("swa", keys)
    grouped.hit_policy = PoolHitPolicy.BLOCK_GROUPS
    result = store.batch_exists_v2(keys, [grouped])
    assert (result.kv_hit_pages, dict(result.extra_pool_hit_pages)) == (2, {"kv": 2})
    store.close()


def test_trap_states_of_another_rank_are_misses_though_latents_are_shared(
    node: NodeProcess,
) -> None:
    main, pool = mla_pool(), mamba_pool()
    ranks = []
    for rank in range(2):
        made = backend(node, main, is_mla_model=True, tp_rank=rank, tp_size=2)
        made.register_mem_host_pool_v2(pool, "mamba")
        ranks.append(made)
    keys = hashes(1)
    ranks[0].batch_set_v1(keys, slots(main, 0))
    ranks[0].batch_set_v2([transfer("mamba", keys, pages_of(pool, 0))])
    asked = [transfer("mamba", keys, trailing=True)]
    assert [rank.batch_exists_v2(keys, asked).kv_hit_pages for rank in ranks] == [1, 0]
    assert [rank.batch_exists(keys) for rank in ranks] == [1, 1]
    for rank in ranks:
        rank.close()


def test_trap_a_draft_pools_pages_are_not_those_of_another_algorithm_or_of_swa(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from sglang.srt import runtime_context

    def found(algorithm: str, name: str) -> list[bool]:
        args = SimpleNamespace(
            model_path="/nowhere", kv_cache_dtype="auto", speculative_algorithm=algorithm
        )
        monkeypatch.setattr(runtime_context, "get_server_args", lambda: args)
        store = attached(node, name, main, pool)
        (got,) = store.batch_get_v2([transfer(name, keys, slots(pool, 1))]).values()
        store.batch_set_v2([transfer(name, keys, slots(pool, 0))])
        store.close()
        return list(got)

    main, pool = beside("draft")
    keys = hashes(1)
    asked = [("EAGLE", "draft"), ("EAGLE", "draft"), ("EAGLE3", "draft"), ("EAGLE", "swa")]
    assert [found(*one) for one in asked] == [[False], [True], [False], [False]]


def test_clear_drops_the_pages_of_all_pools(node: NodeProcess) -> None:
    main, pool = beside("mamba")
    store = attached(node, "mamba", main, pool)
    keys = hashes(1)
    store.batch_set_v2([transfer("mamba", keys, pages_of(pool, 0))])
    store.clear()
    (got,) = store.batch_get_v2([transfer("mamba", keys, pages_of(pool, 0))]).values()
    assert got == [False]
    store.close()


def test_a_pool_without_memory_says_whether_a_page_was_saved(node: NodeProcess) -> None:
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    pool = LogicalHostPool(6 * PAGE_TOKENS, PAGE_TOKENS)
    store = backend(node, pool, is_mla_model=True)
    a, b = hashes(2)
    assert store.batch_set_v1([a], slots(pool, 0)) == [True]
    assert store.batch_exists([a, b]) == 1
    assert store.batch_get_v1([a, b], slots(pool, 0, 1)) == [True, False]
    store.close()


# Engines of other tensor-parallel sizes


@pytest.mark.covers("tensor parallel 1, 2, 4, 8, mixed", "memory")
def test_ranks_of_two_sizes_share_pages_head_by_head(node: NodeProcess) -> None:
    """One rank with both heads, and two with one each, as `tp_lcm_size` 2 has SGLang split."""
    import torch

    def split(pool: Any, **parallel: Any) -> Any:
        lcm = {"tp_lcm_size": 2, "should_split_heads": parallel["tp_size"] < 2}
        return backend(node, pool, **lcm, **parallel)

    def heads(pool: Any) -> Any:
        """K and V of page 0 by head: two, layers and tokens of each."""
        return pool.kv_buffer[:, 0].clone().view(torch.uint8)

    whole, halves = mha_pool("page_head"), [one_head_pool(), one_head_pool()]
    for pool in (whole, *halves):
        fill(pool)
    one = split(whole, tp_rank=0, tp_size=1)
    two = [split(pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(halves)]
    names = hashes(2)
    assert one.batch_set_v1(names[:1], slots(whole, 0)) == [True]
    for rank, store in enumerate(two):
        assert store.batch_exists(names) == 1
        assert store.batch_get_v1(names[:1], slots(halves[rank], 0)) == [True]
        mine = heads(halves[rank])
        assert torch.equal(mine[:, 0], heads(whole)[:, rank])
    assert two[0].batch_set_v1(names[1:], slots(halves[0], 1)) == [True]
    assert one.batch_exists(names) == 1, "half of a page is no page"
    assert one.batch_exists_v2(names).kv_hit_pages == 1
    assert one.batch_get_v1(names[1:], slots(whole, 1)) == [False]
    assert two[1].batch_set_v1(names[1:], slots(halves[1], 1)) == [True]
    assert one.batch_exists(names) == 2
    assert one.batch_get_v1(names[1:], slots(whole, 1)) == [True]
    for rank in range(HEADS):
        there = whole.kv_buffer[:, 1, rank].view(torch.uint8)
        assert torch.equal(there, halves[rank].kv_buffer[:, 1, 0].view(torch.uint8))
    for store in (one, *two):
        store.close()


def one_head_pool() -> Any:
    return mha_pool("page_head", heads=1)


# What SGLang asks for


def test_every_method_of_sglangs_interface_is_known() -> None:
    """From SGLang's own class: one that is new there must be implemented or waived here."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    from connector.adapters.sglang import KVStoreHiCache

    inherited = {"on_host_pools_registered"}  # nothing is to be done once all pools are known
    interface = {name for name in vars(HiCacheStorage) if not name.startswith("_")}
    ours = {name for name in vars(KVStoreHiCache) if not name.startswith("_")}
    assert interface - ours == inherited
    assert ours - interface == {"close"}
    for name in interface & ours:
        theirs = list(inspect.signature(getattr(HiCacheStorage, name)).parameters)
        assert list(inspect.signature(getattr(KVStoreHiCache, name)).parameters) == theirs


def test_page_hashes_of_this_sglang_tell_adapters_and_salts_apart() -> None:
    from connector.adapters.sglang.hashes import check_page_hashes

    check_page_hashes("here")


def test_trap_an_sglang_whose_page_hashes_cover_the_tokens_alone_is_refused(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import utils

    pool = mha_pool()

    def adapters_alone(lora: str | None, salt: str | None) -> str | None:
        return None if lora is None else hashlib.sha256(lora.encode()).hexdigest()

    monkeypatch.setattr(utils, "storage_namespace_seed", adapters_alone)
    with pytest.raises(ValueError, match="cache salts"):
        backend(node, pool)
    monkeypatch.delattr(utils, "get_storage_hash_str")
    with pytest.raises(ValueError, match=r"0\.5\.23"):
        backend(node, pool)
