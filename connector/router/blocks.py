"""Answers other routers: which leading blocks of a prompt are in the store, and where.

The question is that of Dynamo's routers to a shared cache: tokens, and the block size that the
asking router counts in; or keys, for who knows them (`connector.PromptKeys`). Either comes in JSON,
or as bytes with the rest in the URL: of 32,000 tokens JSON is most of the cost. The answer has
ranges and hits, counted in that size, and for routers that look at places who holds which.
"""

from __future__ import annotations

import re
from array import array
from binascii import unhexlify
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from connector.layout.prompt_keys import KEY_BYTES
from connector.limits import ROUTER_BLOCKS_ASKED_MAX
from connector.router.prefix import INDEX_AWAY
from kvstore import UsageError
from kvstore.spi import Key

if TYPE_CHECKING:
    from connector.router.prefix import Prefixes


class UnknownModelError(Exception):
    """Raised when no engine has told yet how it names this model's blocks, or when tokens alone do
    not determine the keys."""


_PLAIN_SIZE = re.compile(r"0*[1-9][0-9]{0,8}", re.ASCII)


@dataclass(frozen=True, slots=True)
class BlocksAsked:
    """Holds one question: `keys`, or a `model` and `tokens`."""

    keys: Sequence[Key] | bytes | None = None
    """Keys one by one, or the bytes of all."""
    model: str = ""
    tokens: Sequence[int] = ()
    block_size: int | None = None
    """Tokens of a block of the asking router; None: a block of the store's."""

    @classmethod
    def of(cls, body: Mapping[str, object]) -> Self:
        """Return the question in a request's JSON. Raises `UsageError`."""
        keys, tokens, size = (body.get(name) for name in ("keys", "tokens", "block_size"))
        if (keys is None) == (tokens is None):
            raise UsageError("body", sorted(map(str, body)), "must have one of keys and tokens")
        if size is not None and (type(size) is not int or size < 1 or keys is not None):
            raise UsageError("block_size", size, "must be an integer from 1, and is for tokens")
        if keys is None:
            if not isinstance(tokens, list) or not {*map(type, tokens)} <= {int}:
                raise UsageError("tokens", type(tokens).__name__, "must be a list of integers")
            return cls(None, str(body.get("model", "")), tokens, size)
        if not isinstance(keys, list) or len(keys) > ROUTER_BLOCKS_ASKED_MAX:
            rule = f"must be a list of at most {ROUTER_BLOCKS_ASKED_MAX}, in hexadecimal"
            raise UsageError("keys", type(keys).__name__, rule)
        try:
            if not {*map(len, keys)} <= {2 * KEY_BYTES}:
                raise ValueError
            return cls(unhexlify("".join(keys)))  # one call takes half of the time of one each
        except (TypeError, ValueError) as e:
            rule = f"must be of {KEY_BYTES} bytes each, in hexadecimal"
            raise UsageError("keys", keys[:1], rule) from e

    @classmethod
    def of_octets(cls, query: Mapping[str, str], raw: bytes) -> Self:
        """Return the question whose tokens are `raw`, each 4 bytes, little-endian, where `query`
        has a `model`; else its keys are. Raises `UsageError`."""
        model, size = query.get("model"), query.get("block_size")
        if model is None:
            if len(raw) % KEY_BYTES or len(raw) > ROUTER_BLOCKS_ASKED_MAX * KEY_BYTES or size:
                rule = f"without model= must be at most {ROUTER_BLOCKS_ASKED_MAX} keys"
                raise UsageError("body", len(raw), f"{rule} of {KEY_BYTES} bytes")
            return cls(raw)
        if size is not None and not _PLAIN_SIZE.fullmatch(size):
            raise UsageError(
                "block_size", size[:20], "must be an integer from 1, of up to 9 digits"
            )
        tokens = array("I")
        if len(raw) % tokens.itemsize:
            raise UsageError("body", len(raw), f"must be tokens of {tokens.itemsize} bytes")
        tokens.frombytes(raw)
        return cls(None, model, tokens, None if size is None else int(size))


async def where_blocks(prefixes: Prefixes, asked: BlocksAsked) -> dict[str, object]:
    """Return the answer, plain values for JSON.

    Raises `UnknownModelError`, `UsageError`, and `TimeoutError` when the index is away.
    """
    model = None if asked.keys is not None else prefixes.keys_of(asked.model)
    if model is None and asked.keys is None:
        raise UnknownModelError(
            f"model {asked.model!r}: no engine has told its keys yet (a prompt that is prefilled "
            "through this router makes one tell), or more than tokens makes them"
        )
    if model and len(asked.tokens) > ROUTER_BLOCKS_ASKED_MAX * model.block_tokens:
        rule = f"must be of at most {ROUTER_BLOCKS_ASKED_MAX} blocks"
        raise UsageError("tokens", len(asked.tokens), rule)
    runs = await prefixes.where(asked.keys, model, asked.tokens)
    if runs.short in INDEX_AWAY:
        raise TimeoutError
    first = 0
    holders = []
    for holder, blocks in runs:
        end = first + blocks
        holders.append({"node": holder.name, "host": holder.host, "start": first, "end": end})
        first = end
    store_size = model.block_tokens if model else None
    hits = runs.blocks
    if asked.block_size is not None and store_size is not None:
        hits = hits * store_size // asked.block_size
    return {
        "block_size": asked.block_size or store_size,
        "ranges": [{"start": 0, "end": hits}] if hits else [],
        "total_hits": hits,
        "store_block_size": store_size,
        "holders": holders,
    }
