"""Supports vLLM's `external_launcher`: torchrun starts the processes, each has a whole engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from connector.build import scheduler_side
from connector.scheduler.lockstep import LockstepScheduler
from connector.scheduler.lockstep_group import GlooExchange

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from connector.build import EngineShape
    from connector.settings import ConnectorSettings


def in_lock_step(vllm_config: VllmConfig) -> bool:
    """Return whether several processes, each with a scheduler of its own, run one model."""
    parallel = vllm_config.parallel_config
    workers = int(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    return workers > 1 and bool(parallel.distributed_executor_backend == "external_launcher")


def lockstep_side(config: ConnectorSettings, shape: EngineShape) -> LockstepScheduler:
    """Return the scheduler side of this process; returns when all processes of the engine have
    called."""
    exchange = GlooExchange(shape.workers)
    return LockstepScheduler(exchange, shape.layout(config), lambda: scheduler_side(config, shape))
