"""vLLM's scheduler over workers that share the tokens of blocks, with a model for the forward.

Who is who among the ranks is asked of vLLM's own `initialize_model_parallel`; where each rank keeps
a token's KV of its own block tables, of both model runners, and of its manager of prefill context
parallelism: the text of their kernels, run on the host. Memory is allocated by vLLM. Each byte of a
token's KV follows from all tokens up to it, its layer and its head in the whole model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton_on_host
from triton_on_host import HostKernel
from vllm_model_config import VOCABULARY
from vllm_model_engine import digests
from vllm_steps import new_request, step_output, transferred

from connector import build
from kvstore.testing.blockstore import MemoryBlockStore

LAYERS = 2
LAYER_NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
UNTOUCHED = 0xA5


@dataclass(frozen=True)
class Sizes:
    """How many workers there are and how they share the work."""

    tp: int
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    block: int = 4
    heads: int | None = None
    """KV heads of the model; None: it has latents (MLA)."""
    runner: str = "V2"
    indexer_bytes: int = 0
    """Of a token, in every other layer, of another shape then (the indexers of DeepSeek-V3.2)."""


@dataclass(frozen=True)
class Place:
    """One rank, as vLLM numbers it in each of its groups."""

    rank: int
    tp_rank: int
    dcp_rank: int
    pcp_rank: int


def places(sizes: Sizes, config: Any, monkeypatch: Any) -> list[Place]:
    """Ask vLLM which rank is where."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    groups: dict[str, list[list[int]]] = {}

    def note(ranks: list[list[int]], *_: Any, group_name: str, **__: Any) -> Any:
        groups[group_name] = ranks
        return SimpleNamespace(rank_in_group=0, world_size=1)

    world = sizes.tp * sizes.pcp
    with monkeypatch.context() as patch, set_current_vllm_config(config):
        for name in [one for one in vars(parallel_state) if one[0] == "_" and one[1:].isupper()]:
            if name.strip("_") in ("TP", "ETP", "DCP", "PCP", "PP", "DP", "EP", "EPLB"):
                patch.setattr(parallel_state, name, None)
        patch.setattr(parallel_state, "init_model_parallel_group", note)
        patch.setattr(parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0))
        for name, value in (("is_initialized", True), ("get_world_size", world), ("get_rank", 0)):
            patch.setattr(torch.distributed, name, lambda *_, value=value: value)
        parallel_state.initialize_model_parallel(sizes.tp, 1, sizes.pcp, sizes.dcp, "gloo")

    def within(group: str, rank: int) -> int:
        (ranks,) = (ranks for ranks in groups[group] if rank in ranks)
        return ranks.index(rank)

    return [Place(r, within("tp", r), within("dcp", r), within("pcp", r)) for r in range(world)]


