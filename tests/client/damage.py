"""Bytes of a node's memory that change where they lie, as bad memory's do."""

import random

from kvstore import Client
from kvstore.segment.header import fields


def flip(writer: Client, raw_key: bytes, rng: random.Random) -> int:
    """Flip one bit of a block; its place. Only a writer's mapping can."""
    (place,) = writer.session.reader.search([raw_key])
    start = place.slot_id * 4096 + fields(place.image)[3] * 1024
    at = start + rng.randrange(len(place.buffer))
    writer.session.writer.link().memory.shm.payload[at] ^= 1 << rng.randrange(8)
    return at
