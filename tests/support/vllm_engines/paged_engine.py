"""A real engine on a CPU whose KV pages a test may read, with latents (MLA) too: run by its path.

vLLM switches chunked prefill and prefix caching off for latents on a CPU, although its kernels go
on from cached tokens, as they must after a load. `PAGED_ENGINE=chunks` in the environment keeps
chunked prefill: then an engine without a store computes in the same pieces as one that loads.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

from engines import Driver, EngineSettings, make_llm, serve

STEP_TIMEOUT_S = 240.0


class PagedDriver(Driver):
    """Answers one prompt at a time and writes down the pages that it used."""

    def answer(self, prompt: list[int], max_tokens: int, out: str) -> dict[str, Any]:
        """Return the tokens, and how many were cached. `out` gets the bytes of the prompt's pages,
        by layer: `[layer, engine block, bytes]`."""
        import numpy as np
        from vllm import SamplingParams

        core = self.engine.engine_core.engine_core
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(f"r{self._next}", {"prompt_token_ids": prompt}, parameters)
        self._next += 1
        tokens: list[int] = []
        cached, blocks = -1, []
        give_up_at = time.monotonic() + STEP_TIMEOUT_S
        while self.engine.has_unfinished_requests() and time.monotonic() < give_up_at:
            for output in self.engine.step():
                tokens = list(output.outputs[0].token_ids)
                cached = output.num_cached_tokens if output.num_cached_tokens is not None else -1
            for name in list(core.scheduler.requests):
                (blocks,) = core.scheduler.kv_cache_manager.get_block_ids(name) or ([],)
        # Freed pages keep their bytes until somebody else is given them: nobody else is here.
        count = -(-len(prompt) // core.vllm_config.cache_config.block_size)
        np.save(out, np.stack([_pages(layer, blocks[:count]) for layer in self._layers()]))
        return {"tokens": tokens, "ttft_s": 0.0, "cached_tokens": cached}

    def _layers(self) -> list[Any]:
        worker = self.engine.engine_core.engine_core.model_executor.driver_worker.worker
        return list(worker.model_runner.kv_caches)


def _pages(layer: Any, blocks: list[int]) -> Any:
    import torch

    return layer[blocks].contiguous().view(torch.uint8).flatten(1).numpy()


def keep_chunks() -> None:
    """Undo what vLLM for CPUs does to a configuration with latents."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    @functools.wraps(check)
    def kept(config: Any) -> None:
        tokens = config.scheduler_config.max_num_batched_tokens
        check(config)
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = tokens

    CpuPlatform.check_and_update_config = staticmethod(kept)


def make_driver(model: str, settings: EngineSettings) -> PagedDriver:
    if os.environ.get("PAGED_ENGINE") == "chunks":
        keep_chunks()
    return PagedDriver(make_llm(model, settings))


if __name__ == "__main__":
    serve(make_driver)
