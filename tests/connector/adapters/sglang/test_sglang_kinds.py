"""Every kind of host pool of SGLang's source is stored byte for byte, or refused by name."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sglang_kinds import NEVER_HANDED, REFUSED, STORED, compressed, kinds, page_bytes, states
from sglang_pools import PAGE_TOKENS, backend, fill, hashes, mha_pool, mla_pool, slots
from test_sglang_pools import pages_of, transfer

if TYPE_CHECKING:
    from stores import NodeProcess

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


def test_every_kind_of_pool_in_sglangs_source_has_its_place_here() -> None:
    assert kinds() == {*STORED, *REFUSED, *NEVER_HANDED}


LAYOUTS = ("layer_first", "page_first", "page_first_direct")
CASES = [
    (kind, layout)
    for kind in sorted(STORED)
    for layout in LAYOUTS
    if (kind, layout) != ("AsymmetricMHATokenToKVPoolHost", "layer_first")  # SGLang has none
]


def made(kind: str, layout: str) -> Any:
    """Return a pool filled with random bytes."""
    pool = STORED[kind](layout)
    fill(pool)
    assert type(pool).__name__ == kind
    return pool


@pytest.mark.parametrize(("kind", "layout"), CASES)
@pytest.mark.covers("SGLang's pools of hybrid and draft models", "memory")
def test_pages_of_each_kind_come_back_byte_for_byte(
    node: NodeProcess, kind: str, layout: str
) -> None:
    """As a pool beside the KV pool, by the names that SGLang gives pools (`swa` stands for all)."""
    one, other = made(kind, layout), made(kind, layout)
    stores = []
    for pool in (one, other):
        store = backend(node, mha_pool())
        store.register_mem_host_pool_v2(pool, "swa")
        stores.append(store)
    keys = hashes(2)
    before = [page_bytes(other, page) for page in range(4)]
    (saved,) = stores[0].batch_set_v2([transfer("swa", keys, pages_of(one, 3, 1))]).values()
    asked = transfer("swa", [*keys, *hashes(1)], pages_of(other, 0, 2, 1))
    (loaded,) = stores[1].batch_get_v2([asked]).values()
    assert (saved, loaded) == ([True, True], [True, True, False])
    assert [page_bytes(other, page) for page in (0, 2)] == [page_bytes(one, p) for p in (3, 1)]
    assert page_bytes(other, 3) == before[3]
    for store in stores:
        store.close()


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("kind", ["AsymmetricMHATokenToKVPoolHost", "MiniMaxM3Nvfp4MainKVPoolHost"])
def test_pages_of_other_kv_pools_come_back_byte_for_byte(
    node: NodeProcess, kind: str, layout: str
) -> None:
    one, other = made(kind, layout), made(kind, layout)
    writer, reader = backend(node, one), backend(node, other)
    keys = hashes(2)
    assert writer.batch_set_v1(keys, slots(one, 3, 1)) == [True, True]
    assert reader.batch_exists(keys) == 2
    assert reader.batch_get_v1(keys, slots(other, 0, 2)) == [True, True]
    assert [page_bytes(other, page) for page in (0, 2)] == [page_bytes(one, p) for p in (3, 1)]
    writer.close()
    reader.close()


def test_a_kv_pool_that_sglang_copies_whole_is_kept_as_without_interface_v1(
    node: NodeProcess,
) -> None:
    one, other = (made("MiniMaxM3Nvfp4MainKVPoolHost", "layer_first") for _ in range(2))
    writer, reader = backend(node, one), backend(node, other)
    plain = backend(node, other, ours={"interface_v1": 0})
    keys = hashes(2)
    assert writer.batch_set_v1(keys, slots(one, 3, 1)) == [True, True]
    assert reader.batch_get_v1(keys, slots(other, 0, 2)) == [True, True]
    assert [page_bytes(other, page) for page in (0, 2)] == [page_bytes(one, p) for p in (3, 1)]
    assert plain.batch_exists(keys) == 2, "the bytes are in the same order"
    for store in (writer, reader, plain):
        store.close()


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_pools_without_pages_for_a_storage_are_refused_by_name(
    node: NodeProcess, kind: str
) -> None:
    with pytest.raises(ValueError, match=kind):
        backend(node, REFUSED[kind]())
    store = backend(node, mha_pool())
    with pytest.raises(ValueError, match=kind):
        store.register_mem_host_pool_v2(REFUSED[kind](), "swa")
    store.close()


def test_trap_a_rank_without_host_memory_of_its_own_does_not_say_that_it_saves(
    node: NodeProcess,
) -> None:
    """SGLang keeps latents once for all ranks where no storage is named at start; one attached
    later must not take the others' pools for DeepSeek-V4's, which have no memory either."""
    import torch
    from sglang.srt.mem_cache.pool_host.mla import MLAHostAllocation, MLATokenToKVPoolHost

    pool = MLATokenToKVPoolHost(
        MLAHostAllocation(
            dtype=torch.bfloat16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            kv_cache_dim=24,
            size_per_token=144,
        ),
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE_TOKENS,
        layout="page_first",
        device_capacity_tokens=96,
        start_layer=0,
        end_layer=3,
        target_layer_num=3,
    )
    with pytest.raises(ValueError, match="MLATokenToKVPoolHost"):
        backend(node, pool, is_mla_model=True)


@pytest.mark.parametrize("kind", ["AsymmetricMHATokenToKVPoolHost", "LogicalHostPool"])
def test_pages_that_sglang_does_not_flatten_need_interface_v1(node: NodeProcess, kind: str) -> None:
    pool = STORED[kind]("page_first")
    with pytest.raises(ValueError, match=r"interface_v1|AsymmetricMHA"):
        backend(node, pool, ours={"interface_v1": 0})


def test_what_is_never_handed_to_us_is_sglangs_own_refusal() -> None:
    from sglang.srt.managers import hisparse_coordinator
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller, hybrid_pool_assembler

    controller = hybrid_cache_controller.HybridCacheController
    assert not controller.supports_page_envelope_host("dynamic")
    sparse = "HiSparseMHATokenToKVPoolHost"
    assert sparse in inspect.getsource(hisparse_coordinator)
    assert sparse not in inspect.getsource(hybrid_pool_assembler)


def test_sequence_shards_are_for_sglangs_own_backends_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode context parallelism: why there is no `dcp_size` here but 1."""
    from sglang.srt.managers import cache_controller

    monkeypatch.setattr(cache_controller, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=2))
    controller = SimpleNamespace(enable_storage=False, host_memory_mode="cache")
    with pytest.raises(NotImplementedError, match="requires file or Mooncake storage"):
        cache_controller.HiCacheController.attach_storage_backend(controller, "dynamic")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: states("page_first", "float32", 8), lambda: states("page_first", "bfloat16", 16)),
        (lambda: compressed("page_first", "uint8"), lambda: compressed("page_first", "bfloat16")),
    ],
    ids=["states", "rows"],
)
def test_trap_pages_as_large_that_the_engine_reads_otherwise_are_misses(
    node: NodeProcess, one: Any, other: Any
) -> None:
    stores = []
    for pool in (one(), other()):
        stores.append(backend(node, mla_pool(), is_mla_model=True))
        stores[-1].register_mem_host_pool_v2(pool, "deepseek_v4_c4_state")
    assert one().size_per_token == other().size_per_token
    keys = hashes(1)
    asked = [transfer("deepseek_v4_c4_state", keys, slots(one(), 0))]
    found = [[*store.batch_get_v2(asked).values()] for store in stores]
    assert found == [[[False]], [[False]]]
    stores[0].batch_set_v2(asked)
    found = [[*store.batch_get_v2(asked).values()] for store in stores]
    assert found == [[[True]], [[False]]]
    for store in stores:
        store.close()
