"""Gives the scheduler side its view of a vLLM request: tokens, hashed by store block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from connector.layout.block_hashes import BlockHashes
from connector.messages import log_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_hints.protocol import KvHintsEnvelope
    from vllm.v1.request import Request

COUNTED = (
    "with neither prefix caching nor a processor cache (--mm-processor-cache-gb 0) vLLM names "
    "pictures, audio and video by a counter of its process, which stands for others in another one"
)


def counts_media(vllm_config: VllmConfig) -> bool:
    """Return whether vLLM's API process gives media names that are unique in that process only. A
    user's own name, or the digest of one, cannot be told from such a name."""
    media = vllm_config.model_config.multimodal_config
    cached = media is not None and media.mm_processor_cache_gb > 0
    return not cached and not vllm_config.cache_config.enable_prefix_caching


def takes_media(vllm_config: VllmConfig) -> bool:
    media = vllm_config.model_config.multimodal_config
    return media is not None and not media.language_model_only


class HashedRequest:
    """Implements `EngineRequest`; reads the engine's request, never writes it.

    vLLM says what else than tokens shapes the KV of a block (LoRA, multimodal
    input, cache salt, prompt embeddings), by the function that its own hashes
    are made with: whatever keeps them apart keeps these apart.
    """

    __slots__ = (
        "_block_tokens",
        "_chain",
        "_computed_with",
        "_hash_tokens",
        "_left_out",
        "_prompts_only",
        "_request",
    )

    def __init__(
        self,
        request: Request,
        block_tokens: int,
        hash_tokens: int,
        computed_with: tuple[str, ...] = (),
        *,
        prompts_only: bool = False,
        left_out: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        """`hash_tokens`: tokens of one of vLLM's own hashes, a divisor of `block_tokens`.
        `computed_with` is what vLLM's hashes leave out (`weights.Weights`). With `prompts_only`
        blocks behind the prompt have no hash, so that none is saved or loaded. A request that is
        `left_out` has none at all; it may come to be so, since a session's prompt grows."""
        self._left_out = left_out
        self._prompts_only = prompts_only
        self._computed_with = computed_with
        self._request = request
        self._block_tokens = block_tokens
        self._hash_tokens = hash_tokens
        self._chain = BlockHashes(block_tokens, self._extra, self._engine_hash, log_name(self))

    @property
    def request_id(self) -> str:
        return str(self._request.request_id)

    @property
    def vllm_request(self) -> Request:
        return self._request

    def tokens_of(self, block: int) -> tuple[int, int]:
        """Return the first token and the end of a store block."""
        return block * self._block_tokens, (block + 1) * self._block_tokens

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        headers: Mapping[str, str] | None = self._request.trace_headers
        return headers

    @property
    def cache_salt(self) -> str | None:
        salt: str | None = self._request.cache_salt
        return salt

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def kv_transfer_params(self) -> Mapping[str, object] | None:
        params: Mapping[str, object] | None = self._request.kv_transfer_params
        return params

    @property
    def kv_hints(self) -> KvHintsEnvelope | None:
        """Return vLLM's `KvHintsEnvelope`, or None."""
        return getattr(self._request, "kv_hints", None)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Return one hash per full store block. The list is empty for a request that is left out or
        whose extras cannot be hashed."""
        if self._left_out(self._request):
            return ()
        known = self.num_prompt_tokens if self._prompts_only else self.num_tokens
        return self._chain.hashes(self._request.all_token_ids, known)

    @property
    def part_hash(self) -> bytes | None:
        """Return the hash of the prompt's tokens behind its last full store block."""
        if self._left_out(self._request):
            return None
        return self._chain.part(self._request.all_token_ids, self.num_prompt_tokens)

    def _extra(self, first: int, end: int) -> object:
        keys, _ = generate_block_hash_extra_keys(self._request, first, end, 0)
        return (keys, self._computed_with) if self._computed_with else keys

    def _engine_hash(self, num_tokens: int) -> bytes | None:
        index = num_tokens // self._hash_tokens - 1
        hashes = self._request.block_hashes
        return bytes(hashes[index]) if 0 <= index < len(hashes) else None
