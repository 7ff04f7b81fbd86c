"""Bytes of a node's memory that change where they lie, as bad memory's do."""

import random

from kvstore import Client
from kvstore.segment.header import fields


def flip(writer: Client, raw_key: bytes, rng: random.Random) -> int:
    """Flip one bit of a block; its place. Only a writer's mapping can."""
    (place,) = writer.session.reader.find([raw_key])
    shm = place.attached.shm
    arena, position = divmod(place.slot_id, shm.slots_per_arena)
    size_class = fields(place.image)[3]
    start = arena * shm.superblock.arena_bytes + position * shm.slot_bytes[size_class]
    at = start + rng.randrange(len(place.payload))
    writer.session.writer.link().payload[at] ^= 1 << rng.randrange(8)
    return at
