"""Every KV layout that vLLM allocates, copied by the GPU copier's plan and the kernel's own text.

The kernel is compiled for the host; the memory is as vLLM's own allocation makes it.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from each_input import each
from host_device import HostDevice

from connector.copiers.base import Gather, Scatter
from connector.copiers.cuda import kernel_plan
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of
from connector.copiers.registered import folded, kv_memory
from connector.layout.geometry import KVGeometry
from kvstore import UsageError

pytestmark = pytest.mark.vllm

LAYERS, BLOCKS, STORE_BLOCKS = 3, 24, 4
IDS = [7, 1, 19, 4]
"""Engine blocks of one store block."""


class Spec(NamedTuple):
    """What a model's attention asks of vLLM: a kind of spec and its fields."""

    kind: str
    block_tokens: int
    kernel_tokens: int | None
    fields: dict[str, Any]


def full(heads: int, size: int, dtype: str, tokens: int = 16, **more: Any) -> Spec:
    kernel_tokens = more.pop("kernel_tokens", None)
    fields = {"num_kv_heads": heads, "head_size": size, "dtype": dtype, **more}
    return Spec("FullAttentionSpec", tokens, kernel_tokens, fields)


def mla(size: int, dtype: str, **more: Any) -> Spec:
    fields = {"num_kv_heads": 1, "head_size": size, "dtype": dtype, **more}
    return Spec("MLAAttentionSpec", 64, None, fields)


SPECS = {
    "bf16, 8 heads": full(8, 128, "bfloat16"),
    "bf16, 1 head of 8 ranks": full(1, 128, "bfloat16"),
    "fp8, 4 heads": full(4, 128, "uint8"),
    "bf16, kernel blocks of 16 in 64": full(8, 128, "bfloat16", 64, kernel_tokens=16),
    "bf16, heads of 80": full(4, 80, "bfloat16"),
    "bf16, K and V of other sizes": full(2, 96, "bfloat16", head_size_v=64),
    "fp8 with scales, 264 bytes": full(4, 128, "uint8", state_content_bytes=264),
    "NVFP4, 144 bytes": full(4, 128, "uint8", state_content_bytes=144),
    "MLA bf16": mla(576, "bfloat16"),
    "MLA fp8, 656 bytes": mla(656, "uint8", cache_dtype_str="fp8_ds_mla"),
}


def allocated(spec: Spec, layout: Any) -> tuple[Any, list[Any]] | None:
    """vLLM's spec and its own allocation; None when it refuses that layout for it."""
    import torch
    from vllm.v1 import kv_cache_interface
    from vllm.v1.worker.utils import allocate_kv_cache
    from vllm_planning import get_kv_cache_config_from_groups

    fields = {**spec.fields, "dtype": getattr(torch, spec.fields["dtype"])}
    made = getattr(kv_cache_interface, spec.kind)(block_size=spec.block_tokens, **fields)
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=None,
            hash_block_size=None,
        ),
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=1024),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    names = [f"layer {i}" for i in range(LAYERS)]
    group = kv_cache_interface.KVCacheGroupSpec(names, made)
    try:
        planned = get_kv_cache_config_from_groups(
            config, [group], BLOCKS * LAYERS * made.page_size_bytes
        )
        kernel = [spec.kernel_tokens] if spec.kernel_tokens else None
        caches = allocate_kv_cache(planned, torch.device("cpu"), layout, kernel)
    except (ValueError, AssertionError):
        return None
    return made, list(caches.values())


def logical(layer: Any, block: int, pages: int) -> np.ndarray[Any, Any]:
    """One engine block of a layer by vLLM's own [B, H, N, C] view: heads, tokens, bytes."""
    import torch

    whole = layer if layer.dtype == torch.uint8 else layer.view(torch.uint8)
    parts = [whole[block * pages + i] for i in range(pages)]
    return torch.cat(parts, dim=1).numpy()


def counted(device: HostDevice) -> list[int]:
    """Of each call for DMAs, either way, how many it is."""
    moved: list[int] = []

    def count(start: Any, copies: Any) -> None:
        moved.append(len(copies))
        start(copies)

    device.saving.store = partial(count, device.saving.store)  # type: ignore[method-assign]
    device.loading.fetch = partial(count, device.loading.fetch)  # type: ignore[method-assign]
    return moved


