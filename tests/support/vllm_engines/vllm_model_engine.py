"""vLLM's own scheduler and our connector around a model whose output shows every wrong byte.

The "model" writes into each token's KV slot a digest of all tokens up to it, and
samples a digest of all KV of the request, read back through the block table. So
one foreign, stale or missing block anywhere in the prefix changes the output,
and what the output must be is known from the prompt alone. State-space layers
have a state instead, made from the one before the step and the step's tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm_model_config import (
    ENGINE_BLOCK,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    STATE_PAGE_BYTES,
    VOCABULARY,
    kv_cache_config,
    vllm_config,
)
from vllm_steps import new_request, step_output, transferred

from connector import build
from connector.settings import ConnectorSettings
from kvstore.testing.blockstore import MemoryBlockStore

SLOT_BYTES = LAYERS * HEADS * 2 * HEAD_SIZE * 2
STATE_BYTES = 32
assert SLOT_BYTES == LAYERS * STATE_BYTES == 64, "one blake2b digest fills a slot or a state"


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


def digests(tokens: list[int], group: int = 0, context: bytes = b"") -> list[bytes]:
    """Return the KV of each token in one group of layers: it depends on all tokens before it.

    `context` stands for what else shapes KV, such as a LoRA adapter.
    """
    out: list[bytes] = []
    for token in tokens:
        out.append(digest(out[-1] if out else context, token, group))
    return out


def digest(before: bytes, token: int, group: int) -> bytes:
    raw = before + token.to_bytes(4, "little")
    return blake2b(raw, salt=bytes([group])).digest()


def sample(slots: bytes) -> int:
    return int.from_bytes(blake2b(slots, digest_size=4).digest(), "little") % VOCABULARY


def expected_output(
    prompt: list[int],
    count: int,
    *,
    window: int | None = None,
    chunk: int | None = None,
    recurrent: bool = False,
    context: bytes = b"",
) -> list[int]:
    """Return what a request must give, whatever was loaded, preempted or computed again."""
    if recurrent:
        window = 1  # a state is the digest of the last token, which depends on all before it
    tokens = list(prompt)
    for _ in range(count):
        seen = digests(tokens, context=context)
        if chunk is not None:
            seen = seen + digests(tokens, 1, context)[(len(tokens) - 1) // chunk * chunk :]
        if window is not None:
            seen = seen + digests(tokens, 1, context)[-window:]
        tokens.append(sample(b"".join(seen)))
    return tokens[len(prompt) :]


class ModelEngine:
    """Scheduler, worker connector and the model; `step` is one engine step."""

    def __init__(
        self,
        model: Path,
        store: MemoryBlockStore,
        monkeypatch: Any,
        *,
        blocks: int = 64,
        v2_runner: bool = False,
        block_size: int = ENGINE_BLOCK,
        window: int | None = None,
        chunk: int | None = None,
        ring: bool = False,
        recurrent: bool = False,
        **config: Any,
    ) -> None:
        import torch
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        def open_model(_: ConnectorSettings, **more: object) -> MemoryBlockStore:
            return store

        monkeypatch.setattr(build, "open_store", open_model)
        self.block_size, self.window, self.recurrent = block_size, window, recurrent
        self.chunk = chunk
        mode = "align" if recurrent else "none"
        self.config = vllm_config(
            model, blocks=blocks, block_size=block_size, mamba_cache_mode=mode, **config
        )
        groups = kv_cache_config(blocks, block_size, window, mode, chunk, ring)
        self._numbers = [
            number
            for number, group in enumerate(groups.kv_cache_groups)
            if group.kv_cache_spec.prefix_cacheable
        ]
        """Of vLLM's groups those that the model has; a ring is nobody's."""
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=groups,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = v2_runner
        self.worker = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, groups
        )
        self.kv = [
            torch.zeros((LAYERS, blocks, HEADS, block_size, 2 * HEAD_SIZE), dtype=torch.bfloat16)
            for _ in self._numbers
        ]
        if recurrent:  # as vLLM shows states: bytes, [B, 1, 1, C] a layer
            pages = torch.zeros((LAYERS, blocks, 1, 1, STATE_PAGE_BYTES), dtype=torch.int8)
            self.kv[-1] = pages[..., :STATE_BYTES]
        self.worker.register_kv_caches(
            {
                name: kv[i]
                for kv, number in zip(self.kv, self._numbers, strict=True)
                for i, name in enumerate(groups.kv_cache_groups[number].layer_names)
            }
        )
        hash_fn = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(block_size, hash_fn)
        self._kv_cache_groups = [groups.kv_cache_groups[number] for number in self._numbers]
        # Per group [B, N, L, H, bytes].
        self._slots = [kv.view(torch.uint8).permute(1, 3, 0, 2, 4) for kv in self.kv]
        self.outputs: dict[str, list[int]] = {}
        self.contexts: dict[str, bytes] = {}
        """What shapes the KV of a request beside its tokens, such as the picture in it."""
        self.computed_tokens = 0
        self.loaded_tokens = 0
        self.preemptions = 0
        self.hits: dict[str, int] = {}
        self.metadata: list[Any] = []
        self.stats: list[dict[str, Any]] = []
        """As they go to vLLM's front end, one for each step that has some."""
        self.events: list[Any] = []
        self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)
        self.told: dict[str, Any] = {}
        """`kv_transfer_params` of the answers to requests that had some."""

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        params: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Take a request; `params` are its `kv_transfer_params`."""
        self.outputs[name] = []
        self.scheduler.add_request(
            new_request(name, prompt, max_tokens, self._hasher, params=params, **more)
        )

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """Schedule, compute, transfer, as vLLM's model runners order it."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self.metadata.append(metadata)
        self.preemptions += len(output.preempted_req_ids or ())
        plan = getattr(metadata, "plan", None)  # MultiConnector's has none
        self.loaded_tokens += sum(
            len(block.block_ids) * self.block_size
            for job in (plan.loads if plan is not None else ())
            for block in job.blocks
            if block.group == 0
        )
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        sampled = self._forward(output.num_scheduled_tokens)
        if not output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        transfers = transferred(self.worker, output.finished_req_ids)
        outputs = self.scheduler.update_from_output(output, step_output(sampled, transfers))
        for client in outputs.values():
            self.told.update(
                (answer.request_id, answer.kv_transfer_params)
                for answer in client.outputs
                if answer.kv_transfer_params is not None
            )
            for one in client.outputs:  # not what was sampled: a step may have been undone
                self.outputs[one.request_id] += one.new_token_ids
            said = client.scheduler_stats
            if said is not None and said.kv_connector_stats:
                self.stats.append(said.kv_connector_stats)
            stats = said and said.connector_prefix_cache_stats
            for source, tokens in stats.hits_by_source.items() if stats else ():
                self.hits[source.value] = self.hits.get(source.value, 0) + tokens
        return output

    def _forward(self, scheduled: dict[str, int]) -> dict[str, list[int]]:
        """Write, layer by layer, the KV of the new tokens of all requests, then read all of it.

        A request gets a token when that completes what is known of it.
        """
        seen: dict[str, list[list[Any]]] = {name: [[] for _ in self.kv] for name in scheduled}
        groups = self._kv_cache_groups if scheduled else ()
        for layer in range(LAYERS):
            for group, kv_group in enumerate(groups):
                layer_name = kv_group.layer_names[layer]
                self.worker.wait_for_layer_load(layer_name)
                for name, count in scheduled.items():
                    self._write(name, count, group, layer)
                for name in scheduled:
                    seen[name][group].append(self._read(name, group, layer))
                self.worker.save_kv_layer(layer_name, self.kv[group][layer], None)
        self.computed_tokens += sum(scheduled.values())
        return {name: self._sampled(name, layers) for name, layers in seen.items()}

    def _write(self, name: str, count: int, group: int, layer: int) -> None:
        import torch

        request = self.scheduler.requests[name]
        end = request.num_computed_tokens  # the scheduler has advanced it already
        table = self.scheduler.kv_cache_manager.get_block_ids(name)[self._numbers[group]]
        lora = request.lora_request
        named = lora.lora_name.encode() if lora is not None else b""
        context = self.contexts.get(name, named)
        if group and self.recurrent:
            tokens = list(request.all_token_ids)
            self._advance(table, tokens, end - count, end, context, layer)
            return
        kv = digests(list(request.all_token_ids), group, context)
        for position in range(end - count, end):
            block, offset = divmod(position, self.block_size)
            slot = torch.frombuffer(bytearray(kv[position]), dtype=torch.uint8)
            self._slots[group][table[block], offset, layer] = slot.view(LAYERS, HEADS, -1)[layer]

    def _read(self, name: str, group: int, layer: int) -> Any:
        """Return one layer's KV of all tokens that the last one sees, `[token, H, bytes]`."""
        end = self.scheduler.requests[name].num_computed_tokens
        table = self.scheduler.kv_cache_manager.get_block_ids(name)[self._numbers[group]]
        if group and self.recurrent:  # one state, its bytes as those of one head
            return self._state_in(table[(end - 1) // self.block_size])[layer].view(1, 1, -1)
        first = max(0, end - self.window) if group and self.window is not None else 0
        if group and self.chunk is not None:
            first = (end - 1) // self.chunk * self.chunk
        return self._slots[group][table, :, layer].flatten(0, 1)[first:end].clone()

    def _sampled(self, name: str, seen: list[list[Any]]) -> list[int]:
        import torch

        request = self.scheduler.requests[name]
        if request.num_computed_tokens < request.num_tokens:
            return []
        return [sample(b"".join(torch.stack(g, 1).numpy().tobytes() for g in seen))]

    def _state_in(self, block: int) -> Any:
        """Return the state of every layer, `[L, bytes]`."""
        import torch

        return self.kv[-1][:, block].view(torch.uint8).flatten(1)

    def _advance(
        self, table: list[int], tokens: list[int], start: int, end: int, context: bytes, layer: int
    ) -> None:
        """Make the state after `end` tokens from the one after `start`, as vLLM's aligned mode
        does.

        It reads the block of the last token before the step and writes that of the
        step's last one; in between it is nowhere. A digest is the state of all
        layers, so all of them are written at the last one.
        """
        import torch

        if layer < LAYERS - 1:
            return
        before = context
        if start:
            before = self._state_in(table[(start - 1) // self.block_size]).numpy().tobytes()
        for token in tokens[start:end]:
            before = digest(before, token, 1)
        state = torch.frombuffer(bytearray(before), dtype=torch.int8)
        block = table[(end - 1) // self.block_size]
        assert block, "vLLM gave the running state no block"
        self.kv[-1][:, block] = state.view(LAYERS, 1, 1, STATE_BYTES)

    def serve(self, *args: Any, **more: Any) -> None:
        """`add` a request, and `run`."""
        self.add(*args, **more)
        self.run()

    def run(self, steps_max: int = 2000) -> None:
        """Step until nothing is left to do, saves included."""
        for _ in range(steps_max):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"not done after {steps_max} steps")

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


MakeEngine = Callable[..., ModelEngine]
"""The fixture `make`: takes what `ModelEngine` and `vllm_config` take, by name."""
