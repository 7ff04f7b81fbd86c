"""Supports vLLM's `external_launcher`: torchrun starts the processes, each has a whole engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from connector.build import scheduler_side
from connector.scheduler.lockstep import LockstepScheduler
from connector.scheduler.lockstep_group import GlooExchange

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

    from connector.build import EngineShape
    from connector.settings import ConnectorSettings


def in_lock_step(vllm_config: VllmConfig) -> bool:
    """Return whether several processes, each with a scheduler of its own, run one model."""
    parallel = vllm_config.parallel_config
    launched = parallel.distributed_executor_backend == "external_launcher"
    return bool(launched) and workers_of(parallel) > 1


def workers_of(parallel: ParallelConfig) -> int:
    """Return how many processes run the model for one scheduler."""
    sizes = (
        parallel.tensor_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.pipeline_parallel_size,
    )
    return math.prod(int(size) for size in sizes)


def lockstep_side(config: ConnectorSettings, shape: EngineShape) -> LockstepScheduler:
    """Return the scheduler side of this process; returns when all processes of the engine have
    called."""
    exchange = GlooExchange(shape.workers)
    return LockstepScheduler(exchange, shape.layout(config), lambda: scheduler_side(config, shape))
