"""The namespace of SGLang's pages, read from stand-ins for its configuration and pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from each_input import each

from connector.adapters.sglang.shape import has_draft, page_namespaces, settings
from kvstore import Namespace, UsageError

STORAGE = {
    "model_name": "served",
    "is_mla_model": False,
    "tp_rank": 0,
    "tp_size": 2,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
    "dcp_size": 1,
}
POOL = {
    "dtype": "torch.bfloat16",
    "layout": "page_first",
    "page_size": 16,
    "layer_num": 4,
    "start_layer": 0,
    "end_layer": 4,
    "head_num": 2,
    "head_dim": 8,
    "v_head_dim": 8,
}
ENGINE = {"version": "1", "weights": "w1-0", "forward": "", "kv_cache_dtype": "auto"}


def namespace(
    storage: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    interface: str = "v1",
    **ours: Any,
) -> Namespace:
    (made,) = page_namespaces(
        SimpleNamespace(**{**STORAGE, **(storage or {})}),
        SimpleNamespace(**{**POOL, **(pool or {})}),
        settings(ours),
        {**ENGINE, **(engine or {})},
        interface,
    )
    return made


@each(
    "other",
    [
        {"storage": {"tp_rank": 1}},
        {"storage": {"tp_size": 4}},
        {"storage": {"pp_rank": 1, "pp_size": 2}},
        {"storage": {"attn_cp_rank": 1, "attn_cp_size": 2}},
        {"pool": {"dtype": "torch.float16"}},
        {"pool": {"layout": "layer_first"}},
        {"pool": {"page_size": 32}},
        {"pool": {"layer_num": 5}},
        {"pool": {"head_num": 4}},
        {"pool": {"head_dim": 16}},
        {"pool": {"storage_format_tag": "fp8"}},
        {"engine": {"version": "2"}},
        {"engine": {"weights": "w1-1"}},
        {"engine": {"forward": "other"}},
        {"engine": {"kv_cache_dtype": "fp8_e5m2"}},
        {"interface": "flat"},
        {"weights_id": "tuned"},
    ],
    ids=str,
)
def test_trap_what_sglangs_hash_leaves_out_is_in_the_namespace(other: dict[str, Any]) -> None:
    assert namespace(**other) != namespace()


def test_equal_configurations_share_pages() -> None:
    assert namespace() == namespace()
    assert namespace({"model_name": "another alias"}) == namespace()
    named = [namespace(weights_id="m", engine={"weights": w}) for w in ("w1-1", "w1-2")]
    assert named[0] == named[1]


def test_trap_ranks_that_hold_the_same_kv_share_it_as_only_one_of_them_saves() -> None:
    ranks = [namespace({"is_mla_model": True, "tp_rank": rank}) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0] == namespace({"is_mla_model": True, "tp_size": 8})


def pieces(storage: dict[str, Any], **pool: Any) -> list[Namespace]:
    return page_namespaces(
        SimpleNamespace(**{**STORAGE, **storage}),
        SimpleNamespace(**{**POOL, "layout": "page_head", "size_per_token": 256, **pool}),
        settings({}),
        ENGINE,
        "v1",
    )


def test_the_pieces_of_a_rank_are_the_pages_of_ranks_of_the_larger_size() -> None:
    split = {"tp_lcm_size": 4, "should_split_heads": True}
    large = [{"tp_rank": rank, "tp_size": 4} for rank in range(4)]
    ranks = [pieces(one, head_num=1, size_per_token=128)[0] for one in large]
    assert pieces({**split, "tp_size": 2, "tp_rank": 1}) == ranks[2:]
    assert pieces({**split, "tp_size": 1}, head_num=4, size_per_token=512) == ranks
    assert len(set(ranks)) == 4
    with pytest.raises(UsageError, match="tp_lcm_size"):
        pieces({**split, "tp_size": 1}, head_num=2)


@each(
    ("pool", "name", "drafts"),
    [
        ({"layer_num": 4, "target_layer_num": 4}, "kv", False),
        ({"layer_num": 5, "target_layer_num": 4}, "kv", True),
        ({"layer_num": 4}, "draft_swa", True),
        ({"mtp_draft_buffer_infos": ("one",)}, "mamba", True),
        ({"layer_num": 5}, "deepseek_v4_c4", True),
        ({"layer_num": 0}, "kv", False),
        ({}, "swa", False),
    ],
)
def test_a_page_is_a_draft_models_too_when_layers_of_it_are(
    pool: dict[str, Any], name: str, drafts: bool
) -> None:
    assert has_draft(SimpleNamespace(**pool), name) is drafts


@pytest.mark.covers("decode context parallel", "refused")
def test_sequence_shards_are_refused() -> None:
    with pytest.raises(UsageError, match="dcp_size"):
        namespace({"dcp_size": 2})


def test_settings_are_ours_without_the_loaders_names() -> None:
    loader = {"backend_name": "kvstore", "module_path": "m", "class_name": "c", "interface_v1": 1}
    assert settings({**loader, "url": "redis://h:1"}).url == "redis://h:1"
    assert settings(None).key_prefix == "kv:default"


@pytest.mark.parametrize("name", ["blok_tokens", "block_tokens", "save_decode"])
def test_a_setting_that_would_have_no_effect_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        settings({name: 1})
