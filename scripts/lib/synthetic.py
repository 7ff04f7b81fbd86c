"""Stands in for an engine where there is no vLLM: its KV is hashes, worked out slowly.

It takes the requests of the real one (engines.py), and what it "generates" depends on every
byte of its KV, so a wrong byte from the store shows in the output.
"""

from __future__ import annotations

import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engines import EngineSettings, serve

from kvstore import Client, Limits
from kvstore.client.values.put_pipeline import StoppedError, check_wanted, unless

BLOCK_TOKENS = 256
BLOCK_BYTES = 2 << 20
ROUNDS = 12
"""How often a block is hashed over: what makes computing slower than loading."""


def compute_block(prefix: bytes, tokens: list[int]) -> bytes:
    """Compute the KV of one block, from the block before it and its own tokens."""
    state = blake2b(prefix + repr(tokens).encode(), digest_size=64).digest()
    block = state * (BLOCK_BYTES // 64)
    for _ in range(ROUNDS):
        state = blake2b(block, digest_size=64, key=state).digest()
        block = state * (BLOCK_BYTES // 64)
    return block


class SyntheticDriver:
    """Saves what it computes when it is a producer, loads what is there when a consumer."""

    def __init__(self, settings: EngineSettings) -> None:
        self.client: Client | None = None
        self.role = "none"
        if settings.connector is not None:
            extra = settings.connector["kv_connector_extra_config"]
            self.role = settings.connector["kv_role"]
            place = {name: extra[name] for name in ("url", "key_prefix") if name in extra}
            limits = (
                {"redis_timeout_s": extra["lookup_timeout_s"]}
                if "lookup_timeout_s" in extra
                else {}
            )
            self.client = Client(
                run_dir=Path(extra["run_dir"]),
                namespace="synthetic",
                block_tokens=BLOCK_TOKENS,
                limits=Limits(**limits),
                **place,
            )

    def generate(
        self, prompts: list[list[int]], max_tokens: int, abort_after_s: dict[str, float]
    ) -> list[dict[str, Any]]:
        return [
            self._until(abort_after_s.get(str(i)), prompt, max_tokens)
            for i, prompt in enumerate(prompts)
        ]

    def _until(self, after_s: float | None, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Generate, or give it up after so many seconds, wherever that is."""
        if after_s is None:
            return self._one(prompt, max_tokens)
        give_up_at = time.monotonic() + after_s
        try:
            return unless(
                lambda: time.monotonic() >= give_up_at, lambda: self._one(prompt, max_tokens)
            )
        except StoppedError:
            return {"tokens": [], "ttft_s": 0.0, "cached_tokens": 0}

    def _one(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        started = time.perf_counter()
        full = len(prompt) // BLOCK_TOKENS
        blocks: list[bytes] = []
        if self.client is not None and self.role != "kv_producer":
            out = [bytearray(BLOCK_BYTES) for _ in range(full)]
            blocks = [bytes(b) for b in out[: self.client.get_blocks(prompt, out)]]
        loaded = len(blocks)
        for i in range(loaded, full):
            check_wanted()
            tokens = prompt[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
            blocks.append(compute_block(blocks[-1][:64] if blocks else b"", tokens))
        digest = blake2b(repr(prompt[full * BLOCK_TOKENS :]).encode(), digest_size=max_tokens)
        for block in blocks:
            digest.update(block)
        ttft_s = time.perf_counter() - started
        if self.client is not None and self.role != "kv_consumer":
            self.client.put_blocks(prompt, blocks)
        return {
            "tokens": list(digest.digest()),
            "ttft_s": ttft_s,
            "cached_tokens": loaded * BLOCK_TOKENS,
        }

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


if __name__ == "__main__":
    serve(lambda model, settings: SyntheticDriver(settings))