class Rank:
    """One worker: its memory, where vLLM has it put tokens, and its side of our connector."""

    def __init__(self, place: Place, sizes: Sizes, config: Any, kv_cache: Any, patch: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        self.place, self.sizes = place, sizes
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = place.rank
        self._sharded = kv_cache.kv_cache_groups[0].kv_cache_spec.dcp_sharded
        self._shards_decodes = config.parallel_config.pcp_shard_decode_requests
        self._patch = patch
        heads = sizes.heads or 1
        self.head = 0 if sizes.heads is None else place.tp_rank * heads // sizes.tp
        """Of the model, as vLLM's `QKVParallelLinear` hands them out; with DCP it is one."""
        caches = allocate_kv_cache(kv_cache, torch.device("cpu"), KVCacheLayout.LBNHC, None)
        self.kv = [caches[name].view(torch.uint8) for name in LAYER_NAMES]  # [B, 1, N, bytes]
        self.wipe()
        self.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache
        )
        self.caches = {name: caches[name] for name in LAYER_NAMES}
        self.connector.register_kv_caches(self.caches)

    def wipe(self) -> None:
        for layer in self.kv:
            layer.fill_(UNTOUCHED)

    def slots(self, table: list[int], start: int, end: int) -> Any:
        """Of each token from `start` to `end`: its slot in this rank's memory, -1 for none."""
        return (self._slots_v2 if self.sizes.runner == "V2" else self._slots_v1)(table, start, end)

    def _slots_v1(self, table: list[int], start: int, end: int) -> Any:
        from vllm.v1.worker import block_table as module

        kernel = module.ComputeSlotMappingKernel
        sizes, place = self.sizes, self.place

        def launched(num_reqs: int, *args: Any) -> None:
            spec = kernel.__call__.__wrapped__
            grid, constants = spec(SimpleNamespace(triton_block_size=1024), num_reqs, *args)
            HostKernel(kernel.kernel)[grid](*args[:7], **constants)

        launched.register_warmup = lambda **_: None  # type: ignore[attr-defined]
        with self._patch.context() as patch:
            patch.setattr(module, "_COMPUTE_SLOT_MAPPING_KERNEL", launched)
            for name, size, rank in (
                ("get_dcp_group", sizes.dcp, place.dcp_rank),
                ("get_pcp_group", sizes.pcp, place.pcp_rank),
            ):
                group = SimpleNamespace(world_size=size, rank_in_group=rank)
                patch.setattr(module, name, lambda group=group: group)
            rows = module.BlockTable(
                *(sizes.block, 1, len(table), end, False, torch.device("cpu"), sizes.interleave)
            )
            rows.add_row(table, 0)
            rows.commit_block_table(1)
            count = end - start
            rows.compute_slot_mapping(
                1, torch.tensor([0, count], dtype=torch.int32), torch.arange(start, end)
            )
        return rows.slot_mapping.gpu[:count].numpy()

    def _slots_v2(self, table: list[int], start: int, end: int) -> Any:
        from vllm.v1.worker.gpu import block_table as module

        row = torch.tensor([table], dtype=torch.int32)
        triton_on_host.TENSORS[row.data_ptr()] = row
        tables = SimpleNamespace(
            num_kv_cache_groups=1,
            slot_mappings=torch.full((1, end - start), -7),
            block_table_ptrs=torch.tensor([row.data_ptr()]),
            block_table_strides=torch.tensor([row.stride(0)]),
            block_sizes_tensor=torch.tensor([self.sizes.block]),
            slot_mapping_enabled=torch.tensor([True]),
            dcp_sharded=torch.tensor([self._sharded]),
            cp_rank=self.place.dcp_rank,
            cp_size=self.sizes.dcp,
            cp_interleave=self.sizes.interleave,
        )
        kernel = HostKernel(module._compute_slot_mappings_kernel)
        with self._patch.context() as patch:
            patch.setattr(module, "_compute_slot_mappings_kernel", kernel)
            found = module.BlockTables.compute_slot_mappings(
                tables,
                torch.tensor([0], dtype=torch.int32),
                torch.tensor([0, end - start], dtype=torch.int32),
                torch.arange(start, end),
                end - start,
            )
        del triton_on_host.TENSORS[row.data_ptr()]
        return found[0].numpy()

    def writes(self, table: list[int], start: int, end: int, *, prefill: bool) -> Any:
        """What a step's forward writes here: (number of a token, slot), as many as there are.

        With PCP each rank computes a part of the tokens, and writes those of all ranks.
        """
        slots = self.slots(table, start, end)
        if self.sizes.pcp == 1:
            return enumerate(slots, start)
        from vllm.v1.worker.gpu.pcp_manager import PCPManager

        manager = PCPManager(
            self.sizes.pcp,
            self.place.pcp_rank,
            torch.device("cpu"),
            self._shards_decodes,
            dcp_world_size=self.sizes.dcp,
            dcp_rank=self.place.dcp_rank,
            cp_interleave=self.sizes.interleave,
        )
        one = [np.array([n]) for n in (end - start, start)]
        manager._build_batch_layout(*one, np.array([prefill]), np.array([0, end - start]))
        gathered = manager._convert_to_gathered_slot_mappings(torch.from_numpy(slots)[None])
        return zip((manager._padded_gather_idx + start).tolist(), gathered[0].tolist(), strict=True)


