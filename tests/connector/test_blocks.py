"""The canonical layout, and copies in and out of strided engine tensors."""

from __future__ import annotations

import pytest
from connector_parts import BLOCK, ENGINE_BLOCK, GEOMETRY, bits, kv_tensors

from connector.blocks import _layer_runs, kv_blocks
from connector.geometry import KVGeometry
from kvstore import UsageError

torch = pytest.importorskip("torch")
BYTES = GEOMETRY.token_bytes * BLOCK


def gathered(kv, ids) -> bytes:
    out = bytearray(BYTES)
    kv_blocks(kv, GEOMETRY, BLOCK).gather(ids, memoryview(out))
    return bytes(out)


def test_trap_the_payload_is_layer_head_token_channel_whatever_the_engines_layout() -> None:
    expected = []
    for order in ("HND", "NHD"):
        kv = kv_tensors(8, order)
        blocks = bits(kv)[:, [5, 2]]  # [L, n, H, N, C]
        canonical = blocks.permute(0, 2, 1, 3, 4).contiguous()
        expected.append(canonical.view(torch.uint8).numpy().tobytes())
        assert gathered(kv, [5, 2]) == expected[-1]
    # The same tokens give the same bytes, so the two engines share blocks.
    hnd = kv_tensors(8, "HND")
    nhd = {name: layer.transpose(1, 2).contiguous().transpose(1, 2) for name, layer in hnd.items()}
    assert not nhd["layer0"].is_contiguous()
    assert gathered(nhd, [5, 2]) == gathered(hnd, [5, 2])


@pytest.mark.parametrize("source", ["HND", "NHD"])
@pytest.mark.parametrize("target", ["HND", "NHD"])
def test_what_is_gathered_is_scattered_between_layouts(source: str, target: str) -> None:
    one, other = kv_tensors(8, source, seed=1), kv_tensors(8, target, seed=2)
    before = bits(other)
    payload = gathered(one, [7, 3])
    kv_blocks(other, GEOMETRY, BLOCK).scatter(memoryview(payload), 0, [1, 6])
    assert torch.equal(bits(other)[:, [1, 6]], bits(one)[:, [7, 3]])
    untouched = [0, 2, 3, 4, 5, 7]
    assert torch.equal(bits(other)[:, untouched], before[:, untouched])


def test_the_tail_of_a_store_block_is_scattered_alone() -> None:
    one, other = kv_tensors(8, seed=1), kv_tensors(8, seed=2)
    before = bits(other)
    kv_blocks(other, GEOMETRY, BLOCK).scatter(memoryview(gathered(one, [7, 3])), 1, [4])
    assert torch.equal(bits(other)[:, 4], bits(one)[:, 3])
    assert torch.equal(bits(other)[:, :4], before[:, :4])


def test_engines_with_different_block_sizes_read_the_same_bytes() -> None:
    # Kernel blocks half as large as the engine's: its block 2 is kernel blocks 4 and 5.
    whole = kv_tensors(8)
    halves = {}
    for name, layer in whole.items():
        split = layer.unflatten(2, (2, ENGINE_BLOCK // 2)).transpose(1, 2)
        halves[name] = split.reshape(16, GEOMETRY.heads, ENGINE_BLOCK // 2, -1).contiguous()
    assert gathered(halves, [2, 6]) == gathered(whole, [2, 6])


def test_layers_in_one_allocation_are_copied_together() -> None:
    together = list(kv_tensors(8).values())
    assert _layer_runs(together) == [(0, 2)]
    apart = [layer.clone() for layer in together]
    assert _layer_runs(apart) == [(0, 1), (1, 1)]
    names = ("layer0", "layer1")
    assert gathered(dict(zip(names, apart, strict=True)), [1, 5]) == gathered(
        dict(zip(names, together, strict=True)), [1, 5]
    )


def test_layers_an_uneven_distance_apart_are_copied_right() -> None:
    storage = torch.randint(0, 255, (4, 8, 2, ENGINE_BLOCK, 16), dtype=torch.uint8)
    geometry = KVGeometry(layers=3, heads=2, channel_bytes=16, engine_block_tokens=ENGINE_BLOCK)
    kv = {f"l{i}": storage[i] for i in (0, 1, 3)}
    assert _layer_runs(list(kv.values())) == [(0, 2), (2, 1)]
    out = bytearray(geometry.token_bytes * BLOCK)
    kv_blocks(kv, geometry, BLOCK).gather([6, 0], memoryview(out))
    expected = storage[[0, 1, 3]][:, [6, 0]].permute(0, 2, 1, 3, 4).contiguous()
    assert bytes(out) == expected.numpy().tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 3},
        {"heads": 4},
        {"channel_bytes": 32},
        {"engine_block_tokens": 6},
    ],
)
def test_tensors_of_another_shape_are_refused(wrong: dict[str, int]) -> None:
    right = {"layers": 2, "heads": 2, "channel_bytes": 16, "engine_block_tokens": ENGINE_BLOCK}
    with pytest.raises(UsageError, match="kv_caches"):
        kv_blocks(kv_tensors(8), KVGeometry(**{**right, **wrong}), BLOCK)
