"""A worker of vLLM with model runner V2 on a GPU, but for the forward, which is a model.

The order is that of vLLM 0.32, v1/worker/gpu/model_runner.py:

    execute_model   finish_requests (ended and preempted ones), add_requests, update_requests:
                    new blocks are zeroed and copied; without tokens to compute `no_forward`.
                    `pre_forward`, then the forward is launched, and `finish_forward`
    sample_tokens   sampling and the copy of its result are launched, then `post_forward`

and the calls of the connector in these are vLLM's own class (v1/worker/gpu/kv_connector.py).
Nothing here waits for the device but `AsyncOutput.get_output`: what a step computes is there
some time after the next step was scheduled and launched. Tokens that were sampled stay on the
device between steps; no block table or number is read but those that vLLM sends.

The model is that of vllm_model_engine.py: a token's KV follows from all tokens up to it, what is
sampled from all KV that the request's block table leads to.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from model_gpu import PATIENCE_S, ModelGpu, reached
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu import kv_connector as vllm_kv_connector
from vllm_model_config import HEAD_SIZE, HEADS, LAYERS
from vllm_model_engine import digest, sample

from connector.copiers import registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.cuda.base import CudaEvent

ZEROED = 0


@dataclass(eq=False)
class DeviceState:
    """A request's tokens as the device knows them; only its stream changes them."""

    tokens: list[int]
    digests: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class RequestRow:
    """What the runner keeps of a request that is in its batch."""

    state: DeviceState
    table: list[int]
    computed: int
    prefill: int


@dataclass(frozen=True)
class Part:
    """One request's share of a forward, fixed when it is launched."""

    state: DeviceState
    table: tuple[int, ...]
    start: int
    end: int
    samples: bool


class AllReduce:
    """Gives every worker's forward what those of all have read, as tensor parallelism does."""

    def __init__(self, workers: int) -> None:
        self._all = threading.Barrier(workers, timeout=PATIENCE_S)
        self._parts: list[Any] = [None] * workers

    def exchange(self, rank: int, part: Any) -> list[Any]:
        self._parts[rank] = part
        self._all.wait()
        parts = list(self._parts)
        self._all.wait()
        return parts


class AsyncOutput(AsyncModelRunnerOutput):
    """A step's output; its tokens are there when the device has come so far."""

    def __init__(self, output: ModelRunnerOutput, tokens: list[list[int]], done: CudaEvent) -> None:
        self.output, self._tokens, self._done = output, tokens, done

    def get_output(self) -> ModelRunnerOutput:
        reached(self._done)
        self.output.sampled_token_ids = self._tokens
        return self.output


