"""vLLM's worker for CPUs, able to be a later stage of a pipeline without compiling the model.

vLLM makes the buffers that a stage receives into when it runs the model once before it serves,
and for CPUs it does so only to compile. Without them the second stage fails an assertion of its
own (`sync_and_gather_intermediate_tensors`), with a connector or without.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """For `worker_cls`: "stage_worker.StageWorker"."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if not get_pp_group().is_first_rank:
            runner = self.model_runner
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
