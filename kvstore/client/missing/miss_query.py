"""Defines what is asked when a block or a value is missing, and what may be in its place."""

from __future__ import annotations

from kvstore.client.base import MissQuery
from kvstore.client.explanation import FieldDifference
from kvstore.keys import Namespace
from kvstore.types import Key, Tokens

BLOCK_TOKENS_TRIED = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Block sizes that are looked for beside the client's own."""


def about_value(key: str | bytes, namespace: Namespace) -> MissQuery:
    """Return why `key` misses in `namespace`."""
    return MissQuery(0, namespace.value_key(key), namespace, lambda other: other.value_key(key))


def about_block(
    block: int, key: Key, tokens: Tokens, namespace: Namespace, block_tokens: int
) -> MissQuery:
    """Return why block number `block` of `tokens`, which is kept under `key`, misses.

    The first one may be there as clients with another block size name it; where
    earlier blocks are there, the size was right.
    """
    head = tokens[:block_tokens]
    others = [
        (
            FieldDifference("block_tokens", block_tokens, size),
            namespace.block_keys(tokens[:size], size)[0],
        )
        for size in (BLOCK_TOKENS_TRIED if block == 0 else ())
        if size != block_tokens and size <= len(tokens)
    ]
    return MissQuery(
        block, key, namespace, lambda other: other.block_keys(head, block_tokens)[0], others
    )
