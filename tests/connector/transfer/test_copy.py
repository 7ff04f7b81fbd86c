"""copy_kv_blocks: the right bytes to the right blocks, or an error and nothing written."""

from __future__ import annotations

from typing import Any

import pytest
from each_input import each
from hypothesis import given
from hypothesis import strategies as st

from connector.transfer.copy import copy_kv_blocks
from kvstore import UsageError

torch = pytest.importorskip("torch")

TOKENS, HEADS, CHANNELS = 4, 2, 3
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cache(blocks: int, seed: int, layout: str = "NHD", device: str = "cpu") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    inner = (TOKENS, HEADS) if layout == "NHD" else (HEADS, TOKENS)
    return {
        f"layer{i}": torch.randint(
            -30000, 30000, (blocks, *inner, CHANNELS), generator=generator, dtype=torch.int16
        ).to(device)
        for i in range(2)
    }


def nhd(tensor: Any, layout: str) -> Any:
    return tensor if layout == "NHD" else tensor.transpose(-2, -3)


@pytest.mark.parametrize("src_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dst_layout", ["NHD", "HND"])
@given(
    pairs=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=6, unique_by=lambda p: p[1]
    )
)
def test_named_blocks_are_copied_and_no_other_is_touched(
    src_layout: Any, dst_layout: Any, pairs: list[tuple[int, int]]
) -> None:
    src, dst = cache(6, 1, src_layout), cache(8, 2, dst_layout)
    expected = {name: nhd(layer, dst_layout).clone() for name, layer in dst.items()}
    for name, layer in src.items():
        for a, b in pairs:
            expected[name][b] = nhd(layer, src_layout)[a]
    copy_kv_blocks(
        src,
        dst,
        [a for a, _ in pairs],
        [b for _, b in pairs],
        "d2d",
        src_layout=src_layout,
        dst_layout=dst_layout,
    )
    for name, layer in dst.items():
        assert torch.equal(nhd(layer, dst_layout), expected[name])


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("layouts", [("NHD", "NHD"), ("NHD", "HND"), ("HND", "NHD")])
def test_there_and_back_again_gives_the_same_bytes(device: str, layouts: Any) -> None:
    here, there = layouts
    host, on_device, back = cache(4, 1, here), cache(8, 2, there, device), cache(4, 3, here)
    kept = on_device["layer0"][0].clone()
    copy_kv_blocks(host, on_device, [0, 3], [5, 2], "h2d", src_layout=here, dst_layout=there)
    copy_kv_blocks(on_device, on_device, [5, 2], [6, 7], "d2d", src_layout=there, dst_layout=there)
    copy_kv_blocks(on_device, back, [6, 7], [1, 2], "d2h", src_layout=there, dst_layout=here)
    for name, layer in back.items():
        assert torch.equal(layer[[1, 2]], host[name][[0, 3]])
    assert torch.equal(on_device["layer0"][0], kept)


@pytest.mark.parametrize("layouts", [("NHD", "NHD"), ("NHD", "HND")])
def test_blocks_of_latents_have_no_heads(layouts: Any) -> None:
    """MLA's caches are [blocks, tokens, channels]: both layouts are the same bytes."""
    src, dst = ({n: kv[:, :, 0] for n, kv in cache(6, seed).items()} for seed in (1, 2))
    kept = dst["layer0"][5].clone()
    copy_kv_blocks(src, dst, [4, 0], [1, 2], "d2d", src_layout=layouts[0], dst_layout=layouts[1])
    for name, layer in dst.items():
        assert torch.equal(layer[[1, 2]], src[name][[4, 0]])
    assert torch.equal(dst["layer0"][5], kept)
    with pytest.raises(UsageError, match="block_dim=1"):
        copy_kv_blocks(src, dst, [0], [0], "d2d", block_dim=1)
    flat = {"l": src["layer0"][0]}
    with pytest.raises(UsageError, match="block_dim=0"):
        copy_kv_blocks(flat, flat, [0], [1], "d2d")


@pytest.mark.parametrize("device", PLACES)
def test_within_one_cache_all_is_read_before_anything_is_written(device: str) -> None:
    both = cache(4, 1, device=device)
    before = {name: layer.clone() for name, layer in both.items()}
    copy_kv_blocks(both, both, [0, 1, 2], [1, 2, 0], "d2d")
    for name, layer in both.items():
        assert torch.equal(layer[[1, 2, 0]], before[name][[0, 1, 2]])


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"])
def test_no_dtype_loses_a_bit(dtype: str, device: str) -> None:
    size = getattr(torch, dtype).itemsize
    raw = torch.randint(0, 256, (4, TOKENS, HEADS, CHANNELS * size), dtype=torch.uint8)
    src = {"l": raw.view(getattr(torch, dtype)).to(device)}
    dst = {"l": torch.zeros_like(src["l"])}
    copy_kv_blocks(src, dst, [0, 1, 2, 3], [3, 2, 1, 0], "d2d")
    assert torch.equal(dst["l"].view(torch.uint8).cpu(), raw.flip(0))