def truth(digest: bytes, layer: int, head: int, size: int) -> Any:
    """Return the KV of a token: `size` bytes."""
    raw = blake2b(digest, digest_size=size, salt=bytes([layer, head])).digest()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class ContextParallelEngine:
    """One scheduler and all ranks; `step` is one engine step."""

    def __init__(
        self,
        config: Any,
        specs: dict[str, Any],
        sizes: Sizes,
        store: MemoryBlockStore,
        monkeypatch: Any,
        blocks: int,
    ) -> None:
        """`config` has the sizes in it; `specs` are the layers'; `blocks` are each rank's."""
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm_planning import get_kv_cache_config_from_groups

        monkeypatch.setattr(build, "open_store", lambda *_, **__: store)
        self.store, self.sizes = store, sizes
        uniform = UniformTypeKVCacheSpecs.from_specs(specs)
        assert uniform is not None, "vLLM puts them into one group"
        alike = len(set(specs.values())) == 1
        group = KVCacheGroupSpec(list(specs), specs[LAYER_NAMES[0]] if alike else uniform)
        room = blocks * uniform.page_size_bytes
        self.kv_cache = get_kv_cache_config_from_groups(config, [group], room)
        told = generate_scheduler_kv_cache_config([copy.deepcopy(self.kv_cache)])
        block, hashed = resolve_kv_cache_block_sizes(told, config)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=told,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block,
            hash_block_size=hashed,
            log_stats=True,
        )
        self.ranks = [
            Rank(place, sizes, config, self.kv_cache, monkeypatch)
            for place in places(sizes, config, monkeypatch)
        ]
        hash_fn = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(hashed, hash_fn)
        self._aggregator = KVOutputAggregator.from_connector(
            self.scheduler.connector, len(self.ranks)
        )
        self.outputs: dict[str, list[int]] = {}
        self.loaded_tokens: dict[str, int] = {}
        self.preemptions = 0

    def add(self, name: str, tokens: list[int], max_tokens: int = 3) -> None:
        self.outputs[name] = []
        self.scheduler.add_request(new_request(name, tokens, max_tokens, self._hasher))

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        metadata = output.kv_connector_metadata
        for rank in self.ranks:
            rank.connector.handle_preemptions(metadata)
            rank.connector.bind_connector_metadata(copy.deepcopy(metadata))
            if output.has_sync_kv_loads:
                rank.connector.start_load_kv(None)
        sampled = self._forward(output.num_scheduled_tokens)
        answers = []
        for rank in self.ranks:
            if not output.has_sync_kv_loads:
                rank.connector.start_load_kv(None)
            transfers = transferred(rank.connector, output.finished_req_ids)
            answers.append(step_output(sampled, transfers))
        answer = self._aggregator.aggregate(answers, 0)
        for client in self.scheduler.update_from_output(output, answer).values():
            for one in client.outputs:
                self.outputs[one.request_id] += one.new_token_ids

    def _forward(self, scheduled: dict[str, int]) -> dict[str, list[int]]:
        """Layer by layer: what is there is compared, and what is new is written."""
        for layer, layer_name in enumerate(LAYER_NAMES):
            for rank in self.ranks:
                rank.connector.wait_for_layer_load(layer_name)
            for name, count in scheduled.items():
                self._compute(name, count, layer)
            for rank in self.ranks:
                rank.connector.save_kv_layer(layer_name, rank.caches[layer_name], None)
        return {name: self._sampled(name) for name in scheduled}

    def _compute(self, name: str, count: int, layer: int) -> None:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens  # the scheduler has advanced it already
        start = end - count
        self.loaded_tokens.setdefault(name, start)
        (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        tokens = list(request.all_token_ids)
        self.check(tokens, table, start, layer)
        known = digests(tokens)
        for rank in self.ranks:
            prefill = start < request.num_prompt_tokens
            for token, slot in rank.writes(table, start, end, prefill=prefill):
                if slot >= 0:
                    self._cell(rank, slot, known[token], layer, write=True)
        if end == request.num_tokens:
            self.check(tokens, table, end, layer)

    def _sampled(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        if request.num_computed_tokens < request.num_tokens:
            return []
        raw = blake2b(digests(list(request.all_token_ids))[-1], digest_size=4).digest()
        return [int.from_bytes(raw, "little") % VOCABULARY]

    def _cell(self, rank: Rank, slot: int, digest: bytes, layer: int, *, write: bool) -> bool:
        block, place = divmod(int(slot), self.sizes.block)
        cell = rank.kv[layer][block, 0, place]
        wanted = truth(digest, layer, rank.head, cell.numel())
        if write:
            cell.copy_(wanted)
        return torch.equal(cell, wanted)

    def check(self, tokens: list[int], table: list[int], end: int, layer: int) -> None:
        """Fail unless each rank has, where vLLM looks for them, the right bytes of each of the
        first `end` tokens that are its own, and all ranks together have every token."""
        if not end:
            return
        known, found = digests(tokens[:end]), np.zeros(end, int)
        for rank in self.ranks:
            slots = rank.slots(table, 0, end)
            found += slots >= 0
            for token in np.flatnonzero(slots >= 0):
                right = self._cell(rank, slots[token], known[token], layer, write=False)
                assert right, f"layer {layer}, token {token} of {end} on rank {rank.place}"
        assert (found == len(self.ranks) // self.sizes.dcp).all(), "each part is as often there"

    def run(self, steps_max: int = 2000) -> None:
        for _ in range(steps_max):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"not done after {steps_max} steps")

    def close(self) -> None:
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()
