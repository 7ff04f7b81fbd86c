"""Sends prompts, one at a time, to vLLM's scheduler with our connector beside it.

The scheduler, its KV cache manager and coordinator, our connector's scheduler side and the node's
core are the real ones. Workers are a model: what a step saves is in the store after it, and what it
loads has arrived, unless a block of it was evicted. vLLM's own cache is emptied before each prompt,
so that only the store has a prefix.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy

from benchmarks.hybrids.layouts import Planned
from connector import build
from connector.layout.geometry import StoreLayout
from connector.messages import LoadJob, SaveJob, WorkerReport
from connector.scheduler import lookup
from connector.settings import ConnectorSettings
from kvstore import MissReason
from kvstore.client.base import LookupResult
from kvstore.core.answers import Grant
from kvstore.core.events import Commit, Reserve, Touch
from kvstore.core.node import NodeCore
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.spi import BlockRef, Key
from kvstore.testing.blockstore import MemoryBlockStore

SESSION, NAMESPACE = 1, 7
STEP_TOKENS = 65_536
PROMPT_BLOCK_TOKENS = 64
"""Of the trace's blocks."""
PROMPT_TOKENS_MAX = 1 << 20
STEPS_MAX = 10_000
"""Of one prompt."""
RECORD = b"in the core"


class Tokens(array):  # type: ignore[type-arg]
    """Holds token ids as the connector hashes them: what vLLM and it do with them is a copy."""

    @classmethod
    def of(cls, blocks: Sequence[int]) -> Tokens:
        """Return the tokens of blocks of the trace: each is the name of its block."""
        names = numpy.asarray(blocks, dtype=numpy.uint32)
        return cls("I", numpy.repeat(names, PROMPT_BLOCK_TOKENS).tobytes())

    def copy(self) -> Tokens:
        return type(self)(self.typecode, self)


class AtOnce:
    """Stands for a `WorkThread`: handles what it is given before `put` returns."""

    full = False

    def __init__(self, name: str, handle: Callable[[Any], None], items_max: int) -> None:
        self._handle = handle

    def start(self, first: Callable[[], None] | None = None) -> None:
        if first is not None:
            first()

    def put(self, item: object) -> bool:
        self._handle(item)
        return True

    def end(self) -> None: ...

    def join(self, timeout_s: float) -> bool:
        return True


