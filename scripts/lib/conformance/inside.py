"""Runs an engine of `scripts/conformance`: what its cases do inside of it, beside generating.

The program of the engine's process, started by `Bench.engine`, maybe by the Python of others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# This folder, where Python puts a program's, would hide other modules of these names.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from engines import CALL_TIMEOUT_S, Driver, make_llm, serve  # noqa: E402

NEEDLE_BYTES = 64
TOKENS_APART = 2
"""Of every so many tokens one is looked for."""


class Inside(Driver):
    """A driver whose connector can be held up, and whose KV can be spoiled and looked at."""

    def version(self) -> str:
        """Return the version of this vLLM."""
        import vllm

        return str(vllm.__version__)

    def pause_before_loads(self, asked: str, go: str) -> None:
        """Have the next load wait: once a lookup has promised tokens the file `asked` appears, and
        the engine goes on when `go` is there."""

        def paused(blocks: Any, tokens: int) -> bool:
            Path(asked).touch()
            give_up_at = time.monotonic() + CALL_TIMEOUT_S / 2
            while not Path(go).exists() and time.monotonic() < give_up_at:
                time.sleep(0.01)
            return True

        self._once_promised(paused)

    def spoil_loads(self) -> None:
        """Have every block that the connector has loaded be zeros when a layer reads it."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.forward_context import get_forward_context

        loaded: set[int] = set()
        tokens_per_block = self.engine.vllm_config.cache_config.block_size

        def note(blocks: Any, tokens: int) -> bool:
            loaded.update(blocks.get_block_ids()[0][: tokens // tokens_per_block])
            return False

        self._once_promised(note)
        connector = get_kv_transfer_group()
        wait = connector.wait_for_layer_load

        def spoil(layer_name: str) -> None:
            wait(layer_name)
            layer = get_forward_context().no_compile_layers[layer_name]
            layer.kv_cache[sorted(loaded)] = 0

        connector.wait_for_layer_load = spoil

    def _once_promised(self, then: Callable[[Any, int], bool]) -> None:
        """Call `then` with a request's blocks whenever the connector has promised tokens of it,
        until it returns true."""
        connector = self.engine.engine_core.engine_core.scheduler.connector
        taken = connector.update_state_after_alloc

        def told(request: Any, blocks: Any, tokens: int, *more: Any, **named: Any) -> Any:
            done = taken(request, blocks, tokens, *more, **named)
            if tokens and then(blocks, tokens):
                connector.update_state_after_alloc = taken
            return done

        connector.update_state_after_alloc = told

    def kv(self) -> dict[str, Any]:
        """Return how the KV of tokens begins, in hexadecimal, and where this engine's own cache
        lies: [address, bytes] of each layer."""
        import torch

        needles: set[str] = set()
        places = []
        for layer in self._layers():
            storage = layer.untyped_storage()
            places.append([storage.data_ptr(), storage.nbytes()])
            rows = layer[:, :, ::TOKENS_APART].contiguous().view(torch.uint8)
            for row in rows.reshape(-1, rows.shape[-1])[:, :NEEDLE_BYTES].numpy():
                if row.any():
                    needles.add(row.tobytes().hex())
        return {"needles": sorted(needles), "places": places}

    def _layers(self) -> list[Any]:
        config = self.engine.vllm_config.compilation_config
        found = [getattr(one, "kv_cache", None) for one in config.static_forward_context.values()]
        return [one for one in found if one is not None]


if __name__ == "__main__":
    serve(lambda model, settings: Inside(make_llm(model, settings)))
