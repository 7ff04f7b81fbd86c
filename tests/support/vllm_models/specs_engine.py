"""vLLM's scheduler and our connector over whatever layers a model has; the forward is a model.

Memory is what vLLM's own planner and allocation make of the layers' specs. Each byte of a token's
KV, or of a state, follows from all tokens up to it and from its layer, and everything that the next
token's attention reads is compared, in every group that is stored, before it is used.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from fractions import Fraction
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm_steps import new_request, step_output, transferred

UNTOUCHED = 0xA5
VOCABULARY = 500


def chain(tokens: list[int]) -> Any:
    """Return `[token, bytes]`: what each token's KV follows from."""
    rows, last = [], b""
    for token in tokens:
        last = blake2b(last + token.to_bytes(4, "little"), digest_size=32).digest()
        rows.append(np.frombuffer(last, np.uint8))
    return np.stack(rows) if rows else np.zeros((0, 32), np.uint8)


class Layer:
    """One layer's memory, and which bytes belong there."""

    def __init__(
        self, name: str, number: int, spec: Any, memory: Any, *, reads_ahead: bool
    ) -> None:
        self.name, self.spec = name, spec
        self.memory = memory.view(torch.uint8).numpy()  # [B, H, N, C]
        _, self._heads, self._entries, self._size = self.memory.shape
        self.per_state = Fraction(spec.tokens_per_state)
        salt = np.random.default_rng(number).integers(0, 256, self._heads * self._size, np.uint8)
        self._salt = salt
        self._ahead = int(reads_ahead)

    def bytes_of(self, rows: Any) -> Any:
        """Return `[entry, H, C]` for rows of `chain`."""
        width = self._heads * self._size
        wide = np.tile(rows, (1, -(-width // rows.shape[1])))[:, :width] ^ self._salt
        return wide.reshape(len(rows), self._heads, self._size)

    def entries(self, start: int, end: int) -> range:
        """Entries whose last token is one of `start` to `end`."""
        return range(math.floor(start / self.per_state), math.floor(end / self.per_state))

    def places(self, table: list[int], entries: range) -> Iterator[tuple[int, slice, range]]:
        """(block, entries of it, which of all entries these are), a block at a time."""
        size = math.floor(self.spec.block_size / self.per_state)
        at = entries.start
        while at < entries.stop:
            block, offset = divmod(at, size)
            count = min(size - offset, entries.stop - at)
            yield table[block], slice(offset, offset + count), range(at, at + count)
            at += count

    def last_token(self, entry: int) -> int:
        """Of the tokens that an entry follows from; a draft's layer sees one more."""
        return math.ceil((entry + 1) * self.per_state) - 1 + self._ahead

    def write(self, table: list[int], known: Any, start: int, end: int) -> None:
        for block, where, entries in self.places(table, self.entries(start, end)):
            if block:
                rows = known[[self.last_token(one) for one in entries]]
                self.memory[block][:, where] = self.bytes_of(rows).swapaxes(0, 1)

    def check(self, table: list[int], known: Any, first: int, end: int) -> None:
        """Fail unless all entries of the tokens from `first` to `end` are right."""
        whole = range(math.ceil(first / self.per_state), self.entries(first, end).stop)
        for block, where, entries in self.places(table, whole):
            rows = known[[self.last_token(one) for one in entries]]
            right = np.array_equal(self.memory[block][:, where].swapaxes(0, 1), self.bytes_of(rows))
            assert right, (
                f"{self.name}, {type(self.spec).__name__}: tokens {first} to {end}, {entries}"
            )


class StateLayer(Layer):
    """One layer of states, of which there is one for each block of tokens, in vLLM's mode align."""

    def write(self, table: list[int], known: Any, start: int, end: int) -> None:
        self._keep(table[(end - 1) // self.spec.block_size], known, end)
        if self.spec.num_prefill_checkpoint_blocks:
            self._checkpoint(table, known, start, end)

    def _keep(self, block: int, known: Any, end: int) -> None:
        assert block, "vLLM gave the state no block"
        self.memory[block][:] = self.bytes_of(known[end - 1 : end]).swapaxes(0, 1)

    def _checkpoint(self, table: list[int], known: Any, start: int, end: int) -> None:
        """Kernels of some layers also keep the state at the last boundary within a step."""
        from vllm.v1 import kv_cache_interface as kinds

        size = self.spec.block_size
        at = kinds.get_mamba_prefill_checkpoint_position(end, size, False)
        if kinds.is_mamba_prefill_checkpoint_valid(
            start, end, at, size, size, self.spec.prefill_checkpoint_alignment
        ):
            self._keep(table[-(-end // size) - 2], known, at)

    def check(self, table: list[int], known: Any, first: int, end: int) -> None:
        block = table[(end - 1) // self.spec.block_size]
        wanted = self.bytes_of(known[end - 1 : end]).swapaxes(0, 1)
        assert np.array_equal(self.memory[block], wanted), f"{self.name}: the state after {end}"


def first_needed(spec: Any, end: int) -> int:
    """Return the first token that the one after `end` others sees."""
    from vllm.v1 import kv_cache_interface as kinds

    if isinstance(spec, kinds.SlidingWindowSpec):
        return max(0, end - int(spec.sliding_window) + 1)
    if isinstance(spec, kinds.ChunkedLocalAttentionSpec):
        size = int(spec.attention_chunk_size)
        return end // size * size
    return 0


class SpecsEngine:
    """One scheduler and one worker; `step` is one engine step."""

    def __init__(self, config: Any, kv_cache: Any, drafts: frozenset[str] = frozenset()) -> None:
        """`kv_cache` is the worker's; `drafts` are layers that see a token more."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched import scheduler as module
        from vllm.v1.structured_output import StructuredOutputManager

        told = kv_cache_utils.generate_scheduler_kv_cache_config([copy.deepcopy(kv_cache)])
        block, hashed = kv_cache_utils.resolve_kv_cache_block_sizes(told, config)
        # Of pictures nothing is asked here, and without a tokenizer vLLM could not count them.
        nothing = SimpleNamespace(encoder_compute_budget=0, encoder_cache_size=0)
        module.MultiModalBudget = lambda *_: nothing
        self.scheduler = module.Scheduler(
            vllm_config=config,
            kv_cache_config=told,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block,
            hash_block_size=hashed,
            log_stats=False,
        )
        self.worker: Any = None
        self.groups = self._allocated(config, kv_cache, drafts)
        hash_fn = get_hash_fn_by_name("sha256_cbor")
        kv_cache_utils.init_none_hash(hash_fn)
        self._hasher = kv_cache_utils.get_request_block_hasher(hashed, hash_fn)
        self.outputs: dict[str, list[int]] = {}
        self.loaded_tokens: dict[str, int] = {}

    def _allocated(self, config: Any, kv_cache: Any, drafts: frozenset[str]) -> list[list[Layer]]:
        """Make the worker's memory, and its side of the connector if there is one."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs
        from vllm.v1.worker.utils import allocate_kv_cache

        layout = config.cache_config.get_resolved_kv_cache_layout()
        memory = allocate_kv_cache(kv_cache, torch.device("cpu"), layout, None)
        for one in memory.values():
            one.view(torch.uint8).fill_(UNTOUCHED)
        if config.kv_transfer_config is not None:
            self.worker = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, copy.deepcopy(kv_cache)
            )
            self.worker.register_kv_caches(memory)
        groups, number = [], 0
        for group in kv_cache.kv_cache_groups:
            layers = []
            for name in group.layer_names:
                spec = group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[name]
                kind = StateLayer if isinstance(spec, MambaSpec) else Layer
                layers.append(kind(name, number, spec, memory[name], reads_ahead=name in drafts))
                number += 1
            groups.append(layers)
        return groups

    @property
    def stored(self) -> tuple[int, ...]:
        """vLLM's numbers of the groups that the connector stores."""
        connector: Any = self.scheduler.connector
        return () if connector is None else connector._numbers

    def add(self, name: str, tokens: list[int], max_tokens: int = 2) -> None:
        self.outputs[name] = []
        self.scheduler.add_request(new_request(name, tokens, max_tokens, self._hasher))

    def step(self) -> None:
        output = self.scheduler.schedule()
        worker, transfers = self.worker, None
        if worker is not None:
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
        sampled = {n: self._computed(n, c) for n, c in output.num_scheduled_tokens.items()}
        if worker is not None:
            worker.start_load_kv(None)
            transfers = transferred(worker, output.finished_req_ids)
        answer = step_output(sampled, transfers)
        for client in self.scheduler.update_from_output(output, answer).values():
            for one in client.outputs:
                self.outputs[one.request_id] += one.new_token_ids

    def _computed(self, name: str, count: int) -> list[int]:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens  # the scheduler has advanced it already
        start = end - count
        self.loaded_tokens.setdefault(name, start)
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        tokens = list(request.all_token_ids)
        known = chain(tokens)
        sampled = []
        if end == request.num_tokens:
            sampled = [int.from_bytes(known[-1][:4].tobytes(), "little") % VOCABULARY]
        known = chain(tokens + sampled)  # of each draft's token, the next one is known
        for number, (layers, table) in enumerate(zip(self.groups, tables, strict=True)):
            for layer in layers:
                if start and number in self.stored:
                    layer.check(table, known, first_needed(layer.spec, start), start)
                layer.write(table, known, start, end)
        return sampled

    def run(self, steps_max: int = 400) -> None:
        for _ in range(steps_max):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"not done after {steps_max} steps")

    def close(self) -> None:
        self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()
