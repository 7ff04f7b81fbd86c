"""Blocks of random bytes, as a session finds them."""

from __future__ import annotations

import random

from kvstore.client.session import BlockSession
from kvstore.types import Key, Tier


def random_payload(key: Key, size_bytes: int) -> bytes:
    return random.Random(key).randbytes(size_bytes)


def found(session: BlockSession, keys: list[Key], size_bytes: int) -> dict[Key, Tier]:
    """Those of `keys` that are read, each with its own bytes, and where they lay."""
    there = [one for one in session.lookup(keys) if one is not None]
    views = session.views(there, memoryview(bytearray(len(keys) * size_bytes)))
    read: dict[Key, Tier] = {}
    for one, tier, view in zip(there, session.tiers(there), views, strict=True):
        if view is not None:
            assert bytes(view.buffer) == random_payload(one.key, size_bytes)
            read[one.key] = tier
    return read
