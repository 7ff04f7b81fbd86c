"""An engine of vLLM as its default is on GPUs, without one: asynchronous scheduling, model runner
V2, two steps in flight.

What is vLLM's own: the scheduler (`AsyncScheduler`) with its block pool, the engine's step
(`EngineCore.step_with_batch_queue`, v1/engine/core.py), the executor of one process, the
connector's calls in a worker (vllm_gpu_runner.py) and, with several workers, the aggregation of
what they say. A step is scheduled and launched before the one before it has its output:

    schedule n+1, execute_model n+1, sample_tokens n+1; then wait for n, update_from_output n

With several workers each has a thread for its calls and one for outputs, as the processes of
vLLM's MultiprocExecutor have: the scheduler goes on while they are at it.
"""

from __future__ import annotations

import copy
import queue
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from model_gpu import PATIENCE_S, ModelGpu
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager
from vllm_gpu_runner import AllReduce, GpuWorker
from vllm_model_config import ENGINE_BLOCK, kv_cache_config, vllm_config
from vllm_steps import new_request

from connector import build
from kvstore.testing.blockstore import MemoryBlockStore
from kvstore.testing.cuda import ModelCuda

STEPS_IN_FLIGHT = 2


def one_process(worker: GpuWorker) -> UniProcExecutor:
    """Run vLLM's executor in the engine's own process."""
    executor = object.__new__(UniProcExecutor)
    executor.driver_worker = worker
    return executor


class _Answers(Future):  # type: ignore[type-arg]
    """As that of MultiprocExecutor: answers are put together when somebody asks, in their order."""

    def __init__(self, of: list[Future[Any]], together: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self._of, self._together = of, together

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._together([one.result(PATIENCE_S) for one in self._of]))
        return super().result()


class ManyProcesses:
    """vLLM's MultiprocExecutor with threads for processes."""

    def __init__(self, workers: list[GpuWorker], connector: Any) -> None:
        self._workers = workers
        self._together = KVOutputAggregator.from_connector(connector, len(workers)).aggregate
        self._busy_loops = [ThreadPoolExecutor(1) for _ in workers]
        self._output_threads = [ThreadPoolExecutor(1) for _ in workers]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        assert non_block
        return _Answers(self._ask("execute_model", scheduler_output), self._together)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        assert non_block
        return _Answers(self._ask("sample_tokens", grammar_output), self._together)

    def _ask(self, method: str, argument: Any) -> list[Future[Any]]:
        answers = []
        everybody = zip(self._workers, self._busy_loops, self._output_threads, strict=True)
        for worker, loop, outputs in everybody:
            answer: Future[Any] = Future()
            own = copy.deepcopy(argument)  # it crosses a process
            loop.submit(self._run, worker, method, own, outputs, answer)
            answers.append(answer)
        return answers

    @staticmethod
    def _run(
        worker: GpuWorker, method: str, argument: Any, outputs: Any, answer: Future[Any]
    ) -> None:
        try:
            result = getattr(worker, method)(argument)
        except Exception as e:
            answer.set_exception(e)
            return

        def tell() -> None:
            try:
                late = isinstance(result, AsyncModelRunnerOutput)
                output = result.get_output() if late else result
                answer.set_result(copy.deepcopy(output))  # it crosses a process, too
            except Exception as e:
                answer.set_exception(e)

        outputs.submit(tell)

    def shutdown(self) -> None:
        for pool in (*self._busy_loops, *self._output_threads):
            pool.shutdown()
        for worker in self._workers:
            worker.shutdown()