class GpuWorker:
    """One rank. Its calls come one after another, in the order of the scheduler's steps."""

    def __init__(
        self,
        config: Any,
        kv_cache_config: Any,
        gpu: ModelGpu,
        monkeypatch: Any,
        reduce: AllReduce,
        pause_s: Callable[[], float],
    ) -> None:
        """`pause_s` says how long a forward computes between writing its KV and reading all."""
        self.gpu, self._reduce, self._pause_s = gpu, reduce, pause_s
        parallel = config.parallel_config
        self.rank, ranks = parallel.rank, parallel.tensor_parallel_size
        self._heads = slice(self.rank * HEADS // ranks, (self.rank + 1) * HEADS // ranks)
        (group,) = kv_cache_config.kv_cache_groups
        self._block_size = group.kv_cache_spec.block_size
        shape = (LAYERS, kv_cache_config.num_blocks, HEADS // ranks, self._block_size)
        memory = gpu.bytes(int(np.prod(shape)) * 4 * HEAD_SIZE).reshape(*shape, 4 * HEAD_SIZE)
        self._slots = memory.transpose(1, 3, 0, 2, 4)  # [B, N, L, H, bytes]
        kv = torch.from_numpy(memory).view(torch.bfloat16)
        self.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config
        )
        with monkeypatch.context() as patch:
            patch.setattr(registered, "_copiers", gpu.memory)
            patch.setattr(vllm_kv_connector, "get_kv_transfer_group", lambda: self.connector)
            self._kv_connector = vllm_kv_connector.ActiveKVConnector(
                config, {name: kv[i] for i, name in enumerate(group.layer_names)}
            )
        self.on_forward: Callable[[Any], None] = lambda scheduler_output: None
        """Runs on the device's stream before a forward: a test may be slow in it."""
        self._rows: dict[str, RequestRow] = {}
        self._launched: tuple[Any, list[str], list[list[int]]] | None = None

    # Called by the executor

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        output = scheduler_output
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._rows.pop(name, None)
        self._add_requests(output)
        self._update_requests(output)
        if output.total_num_scheduled_tokens == 0:
            return self._kv_connector.no_forward(output)
        parts, names = [], list(output.num_scheduled_tokens)
        for name in names:
            row = self._rows[name]
            end = row.computed + output.num_scheduled_tokens[name]
            table = tuple(row.table)
            parts.append(Part(row.state, table, row.computed, end, samples=end >= row.prefill))
        self._kv_connector.pre_forward(output)
        sampled: list[list[int]] = []

        def forward() -> None:
            self.on_forward(output)
            self._forward(parts, sampled)

        self.gpu.compute.launch(forward)
        self._kv_connector.finish_forward()
        self._launched = (output.finished_req_ids, names, sampled)
        return None

    def sample_tokens(self, grammar_output: Any) -> AsyncOutput | None:
        if self._launched is None:
            return None
        finished, names, sampled = self._launched
        self._launched = None
        done = self.gpu.compute.record()
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[],
        )
        output.kv_connector_output = self._kv_connector.post_forward(finished)
        finalize = getattr(self._kv_connector, "finalize_step", None)
        assert finalize is None or not self.connector.has_connector_metadata()
        return AsyncOutput(output, sampled, done)

    def shutdown(self) -> None:
        self.connector.shutdown()

    # The batch

    def _add_requests(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:  # with those that go on after a preemption
            tokens = list(new.prefill_token_ids)
            (table,) = new.block_ids
            row = RequestRow(DeviceState(tokens), list(table), new.num_computed_tokens, len(tokens))
            self._rows[new.req_id] = row

    def _update_requests(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        changes = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for name, computed, new_block_ids in changes:
            row = self._rows[name]
            row.computed = computed
            if new_block_ids is not None:
                row.table += new_block_ids[0]
        if output.new_block_ids_to_zero:
            blocks = list(output.new_block_ids_to_zero)
            self.gpu.compute.launch(lambda: self._zero(blocks))
        copies = list(output.kv_cache_block_copies or ())
        assert not copies, "a partial hit: the model has no copies of blocks"

    # On the device's stream

    def _zero(self, blocks: list[int]) -> None:
        self._slots[blocks] = ZEROED

    def _forward(self, parts: list[Part], sampled: list[list[int]]) -> None:
        for part in parts:
            state = part.state
            assert len(state.tokens) >= part.end, "a step was launched before its tokens"
            for token in state.tokens[len(state.digests) : part.end]:
                before = state.digests[-1] if state.digests else b""
                state.digests.append(digest(before, token, 0))
            at = np.arange(part.start, part.end)
            rows = np.frombuffer(b"".join(state.digests[part.start : part.end]), np.uint8)
            rows = rows.reshape(len(at), LAYERS, HEADS, -1)[:, :, self._heads]
            blocks = np.array(part.table)[at // self._block_size]
            self._slots[blocks, at % self._block_size] = rows
        time.sleep(self._pause_s())
        reading = [self._read(part) if part.samples else None for part in parts]
        ranks = self._reduce.exchange(self.rank, reading)
        for i, part in enumerate(parts):
            token = []
            if part.samples:
                seen = np.concatenate([read[i] for read in ranks], axis=2)
                token = [sample(seen.tobytes())]
                part.state.tokens += token
            sampled.append(token)

    def _read(self, part: Part) -> Any:
        """Return the KV of all tokens that the last one sees, `[token, L, H, bytes]`."""
        at = np.arange(part.end)
        return self._slots[np.array(part.table)[at // self._block_size], at % self._block_size]
