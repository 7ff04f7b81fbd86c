"""What the store holds of a prompt: tokens to keys, keys to holders."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from connector import PromptKeys
from examples.router.routing import held_at
from kvstore import Key, Locator, MissReason, UsageError

log = logging.getLogger("kvstore.router")

THREADS = 4
MODELS_MAX = 256
"""Models, by the name in requests, whose keys are known; beyond it one is learned anew."""
INDEX_AWAY = (MissReason.DEADLINE, MissReason.BREAKER_OPEN, MissReason.INDEX_ERROR)
POLL_MIN_S, POLL_MAX_S = 0.002, 0.05


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is known of one prompt."""

    tokens: Sequence[int] | None = None
    """None: only an engine can tell which."""
    block_tokens: int | None = None
    blocks: int = 0
    """Leading blocks in the store."""
    held: Mapping[str, int] = field(default_factory=dict)
    """How many of them each node holds, by its name and its host's."""
    index_away: bool = False
    """The index did not answer: what is prefilled now, no decode engine would find."""


class Prefixes:
    """Looks prompts up in the index. Knows a model's keys once an engine has told them."""

    def __init__(self, locator: Locator) -> None:
        self._locator = locator
        self._keys: dict[str, PromptKeys] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="router-lookup")

    def learn(self, model: str, answer: Mapping[str, Any]) -> Key | None:
        """Take in what a prefill engine answered; the key of the prompt's last full block."""
        params = answer.get("kv_transfer_params")
        told = params.get(PromptKeys.ASKED) if isinstance(params, dict) else None
        if not isinstance(told, dict):
            return None
        try:
            keys, last = PromptKeys.from_answer(told)
        except UsageError as e:
            log.warning("model %s: %s", model, e)
            return None
        if self._keys.get(model) != keys:
            if len(self._keys) >= MODELS_MAX:
                self._keys.pop(next(iter(self._keys)))
            self._keys[model] = keys
            log.info("model %s: blocks of %d tokens", model, keys.block_tokens)
        return last

    async def find(self, model: str, tokens: Sequence[int] | None) -> Prefix:
        """What the store holds; nothing when that cannot be told. One index round trip."""
        keys = self._keys.get(model)
        if tokens is None or keys is None:
            return Prefix(tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._find, keys, tokens)

    def _find(self, keys: PromptKeys, tokens: Sequence[int]) -> Prefix:
        try:
            holders = self._locator.leading(keys.of(tokens))
        except UsageError:  # no tokens: the engine will say so
            return Prefix()
        away = holders.short in INDEX_AWAY
        return Prefix(tokens, keys.block_tokens, len(holders), held_at(holders), away)

    async def wait_for(self, key: Key, timeout_s: float) -> dict[str, int] | None:
        """Who holds `key`, once it is published; nobody when that takes too long, None when
        the index cannot tell.

        An engine answers before its blocks are saved, so the decode engine would look too early.
        """
        loop = asyncio.get_running_loop()
        give_up_at = time.monotonic() + timeout_s
        pause_s = POLL_MIN_S
        while True:
            holders = await loop.run_in_executor(self._threads, self._locator.leading, [key])
            if holders.short in INDEX_AWAY:
                return None
            if holders or time.monotonic() + pause_s > give_up_at:
                return held_at(holders)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, POLL_MAX_S)

    def close(self) -> None:
        self._threads.shutdown()
        self._locator.close()
