"""Answers `kvstore explain --engine`: what a prompt would load in this engine, on no engine thread.

The prompt becomes a request of vLLM's own class, which nobody schedules, so that its keys are made
as those of any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from connector.adapters.vllm.request import HashedRequest
from kvstore import Explanation, UsageError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool

    from connector.scheduler.scheduler import SchedulerCore

TOKENS = 1 << 32
"""Above every token that has a key."""


class AskedPrompts:
    """Explains prompts of one engine. It is asked by one thread."""

    def __init__(
        self,
        core: SchedulerCore,
        vllm_config: VllmConfig,
        hash_tokens: int,
        hashed: Callable[[Request], HashedRequest | None],
        pool: BlockPool | None,
    ) -> None:
        """`hashed` gives the request as the connector sees it, None where its adapter is unknown;
        `hash_tokens` are those of one of vLLM's own hashes. `pool` has vLLM's blocks, where they
        alone tell what vLLM has in its own cache."""
        self._core = core
        self._hashed = hashed
        self._hash_tokens = hash_tokens
        cache = vllm_config.cache_config
        algorithm = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        self._hasher = get_request_block_hasher(hash_tokens, algorithm)
        self._caches: bool = cache.enable_prefix_caching
        self._pool = pool

    def answer(self, question: dict[str, object]) -> dict[str, object]:
        """Answer a question of `kvstore explain`. Raises `UsageError` for what is none."""
        request_id = question.get("request_id")
        if isinstance(request_id, str) and request_id:
            found = self._core.explain_named(request_id)
            return {"explanations": list(map(_as_dict, found))}
        explained = self._explained(*_prompt(question))
        if explained is None:
            return {"unknown": "the adapter's files cannot be read, so nothing of it is shared"}
        answer: dict[str, object] = {"explanations": [_as_dict(explained)]}
        if self._caches and self._pool is None:
            answer["note"] = "what the engine has in its own cache is not known; it is not loaded"
        return answer

    def _explained(
        self, tokens: list[int], salt: str | None, adapter: LoRARequest | None
    ) -> Explanation | None:
        request = Request(
            request_id="",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=adapter,
            cache_salt=salt,
            block_hasher=self._hasher if self._caches and self._pool is not None else None,
        )
        hashed = self._hashed(request)
        if hashed is None:
            return None
        return self._core.explain_prompt(hashed, self._local_tokens(request))

    def _local_tokens(self, request: Request) -> int:
        """Return the tokens that vLLM has in its own cache, all but the last at most."""
        blocks = 0
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self._hash_tokens]:
            if self._pool is None or self._pool.get_cached_block(block_hash, [0]) is None:
                break
            blocks += 1
        return blocks * self._hash_tokens


def _as_dict(explanation: Explanation) -> dict[str, object]:
    return {"text": str(explanation), **explanation.as_dict()}


def _prompt(question: dict[str, object]) -> tuple[list[int], str | None, LoRARequest | None]:
    tokens, salt, adapter = (question.get(name) for name in ("tokens", "cache_salt", "adapter"))
    right = isinstance(tokens, list) and all(type(t) is int and 0 <= t < TOKENS for t in tokens)
    if not (isinstance(tokens, list) and tokens and right):
        raise UsageError("tokens", type(tokens).__name__, "must be token numbers, at least one")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise UsageError("cache_salt", salt, "must be text")
    if adapter is None:
        return tokens, salt, None
    named = isinstance(adapter, list) and all(isinstance(word, str) and word for word in adapter)
    if not (isinstance(adapter, list) and named and len(adapter) == 2):
        raise UsageError("adapter", adapter, "must be a name and a path")
    return tokens, salt, LoRARequest(adapter[0], lora_int_id=1, lora_path=adapter[1])