class CoreStore(MemoryBlockStore):
    """Finds what a node's core has, which evicts by its own policy and writes no payload."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        whole = size_bytes // SLOT_BYTES_MIN * SLOT_BYTES_MIN
        self.core = NodeCore(node_id=1, epoch=1, size_bytes=whole)
        self.core.reuse = mock.Mock(told=dict)  # a statistic that decides nothing
        self.now = 0.0

    def lookup(self, keys: Sequence[Key], timeout_s: float | None = None) -> LookupResult:
        by_key = self.core.blocks.by_key
        found = LookupResult(BlockRef(key, RECORD) if key in by_key else None for key in keys)
        if None in found:
            found.short = MissReason.ABSENT
        return found

    def save(self, keys: Sequence[Key], sizes: Sequence[int]) -> bool:
        """Store blocks of these sizes; False when one was refused."""
        n, none = len(keys), [0] * len(keys)
        put = Reserve(SESSION, 1, keys, sizes, NAMESPACE, none, none, [None] * n, none)
        answers: Any = self.core.handle(put, self.now).replies[0].body
        grants = [(one.slot_id, one.generation, 0) for one in answers if isinstance(one, Grant)]
        self.core.handle(Commit(SESSION, 2, grants), self.now)
        outbox = self.core.blocks.outbox  # the index hears of it at once
        outbox.published(outbox.take_publications(n))
        outbox.removed(outbox.take_removals(outbox.removals_pending))
        return all(key in self.core.blocks.by_key for key in keys)

    def touch(self, keys: Sequence[Key], *, saved: bool = False, left: bool = False) -> None:
        if keys:
            self.core.handle(Touch(SESSION, list(keys), saved=saved, left=left), self.now)

    def were_read(self, keys: Sequence[Key]) -> list[bool | None]:
        slots = map(self.core.blocks.by_key.get, keys)
        return [False if slot is None else slot.read or None for slot in slots]

    @property
    def used_bytes(self) -> int:
        return sum(slot.length for slot in self.core.blocks.by_key.values())


class Engine:
    """One engine of vLLM's, in front of a store."""

    def __init__(
        self, planned: Planned, size_bytes: int | None, folder: Path, **settings: Any
    ) -> None:
        """`size_bytes` are the store's; None: there is none, to ask for the `layout` alone.
        `settings` are the connector's; `folder` takes the files of a model that nobody loads."""
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        from connector.adapters.vllm.shape import engine_shape

        settings = {"lookup_timeout_s": 30.0, "tp_sizes": [1], **settings}
        config = _config(folder, planned, settings)
        kv_cache = _kv_cache(config, planned)
        own = ConnectorSettings.from_extra(settings)
        self.layout: StoreLayout = engine_shape(config, kv_cache, own).layout(own)
        block_tokens = self.layout.block_tokens
        self.sizes = [group.geometry.payload_bytes(block_tokens) for group in self.layout.groups]
        """Bytes of a store block, or of a state, by group."""
        self.store = CoreStore(size_bytes or 1 << 40)
        told = kv_cache_utils.generate_scheduler_kv_cache_config([kv_cache])
        block, hashed = kv_cache_utils.resolve_kv_cache_block_sizes(told, config)
        with (
            mock.patch.object(build, "open_store", return_value=self.store),
            mock.patch.object(lookup, "WorkThread", AtOnce),
        ):
            self._scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=told,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block,
                hash_block_size=hashed,
                log_stats=False,
            )
            # The store is opened by the first look-up.
            self._scheduler.connector._scheduler._store.get()
        self._hashed = hashed
        self._names = itertools.count()
        self._answer: list[int] = []
        self.refused = 0
        self.saved_bytes = 0
        self.failed_loads = 0

    def ask(self, blocks: Sequence[int], now: float = 0.0, answer: Sequence[int] = ()) -> int:
        """Return how many tokens of the prompt were not computed. It is `blocks` of the trace, by
        name, as is its `answer`."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.store.now = now
        assert self._scheduler.reset_prefix_cache(), "something is running still"
        name = f"r{next(self._names)}"
        hashes = block_hashes([*blocks, *answer], self._hashed)
        # The last token is no block's.
        self._answer = [*Tokens.of(answer), 0]
        most = len(self._answer)
        parameters = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        parameters.update_from_generation_config({}, None)
        self._scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=Tokens.of(blocks),
                sampling_params=parameters,
                pooling_params=None,
                block_hasher=lambda request: hashes[
                    len(request.block_hashes) : request.num_tokens // self._hashed
                ],
            )
        )
        hit: int | None = None
        for _ in range(STEPS_MAX):
            first = self._step(name)
            hit = first if hit is None else hit
            if not self._scheduler.has_requests():
                assert hit is not None
                return hit
        raise AssertionError(f"not done after {STEPS_MAX} steps")

    def _step(self, name: str) -> int | None:
        """Run one step; returns where in the prompt it began to compute, None: nowhere."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from connector.adapters.vllm.connector import KVStoreWorkerMetadata

        output = self._scheduler.schedule()
        begun, sampled = None, {}
        for one, count in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[one]
            end = request.num_computed_tokens  # the scheduler has advanced it already
            begun = end - count
            answered = request.num_tokens - request.num_prompt_tokens
            sampled[one] = [self._answer[answered]] if end == request.num_tokens else []
        plan = output.kv_connector_metadata.plan
        report = WorkerReport()
        loaded = {job.request_id for job in plan.loads}
        failed = {job.request_id for job in plan.loads if not self._load(job, report)}
        for job in plan.saves:
            self._save(job, report)
        transfers = KVConnectorOutput(
            finished_recving=loaded - failed,
            failed_recving=failed,
            kv_connector_worker_meta=KVStoreWorkerMetadata(report),
        )
        answer = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={one: i for i, one in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=transfers,
        )
        self._scheduler.update_from_output(output, answer)
        return begun

    def _load(self, job: LoadJob, report: WorkerReport) -> bool:
        """Use what the job loads, as a worker does behind its load."""
        by_key = self.store.core.blocks.by_key
        for position, block in enumerate(job.blocks):
            if not block.found or any(found.key not in by_key for found in block.found):
                report.failed_blocks[job.job_id] = position
                self.failed_loads += 1
                return False
        self.store.touch([found.key for block in job.blocks for found in block.found])
        return True

    def _save(self, job: SaveJob, report: WorkerReport) -> None:
        """Store what the job saves, group by group, use what it continues and leave the rest, as a
        worker does."""
        for group, size in enumerate(self.sizes):
            keys = [key for b in job.blocks if b.group == group for key in b.keys]
            if keys:
                self.saved_bytes += size * len(keys)
                self.refused += not self.store.save(keys, [size] * len(keys))
            if job.before:
                before = [key for shard in job.before[group] for key in shard]
                self.store.touch([*before, *keys], saved=True)
        self.store.touch([key for by in job.left for shard in by for key in shard], left=True)
        report.ended_saves[job.job_id] = 1
        report.stored_blocks[job.job_id] = frozenset(range(len(job.blocks)))

    def needed_bytes(self, num_tokens: int) -> int:
        """Return bytes of what a prompt of so many tokens needs to be found whole."""
        tokens = self.layout.block_tokens
        blocks = num_tokens // tokens
        return sum(
            size * (blocks - group.needed_from(blocks * tokens) // tokens)
            for group, size in zip(self.layout.groups, self.sizes, strict=True)
        )

    def close(self) -> None:
        self._scheduler.shutdown()


class Prompt(NamedTuple):
    """Holds one request of a session."""

    at: float
    session: int
    blocks: list[int]
    """Names of its blocks, of `PROMPT_BLOCK_TOKENS` each."""
    answer: Sequence[int] = ()
    """Those of its answer's blocks that are followed; the next prompt of the session has them."""

    @property
    def size(self) -> int:
        """Tokens of the prompt."""
        return len(self.blocks) * PROMPT_BLOCK_TOKENS


def block_hashes(blocks: Sequence[int], hashed_tokens: int) -> list[bytes]:
    """Return the chained hashes of a prompt's full hash blocks, of `hashed_tokens` each. Those that
    are parts of one block of the trace have one hash: nothing is looked for by it."""
    hashes, last = [], b""
    per, parts = (
        hashed_tokens // PROMPT_BLOCK_TOKENS or 1,
        PROMPT_BLOCK_TOKENS // hashed_tokens or 1,
    )
    for end in range(per, len(blocks) + 1, per):
        last = sha256(last + array("q", blocks[end - per : end]).tobytes()).digest()
        hashes += [last] * parts
    return hashes


def _config(folder: Path, planned: Planned, settings: dict[str, Any]) -> Any:
    """Return vLLM's configuration, of a model that stands for any: only its KV cache is asked
    for."""
    from transformers import LlamaConfig
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    if not (folder / "config.json").exists():
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=PROMPT_TOKENS_MAX,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)
        (folder / "pytorch_model.bin").write_bytes(b"weights")
    model = ModelConfig(
        model=str(folder),
        dtype="bfloat16",
        seed=0,
        skip_tokenizer_init=True,
        max_model_len=PROMPT_TOKENS_MAX,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=planned.block_tokens, enable_prefix_caching=True, mamba_cache_mode="align"
        ),
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=PROMPT_TOKENS_MAX,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="connector.adapters.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings,
        ),
    )
    # Room for the longest prompt, and for all groups' blocks of a step.
    smallest = min(spec.block_size for spec in planned.specs.values())
    blocks = 2 * (PROMPT_TOKENS_MAX // planned.block_tokens + STEP_TOKENS // smallest)
    cache = config.cache_config
    cache.num_gpu_blocks = cache.num_gpu_blocks_override = blocks
    cache.block_size, cache.kv_cache_layout = planned.block_tokens, "BLNHC"
    register_all_kvcache_specs(config)
    return config


def _kv_cache(config: Any, planned: Planned) -> Any:
    """Return vLLM's own plan of the layers' groups."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.core import kv_cache_utils

    with set_current_vllm_config(config):
        (kv_cache,) = kv_cache_utils.get_kv_cache_configs(config, [planned.specs], [1 << 50])
    return kv_cache