class GpuEngine:
    """The engine's core with everything around it; `step` is one step of its loop."""

    def __init__(
        self,
        model: Path,
        store: MemoryBlockStore,
        monkeypatch: Any,
        devices: Path,
        *,
        blocks: int = 64,
        workers: int = 1,
        zeroing: bool = True,
        seed: int = 0,
        late_s: float = 0.001,
        **config: Any,
    ) -> None:
        """`zeroing`: new blocks are zeroed, as those of some models are. `seed` is that of how long
        forwards take, up to twice `late_s`."""
        monkeypatch.setattr(build, "open_store", lambda *_, **__: store)
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        self.config = vllm_config(model, blocks=blocks, **config)
        # After vLLM has looked at what this machine can do.
        self.config.scheduler_config.async_scheduling = True
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        assert self.config.max_concurrent_batches == STEPS_IN_FLIGHT
        self.config.parallel_config.tensor_parallel_size = workers
        self.config.parallel_config.world_size = workers
        groups = kv_cache_config(blocks, heads_of=workers)
        scheduler = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler = scheduler(
            vllm_config=self.config,
            kv_cache_config=groups,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=ENGINE_BLOCK,
            log_stats=True,
        )
        self.scheduler.needs_kv_cache_zeroing = zeroing
        rng, reduce = random.Random(seed), AllReduce(workers)
        self.gpus = [ModelGpu(ModelCuda(devices, late_s=late_s)) for _ in range(workers)]
        self.workers = []
        for rank, gpu in enumerate(self.gpus):
            own = copy.copy(self.config)
            own.parallel_config = copy.copy(self.config.parallel_config)
            own.parallel_config.rank = rank
            self.workers.append(
                GpuWorker(own, groups, gpu, monkeypatch, reduce, lambda: rng.random() * 2 * late_s)
            )
        executor: Any = one_process(self.workers[0])
        if workers > 1:
            executor = ManyProcesses(self.workers, self.scheduler.connector)
        self.core = self._core(executor)
        self._watch(executor)
        hash_fn = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(ENGINE_BLOCK, hash_fn)
        self.outputs: dict[str, list[int]] = {}
        self.computed_tokens = self.loaded_tokens = self.preemptions = 0
        self.in_flight = 0
        """Steps with a forward, at most, that were launched and had no output yet."""
        self.plans: list[Any] = []

    def _core(self, executor: Any) -> EngineCore:
        """Make vLLM's core as its `__init__` leaves it, without a process and a model of its
        own."""
        core = object.__new__(EngineCore)
        core.vllm_config, core.log_stats = self.config, False
        core.scheduler, core.model_executor = self.scheduler, executor
        core.batch_queue_size = self.config.max_concurrent_batches
        core.batch_queue = deque(maxlen=core.batch_queue_size)
        core.is_mm_encoder_only = core.is_pooling_model = core.check_for_draft_tokens = False
        core.async_scheduling = True
        core.aborts_queue = queue.Queue()
        core._weight_version = "default"
        return core

    def _watch(self, executor: Any) -> None:
        execute = executor.execute_model

        def execute_model(output: Any, non_block: bool = False) -> Any:
            self.computed_tokens += output.total_num_scheduled_tokens
            self.preemptions += len(output.preempted_req_ids or ())
            plan = output.kv_connector_metadata.plan
            self.plans.append(plan)
            blocks = (block for job in plan.loads for block in job.blocks)
            self.loaded_tokens += sum(len(b.block_ids) for b in blocks) * ENGINE_BLOCK
            before = sum(o.total_num_scheduled_tokens > 0 for _, o, _ in self.core.batch_queue)
            launched = before + (output.total_num_scheduled_tokens > 0)
            self.in_flight = max(self.in_flight, launched)
            return execute(output, non_block)

        executor.execute_model = execute_model

    def add(
        self, name: str, prompt: list[int], max_tokens: int = 4, stop: Iterable[int] = ()
    ) -> None:
        self.outputs[name] = []
        request = new_request(name, prompt, max_tokens, self._hasher, stop=stop)
        self.scheduler.add_request(request)

    def abort(self, name: str, *, amid_step: bool = False) -> None:
        """Abort as a client asks: between steps, or while the engine waits for a step's output."""
        if amid_step:
            self.core.aborts_queue.put_nowait([name])
        else:
            self.core.abort_requests([name])

    def step(self) -> None:
        """Step as `EngineCoreProc._process_engine_step` does."""
        outputs, executed = self.core.step_with_batch_queue()
        for client in (outputs or {}).values():
            for one in client.outputs:
                self.outputs[one.request_id] += one.new_token_ids
        if not executed and self.scheduler.has_requests():
            time.sleep(0.001)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.core.batch_queue)

    def run(self, steps_max: int = 20_000) -> None:
        """Step until nothing is left to do, saves included."""
        for _ in range(steps_max):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {steps_max} steps")

    def reset(self) -> bool:
        """Reset as the server's /reset_prefix_cache does, the store left alone. It is for one
        worker: where a call of workers looks for the connector is one place in a process."""
        (worker,) = self.workers
        kv_transfer_state._KV_CONNECTOR_AGENT = worker.connector
        try:
            return bool(self.core.reset_prefix_cache())
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        for gpu in self.gpus:
            gpu.cuda.hold.set()
        self.scheduler.shutdown()
        self.core.model_executor.shutdown()
        for gpu in self.gpus:
            gpu.close()
