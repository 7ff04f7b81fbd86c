"""Looks up how much of a prompt is in the store, and on which nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from connector import PromptKeys
from connector.router.routing import held_at
from kvstore import MissReason, UsageError
from kvstore.spi import DaemonThreads, HolderRuns, Key, Locator, Residency

log = logging.getLogger("kvstore.router")

THREADS = 4
MODELS_MAX = 256
"""Models, by the name in requests, whose keys are known; beyond it one must be learned again."""
INDEX_AWAY = (MissReason.DEADLINE, MissReason.BREAKER_OPEN, MissReason.INDEX_ERROR)
LOOKUP_TIMEOUT_S = 1.0
"""Time for one look at the index, the wait for a thread included: the index's own deadline is
shorter."""
INDEX_AWAY_S = 1.0
"""Time without an answer after which the index counts as away: one late answer is not worth a
prefill."""
POLL_MIN_S, POLL_MAX_S = 0.002, 0.05
TOKENS_AT_ONCE = 1 << 15
"""Tokens up to which a prompt is hashed on the event loop, compiled in under a millisecond
(docs/decisions/0088); longer ones are hashed in a thread."""
POLLS_PER_S_MAX = 2000
"""Polls of all requests that wait for blocks, together."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prefix:
    """Holds what is known of one prompt."""

    tokens: Sequence[int] | None = None
    """The prompt's tokens; None if only an engine can tell them."""
    block_tokens: int | None = None
    blocks: int = 0
    """Number of leading blocks in the store."""
    held: Mapping[str, int] = field(default_factory=dict)
    """How many of them each node holds, by its name and its host's."""
    index_away: bool = False
    """Whether the index did not answer: what is prefilled now, no decode engine would find."""


@dataclass(slots=True)
class _Model:
    keys: PromptKeys
    plain: bool = True
    """Whether its keys were those of the tokens the last time that both were known. They are not
    where a LoRA or a chat template of its own is part of them: the index then describes the tokens
    of another model."""


class Prefixes:
    """Looks prompts up in the index, or in what nodes say of their blocks. Knows a model's keys
    once an engine has told them."""

    def __init__(self, locator: Locator, residency: Residency | None = None) -> None:
        """Ask the index for prefixes only while a node is not heard, where `residency` is given."""
        self._locator = locator
        self._residency = residency
        self._models: dict[str, _Model] = {}
        self._waiting = 0
        """Requests that poll the index."""
        self._threads = DaemonThreads(THREADS, "router-lookup")

    async def learn(
        self, name: str, answer: Mapping[str, object], tokens: Sequence[int] | None
    ) -> Key | None:
        """Take in what a prefill engine answered to a prompt of that model; the key of the
        prompt's last full block. `tokens` are what the prompt was taken for."""
        params = answer.get("kv_transfer_params")
        keys_asked = params.get(PromptKeys.ASKED) if isinstance(params, dict) else None
        if not isinstance(keys_asked, dict):
            return None
        try:
            keys, last = PromptKeys.from_answer(keys_asked)
        except UsageError as e:
            log.warning("model %s: %s", name, e)
            return None
        plain = None
        if tokens and last is not None:  # off the loop: a long prompt takes milliseconds
            made = await asyncio.wrap_future(self._threads.submit(partial(keys.of, tokens)))
            plain = made[-1:] == [last]
        model = self._models.get(name)
        if model is None or model.keys != keys:
            if len(self._models) >= MODELS_MAX:
                self._models.pop(next(iter(self._models)))
            model = self._models[name] = _Model(keys)
            log.info("model %s: blocks of %d tokens", name, keys.block_tokens)
        if plain is not None:
            model.plain = plain
        return last

    async def find(self, name: str, tokens: Sequence[int] | None) -> Prefix:
        """Return what the store holds for that model; nothing when that cannot be told. One index
        round trip, or none."""
        model = self._models.get(name)
        if tokens is None or model is None:
            return Prefix(tokens)
        if not model.plain:
            return Prefix(tokens, model.keys.block_tokens)
        try:
            return await self._look(self._find, model.keys, tokens)
        except TimeoutError:
            return Prefix(tokens, model.keys.block_tokens, index_away=True)

    def keys_of(self, name: str) -> PromptKeys | None:
        """Return how that model's blocks are named; None while that is not known, or is not by
        tokens alone."""
        model = self._models.get(name)
        return model.keys if model is not None and model.plain else None

    async def where(
        self, keys: Sequence[Key] | bytes | None, model: PromptKeys | None, tokens: Sequence[int]
    ) -> HolderRuns:
        """Return who holds the leading blocks of `keys`, or without them of `tokens` in that model.

        Raises `TimeoutError`, and `UsageError` for what are no tokens.
        """

        if keys is None and model:
            keys = model.of(tokens) if len(tokens) <= TOKENS_AT_ONCE else None
        if keys is not None and self._residency is not None and self._residency.in_sync:
            return self._residency.runs(keys)  # a thread would cost more than the look

        def look() -> HolderRuns:
            return self._runs(model.of(tokens) if keys is None and model else keys or ())

        return await self._look(look)

    async def _look(self, look: Callable[..., T], *arguments: object) -> T:
        """Call `look` in a thread. Raises `TimeoutError`."""
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            return await asyncio.wrap_future(self._threads.submit(partial(look, *arguments)))

    def _find(self, keys: PromptKeys, tokens: Sequence[int]) -> Prefix:
        try:
            runs = self._runs(keys.of(tokens))
        except UsageError:  # no tokens: the engine will say so
            return Prefix()
        away = runs.short in INDEX_AWAY
        return Prefix(tokens, keys.block_tokens, runs.blocks, held_at(runs), away)

    def _runs(self, wanted: Sequence[Key] | bytes) -> HolderRuns:
        if self._residency is not None and self._residency.in_sync:
            return self._residency.runs(wanted)
        return HolderRuns.of(self._locator.leading(wanted))

    async def wait_for(self, key: Key, timeout_s: float) -> dict[str, int] | None:
        """Return who holds `key`, once it is published; nobody when that takes too long, None when
        the index cannot tell.

        An engine answers before its blocks are saved, so the decode engine would look too early.
        """
        self._waiting += 1
        try:
            return await self._poll(key, time.monotonic() + timeout_s)
        finally:
            self._waiting -= 1

    async def _poll(self, key: Key, give_up_at: float) -> dict[str, int] | None:
        told_at = time.monotonic()
        pause_s = POLL_MIN_S
        while True:
            holders = await self._holders(key)
            now = time.monotonic()
            if holders is not None:
                told_at = now
                if holders or now + pause_s > give_up_at:
                    return held_at(holders)
            elif now > min(told_at + INDEX_AWAY_S, give_up_at):
                return None
            await asyncio.sleep(pause_s)
            pause_s = max(min(pause_s * 2, POLL_MAX_S), self._waiting / POLLS_PER_S_MAX)

    async def _holders(self, key: Key) -> HolderRuns | None:
        """Return who holds the prefix of `key`; None when the index does not tell."""
        try:
            holders = await self._look(self._locator.leading, [key])
        except TimeoutError:
            return None
        return None if holders.short in INDEX_AWAY else HolderRuns.of(holders)

    def close(self) -> None:
        self._threads.close()
        self._locator.close()
        if self._residency is not None:
            self._residency.close()
