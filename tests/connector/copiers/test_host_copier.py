"""The canonical layout, and copies in and out of strided engine tensors."""

from __future__ import annotations

import contextlib

import pytest
from connector_parts import BLOCK, ENGINE_BLOCK, GEOMETRY, bits, copier_of, kv_tensors

from connector.copiers.base import Gather, HeadPart, KVCopier, Scatter
from connector.copiers.cuda.torch_copier import TorchCopier
from connector.copiers.host import _layer_runs
from connector.layout.geometry import KVGeometry
from kvstore import UsageError

torch = pytest.importorskip("torch")
BYTES = GEOMETRY.token_bytes * BLOCK


def gather(blocks: KVCopier, ids, out, layer=None) -> None:
    blocks.gather_many([Gather(ids, memoryview(out))], layer)


def scatter(blocks: KVCopier, payload, skip, ids, part=None, layer=None) -> None:
    blocks.scatter_many([Scatter(memoryview(payload), skip, ids, part)], layer)


def gathered(kv, ids) -> bytes:
    out = bytearray(BYTES)
    gather(copier_of(kv, GEOMETRY, BLOCK), ids, out)
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
    scatter(copier_of(other, GEOMETRY, BLOCK), payload, 0, [1, 6])
    assert torch.equal(bits(other)[:, [1, 6]], bits(one)[:, [7, 3]])
    untouched = [0, 2, 3, 4, 5, 7]
    assert torch.equal(bits(other)[:, untouched], before[:, untouched])


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("layer", range(GEOMETRY.layers))
def test_one_layer_is_one_contiguous_part_of_the_payload(order: str, layer: int) -> None:
    one, other = kv_tensors(8, order, seed=1), kv_tensors(8, order, seed=2)
    whole, out = gathered(one, [7, 3]), bytearray(BYTES)
    gather(copier_of(one, GEOMETRY, BLOCK), [7, 3], out, layer)
    part = slice(layer * BYTES // GEOMETRY.layers, (layer + 1) * BYTES // GEOMETRY.layers)
    assert out[part] == whole[part]
    out[part] = bytes(part.stop - part.start)
    assert not any(out), "nothing of the other layers"
    before, blocks = bits(other), copier_of(other, GEOMETRY, BLOCK)
    scatter(blocks, whole, 1, [4], HeadPart(GEOMETRY.heads, 1, 0, 1), layer)
    assert torch.equal(bits(other)[layer, 4, 0], bits(one)[layer, 3, 1])
    changed = (bits(other) != before).nonzero()
    assert {tuple(place[:3].tolist()) for place in changed} == {(layer, 4, 0)}


def test_the_tail_of_a_store_block_is_scattered_alone() -> None:
    one, other = kv_tensors(8, seed=1), kv_tensors(8, seed=2)
    before = bits(other)
    scatter(copier_of(other, GEOMETRY, BLOCK), gathered(one, [7, 3]), 1, [4])
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
    gather(copier_of(kv, geometry, BLOCK), [6, 0], out)
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
        copier_of(kv_tensors(8), KVGeometry(**{**right, **wrong}), BLOCK)


@pytest.fixture(params=["host", "torch"])
def make_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """The copier of either kind; torch's runs on host memory, without its streams."""
    if request.param == "host":
        return copier_of
    empty = torch.empty

    class Stream:
        def __init__(self, device: object) -> None:
            self.device = device

        def synchronize(self) -> None:
            return

    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **k: empty(*a, **k))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def one(kv: dict, geometry: KVGeometry, block_tokens: int) -> KVCopier:
        return TorchCopier(list(kv.values()), geometry, block_tokens)

    return one


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_both_kinds_of_copier_gather_and_scatter_alike(make_blocks, order: str) -> None:
    one, other = kv_tensors(8, order, seed=1), kv_tensors(8, order, seed=2)
    before = bits(other)
    out = bytearray(BYTES)
    gather(make_blocks(one, GEOMETRY, BLOCK), [7, 3], out)
    assert bytes(out) == gathered(one, [7, 3])
    scatter(make_blocks(other, GEOMETRY, BLOCK), out, 1, [4])
    assert torch.equal(bits(other)[:, 4], bits(one)[:, 3])
    assert torch.equal(bits(other)[:, [0, 1, 2, 3, 5, 6, 7]], before[:, [0, 1, 2, 3, 5, 6, 7]])


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_trap_a_part_of_the_heads_leaves_the_others_alone(make_blocks, order: str) -> None:
    """Head 2 of a payload of four heads becomes head 1 of two."""
    kv = kv_tensors(8, order)
    before = bits(kv)
    shape = (GEOMETRY.layers, 4, BLOCK, GEOMETRY.channel_bytes // 2)
    payload = torch.randint(-30000, 30000, shape, dtype=torch.int16)
    raw = memoryview(payload.view(torch.uint8).numpy().tobytes())
    scatter(make_blocks(kv, GEOMETRY, BLOCK), raw, 0, [5, 2], HeadPart(4, 2, 1, 1))
    after = bits(kv)
    assert torch.equal(after[:, 5, 1], payload[:, 2, :ENGINE_BLOCK])
    assert torch.equal(after[:, 2, 1], payload[:, 2, ENGINE_BLOCK:])
    assert torch.equal(after[:, :, 0], before[:, :, 0])
    others = [0, 1, 3, 4, 6, 7]
    assert torch.equal(after[:, others], before[:, others])