def test_strided_views_and_other_block_dimensions_are_copied_in_place() -> None:
    # K and V apart, before the blocks; heads and tokens swapped by strides only.
    src = torch.arange(2 * 4 * HEADS * TOKENS * CHANNELS, dtype=torch.int32)
    src = src.view(2, 4, HEADS, TOKENS, CHANNELS).transpose(-2, -3)
    store = torch.zeros(2, 4, HEADS, TOKENS, CHANNELS, dtype=torch.int32)
    dst = store.transpose(-2, -3)
    copy_kv_blocks({"l": src}, {"l": dst}, [1, 2], [3, 0], "d2d", block_dim=1)
    assert torch.equal(store.transpose(-2, -3)[:, [3, 0]], src[:, [1, 2]])
    assert not store[:, [1, 2]].any()


@each(
    ("src_ids", "dst_ids", "says"),
    [
        ([0, 6], [0, 1], "src_block_ids=6: must be from 0 to 5"),
        ([0, -1], [0, 1], "src_block_ids=-1"),
        ([0, 1], [0, 8], "dst_block_ids=8: must be from 0 to 7"),
        ([0, 1], [0, -1], "dst_block_ids=-1"),
        ([0, 1], [3, 3], "twice"),
        ([0, 1], [3], "as many as the 2"),
        ([0, True], [0, 1], "whole numbers"),
        ([0, 1.0], [0, 1], "whole numbers"),
    ],
)
def test_wrong_ids_are_an_error_before_anything_is_written(
    src_ids: Any, dst_ids: Any, says: str
) -> None:
    src, dst = cache(6, 1), cache(8, 2)
    with pytest.raises(UsageError, match=says):
        copy_kv_blocks(src, dst, src_ids, dst_ids, "d2d")
    assert all(torch.equal(dst[name], layer) for name, layer in cache(8, 2).items())


def test_shorter_last_layer_is_noticed_before_the_first_is_written() -> None:
    src, dst = cache(6, 1), cache(8, 2)
    dst["layer1"] = dst["layer1"][:2]
    before = dst["layer0"].clone()
    with pytest.raises(UsageError, match="must be from 0 to 1"):
        copy_kv_blocks(src, dst, [0], [5], "d2d")
    assert torch.equal(dst["layer0"], before)


@each(
    ("change", "options", "says"),
    [
        (lambda d: d.pop("layer1"), {}, "same layers"),
        (lambda d: d.update(layer0=d["layer0"].to(torch.int32)), {}, "torch.int16"),
        (lambda d: d.update(layer0=d["layer0"][:, :2]), {}, "blocks like"),
        (lambda d: d.update(layer0=d["layer0"][0]), {}, "blocks like"),
        (lambda d: None, {"dst_layout": "HND"}, "blocks like"),
        (lambda d: None, {"dst_layout": "DNH"}, "NHD or HND"),
        (lambda d: None, {"direction": "up"}, "h2d, d2h, d2d"),
        (lambda d: None, {"block_dim": 1}, "block_dim=1"),
    ],
)
def test_caches_that_do_not_fit_each_other_are_refused(
    change: Any, options: dict[str, Any], says: str
) -> None:
    src, dst = cache(6, 1), cache(8, 2)
    change(dst)
    with pytest.raises(UsageError, match=says):
        copy_kv_blocks(src, dst, [0], [0], **{"direction": "d2d", **options})


@pytest.mark.parametrize(("direction", "field"), [("h2d", "src"), ("d2h", "dst")])
def test_direction_must_be_that_of_the_tensors(direction: Any, field: str) -> None:
    elsewhere = {name: layer.to("meta") for name, layer in cache(6, 1).items()}
    with pytest.raises(UsageError, match=f"{field}_kv_caches.*CPU memory for {direction}"):
        copy_kv_blocks(elsewhere, elsewhere, [0], [0], direction)


def test_nothing_to_copy_is_fine_but_still_checked() -> None:
    src = cache(6, 1)
    copy_kv_blocks(src, cache(8, 2), [], [], "d2d")
    copy_kv_blocks({}, {}, [], [], "d2d")
    with pytest.raises(UsageError, match="same layers"):
        copy_kv_blocks(src, {}, [], [], "d2d")
