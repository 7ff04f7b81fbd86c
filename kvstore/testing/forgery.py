"""Forges records of an index as somebody would who may write there: each is whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvstore.record import pack_record
from kvstore.types import Key, Location


def forge(key: Key, rng: random.Random, places: Sequence[Location]) -> bytes:
    """Return a record whose CRC is right, of another block or with one field of another value."""
    place = rng.choice(places)
    lies = {
        "epoch": (place.epoch + 1) % (1 << 32),
        "slot": (place.slot + 1) % (1 << 32),
        "generation": (place.generation + 1) % (1 << 64),
        "length": (place.length + rng.choice((-1, 1, 1 << 31))) % (1 << 32),
        "checksum": rng.getrandbits(64),
    }
    name = rng.choice([None, *lies])
    return pack_record(key, place if name is None else place._replace(**{name: lies[name]}))