COVERED = {
    "fp8, 4 heads": pytest.mark.covers("fp8 KV, scales per tensor", "memory"),
    "fp8 with scales, 264 bytes": pytest.mark.covers("fp8 KV, scales per token and head", "memory"),
    "NVFP4, 144 bytes": pytest.mark.covers("NVFP4 KV", "memory"),
    "MLA fp8, 656 bytes": pytest.mark.covers("MLA (DeepSeek-V2, V3)", "memory"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=COVERED.get(name, ())) for name in SPECS]
)
@each("order", ["heads", "tokens"])
def test_every_layout_is_copied_byte_for_byte(
    name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of tokens: every one with heads within tokens, and where a page is one piece,
    by one DMA for each layer of an engine block."""
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout

    monkeypatch.setattr(kernel_plan, "DEVICE_PIECE_BYTES_MIN", 1)
    spec, rng = SPECS[name], np.random.default_rng(0)
    copied, refused, by_dma_alone = [], [], []
    for layout in KVCacheLayout:
        there = allocated(spec, layout)
        if there is None:
            continue
        made, layers = there
        everything = torch.tensor([], dtype=torch.uint8).set_(layers[0].untyped_storage())
        everything.copy_(torch.from_numpy(rng.integers(0, 256, everything.numel(), np.uint8)))
        geometry = KVGeometry(
            layers=LAYERS,
            heads=made.num_heads,
            channel_bytes=made.state_content_size_bytes,
            engine_block_tokens=spec.block_tokens,
        )
        if order == "tokens":
            geometry = geometry.in_token_order()
        caches = {str(i): layer for i, layer in enumerate(layers)}
        store_tokens = spec.block_tokens * STORE_BLOCKS
        try:
            (on_cpu,) = kv_memory([(caches, geometry)], store_tokens).groups
        except UsageError as e:
            refused.append(f"{layout.name}: {e.field}")
            continue
        seen = [folded(one, geometry) for one in layers] if geometry.folded_heads > 1 else layers
        plan = layout_of(seen, geometry, store_tokens)
        device = HostDevice(staging_bytes=max(1 << 20, plan.payload_bytes))
        device.apart = lambda place: [(0, place)]  # type: ignore[method-assign]
        moved = counted(device)
        copier, out = DeviceCopier(plan, device), bytearray(plan.payload_bytes)
        pages = layers[0].shape[0] // BLOCKS

        copier.gather_many([Gather(IDS, memoryview(out))])
        same = bytearray(plan.payload_bytes)
        on_cpu.gather_many([Gather(IDS, memoryview(same))])
        want = np.stack(
            [
                np.concatenate([logical(layer, block, pages) for block in IDS], axis=1)
                for layer in layers
            ]
        )
        if order == "tokens" and made.num_heads > 1:  # [layer][token][head][C]
            want = want.swapaxes(1, 2)
        assert bytes(out) == want.tobytes(), f"{layout.name}: saved"
        assert same == out, f"{layout.name}: saved by the CPU"

        expected = everything.clone()
        views = [
            torch.tensor([], dtype=torch.uint8)
            .set_(expected.untyped_storage())
            .as_strided(bytes_view.shape, bytes_view.stride(), bytes_view.storage_offset())
            for layer in layers
            for bytes_view in [layer if layer.dtype == torch.uint8 else layer.view(torch.uint8)]
        ]
        for view in views:  # engine blocks 2 and 3 become the second and third of those saved
            for to, source in ((2, IDS[1]), (3, IDS[2])):
                for i in range(pages):
                    view[to * pages + i] = view[source * pages + i]
        before = everything.clone()
        copier.scatter_many([Scatter(memoryview(out), 1, [2, 3])])
        assert torch.equal(everything, expected), f"{layout.name}: loaded, and nothing else"
        everything.copy_(before)
        on_cpu.scatter_many([Scatter(memoryview(out), 1, [2, 3])])
        assert torch.equal(everything, expected), f"{layout.name}: loaded by the CPU"
        copied.append(layout.name)
        if not device.launches:
            assert moved == [LAYERS * len(IDS), LAYERS * 2], "saved, loaded"
            by_dma_alone.append(layout.name)
    # Kernel blocks smaller than engine blocks vLLM takes only where blocks of a layer lie together.
    every = [
        one.name for one in KVCacheLayout if spec.kernel_tokens is None or one.name.startswith("LB")
    ]
    if order == "heads" or spec.fields["num_kv_heads"] == 1:
        assert (copied, refused, by_dma_alone) == (every, [], [])
    else:
        assert copied == [n for n in every if n.endswith("HC")]
        assert refused == [f"{n}: payload_order" for n in every if n not in copied]
        assert by_dma_alone == [n for n in every if n.endswith("NHC")]
        assert "LBNHC" in by_dma_alone, "vLLM's default"
