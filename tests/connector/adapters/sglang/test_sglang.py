"""SGLang's own loader and host pools against a real Redis and a real memory node."""

from __future__ import annotations

import inspect
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sglang_pools import (
    PAGE_TOKENS,
    backend,
    bits,
    hashes,
    mha_pool,
    mla_pool,
    page_bytes,
    randomize,
    slots,
)

from kvstore.client.nodes.directory import HERE_BELIEVED_S

if TYPE_CHECKING:
    from stores import NodeProcess

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]

LAYOUTS = ["layer_first", "page_first", "page_first_direct"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [mha_pool, mla_pool], ids=["mha", "mla"])
@pytest.mark.covers("full attention", "memory")
@pytest.mark.covers("MLA (DeepSeek-V2, V3)", "memory")
def test_pages_come_back_byte_for_byte_in_another_process_pool(
    node: NodeProcess, make: Any, layout: str
) -> None:
    one, other = make(layout), make(layout)
    randomize(one)
    randomize(other)
    replicated = make is mla_pool
    writer = backend(node, one, is_mla_model=replicated)
    reader = backend(node, other, is_mla_model=replicated)
    names = hashes(4)
    source, target = slots(one, 1, 4, 2, 0), slots(other, 3, 0, 5, 1)
    untouched = page_bytes(other, slots(other, 2, 4))
    assert writer.batch_set_v1(names, source) == [True] * 4
    assert reader.batch_exists(names) == 4
    assert reader.batch_get_v1(names, target) == [True] * 4
    assert page_bytes(other, target) == page_bytes(one, source)
    assert page_bytes(other, slots(other, 2, 4)) == untouched
    writer.close()
    reader.close()


def test_flat_pages_come_back_byte_for_byte_without_interface_v1(node: NodeProcess) -> None:
    import torch

    pool = mha_pool("layer_first")
    randomize(pool)
    store = backend(node, pool, ours={"interface_v1": 0})
    names = hashes(3)
    source = slots(pool, 0, 1, 2)
    pages = [pool.get_data_page(source[i * PAGE_TOKENS]) for i in range(3)]
    assert store.batch_set(names, pages)
    assert store.set(names[0], pages[0])
    assert store.exists(names[2])
    targets = [pool.get_dummy_flat_data_page() for _ in names]
    got = store.batch_get(names, targets)
    same = [torch.equal(bits(a), bits(b)) for a, b in zip(got, pages, strict=True)]
    assert same == [True] * 3
    assert store.get(hashes(1)[0], targets[0]) is None
    store.close()


def test_trap_a_page_saved_flat_is_not_loaded_as_zero_copy(node: NodeProcess) -> None:
    # In layer_first the two interfaces order the same bytes differently.
    pool = mha_pool("layer_first")
    flat, zero_copy = backend(node, pool, ours={"interface_v1": 0}), backend(node, pool)
    (name,) = hashes(1)
    assert flat.set(name, pool.get_data_page(0))
    assert not zero_copy.exists(name)
    assert zero_copy.batch_get_v1([name], slots(pool, 0)) == [False]
    flat.close()
    zero_copy.close()


def test_only_the_leading_run_exists_and_is_loaded(node: NodeProcess) -> None:
    pool = mha_pool()
    store = backend(node, pool)
    a, b, c = hashes(3)
    assert store.batch_set_v1([a, c], slots(pool, 0, 1)) == [True, True]
    assert store.batch_exists([a, b, c]) == 1
    assert store.batch_exists([b, c]) == 0
    assert store.batch_get_v1([a, b, c], slots(pool, 0, 1, 2)) == [True, False, False]
    store.close()


def test_a_page_that_exists_is_a_success(node: NodeProcess) -> None:
    pool = mha_pool()
    store = backend(node, pool)
    names = hashes(2)
    assert store.batch_set_v1(names, slots(pool, 0, 1)) == [True, True]
    assert store.batch_set_v1(names, slots(pool, 0, 1)) == [True, True]
    store.close()


@pytest.mark.parametrize(
    "other",
    [{"tp_rank": 1, "tp_size": 2}, {"ours": {"weights_id": "other"}}],
    ids=str,
)
def test_trap_equal_hashes_of_another_shard_or_model_are_misses(
    node: NodeProcess, other: dict[str, Any]
) -> None:
    pool = mha_pool()
    one, another = backend(node, pool), backend(node, pool, **other)
    names = hashes(1)
    assert one.batch_set_v1(names, slots(pool, 0)) == [True]
    assert one.batch_exists(names) == 1
    assert another.batch_exists(names) == 0
    one.close()
    another.close()


def test_trap_equal_hashes_of_another_dtype_or_layout_are_misses(node: NodeProcess) -> None:
    names = hashes(1)
    pool = mha_pool()
    store = backend(node, pool)
    assert store.batch_set_v1(names, slots(pool, 0)) == [True]
    store.close()
    for other_pool in (mha_pool(dtype="float16"), mha_pool("page_first_direct")):
        other = backend(node, other_pool)
        assert other.batch_exists(names) == 0
        other.close()


def test_trap_in_a_server_the_weights_count_and_not_what_they_are_called(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from types import SimpleNamespace

    from sglang.srt import runtime_context

    def server(path: str, weights: bytes) -> bool:
        (tmp_path / path).mkdir(exist_ok=True)
        (tmp_path / path / "pytorch_model.bin").write_bytes(weights)
        args = SimpleNamespace(model_path=str(tmp_path / path), kv_cache_dtype="auto")
        monkeypatch.setattr(runtime_context, "get_server_args", lambda: args)
        store = backend(node, pool, ours={"weights_id": None})
        found = bool(store.exists(names[0]))
        assert store.batch_set_v1(names, slots(pool, 0)) == [True]
        store.close()
        return found

    pool, names = mha_pool(), hashes(1)
    assert [server(*one) for one in (("a", b"1"), ("a", b"2"), ("b", b"1"))] == [False, False, True]


def test_sglang_knows_adapters_of_its_command_line_by_name_and_path_alone() -> None:
    """And arguments by the names that are read: why files and more are in the namespace
    (test_sglang_engine.py)."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.server_args import ServerArgs

    from connector.adapters.sglang.engine import FORWARD_ARGS

    assert LoRARef.deterministic_id("a", "/b") == LoRARef.deterministic_id("a", "/b")
    loaded_later = [LoRARef(lora_name="a", lora_path="/b") for _ in range(2)]
    assert loaded_later[0].lora_id != loaded_later[1].lora_id
    read = {*FORWARD_ARGS, "quantization_param_path", "lora_paths", "download_dir", "revision"}
    assert read <= set(inspect.signature(ServerArgs).parameters)


def test_trap_every_rank_finds_replicated_kv_that_one_rank_saved(node: NodeProcess) -> None:
    pool = mla_pool()
    ranks = [backend(node, pool, is_mla_model=True, tp_rank=r, tp_size=2) for r in range(2)]
    names = hashes(1)
    assert ranks[0].batch_set_v1(names, slots(pool, 0)) == [True]
    assert ranks[1].batch_get_v1(names, slots(pool, 1)) == [True]
    for rank in ranks:
        rank.close()


def test_clear_drops_the_pages(node: NodeProcess) -> None:
    pool = mha_pool()
    store = backend(node, pool)
    names = hashes(2)
    store.batch_set_v1(names, slots(pool, 0, 1))
    store.clear()
    assert store.batch_get_v1(names, slots(pool, 0, 1)) == [False, False]
    store.close()


def test_transfers_are_counted_once(node: NodeProcess) -> None:
    pool = mha_pool()
    store = backend(node, pool)
    names = hashes(2)
    store.batch_set_v1(names, slots(pool, 0, 1))
    store.batch_get_v1(names, slots(pool, 0, 1))
    stats = store.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2])
    assert all(gb_per_s > 0 for gb_per_s in stats.backup_bandwidth + stats.prefetch_bandwidth)
    assert store.get_stats().backup_pgs == []
    store.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_hangs_is_misses_and_no_waiting(
    node: NodeProcess, number: signal.Signals
) -> None:
    pool = mha_pool()
    store = backend(node, pool)
    names = hashes(2)
    assert store.batch_set_v1(names, slots(pool, 0, 1)) == [True, True]
    node.signal(number)
    if number is signal.SIGKILL:
        node.process.wait(10)
        time.sleep(HERE_BELIEVED_S)  # until then its memory may be read: the bytes are right
    started = time.monotonic()
    assert store.batch_set_v1(hashes(2), slots(pool, 0, 1)) == [False, False]
    loaded = store.batch_get_v1(names, slots(pool, 0, 1))
    assert loaded == [number is signal.SIGSTOP] * 2, "reads need no living node, only its memory"
    assert store.batch_exists(hashes(2)) == 0
    store.clear()
    assert time.monotonic() - started < 10
    started = time.monotonic()
    assert store.batch_set_v1(hashes(1), slots(pool, 0)) == [False]
    assert time.monotonic() - started < 3, "what failed lately is not waited for again"
    store.close()


def test_an_index_that_is_away_is_misses(node: NodeProcess) -> None:
    pool = mha_pool()
    store = backend(node, pool, ours={"url": "redis://127.0.0.1:1"})
    names = hashes(2)
    assert store.batch_exists(names) == 0
    assert store.batch_get_v1(names, slots(pool, 0, 1)) == [False, False]
    assert store.batch_set_v1(names, slots(pool, 0, 1)) == [False, False]
    store.close()


def test_wrong_settings_are_refused_when_sglang_attaches(node: NodeProcess) -> None:
    pool = mha_pool()
    with pytest.raises(ValueError, match="block_tokens"):
        backend(node, pool, ours={"block_tokens": 256})
    store = backend(node, pool)
    store.close()
    store.close()
