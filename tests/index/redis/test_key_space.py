"""Requests to Redis for many blocks say each key and its record."""

from __future__ import annotations

import random

import hiredis
from each_input import each

from kvstore.index.base import KeyRecord
from kvstore.index.redis.key_space import KeySpace

SHA = b"f" * 40


def some(count: int) -> list[KeyRecord]:
    rng = random.Random(count)
    return [KeyRecord(rng.randbytes(32), rng.randbytes(rng.choice([44, 60]))) for _ in range(count)]


def words(request: bytes) -> object:
    reader = hiredis.Reader()
    reader.feed(request)
    told = reader.gets()
    assert not reader.has_data()
    return told


@each("count", [1, 2, 300])
@each("prefix", ["k", "kv:default", "p" * 128])
def test_a_request_says_each_key_and_its_record(count: int, prefix: str) -> None:
    space, blocks = KeySpace(prefix), some(count)
    names = [b"%s:{%s}:%s" % (prefix.encode(), k[:8].hex().encode(), k[8:]) for k, _ in blocks]
    assert names == [space.redis_key(key) for key, _ in blocks]
    records = [record for _, record in blocks]
    paired = [word for pair in zip(names, records, strict=True) for word in pair]
    assert words(space.set_request(blocks)) == [b"MSET", *paired]
    script = [b"EVALSHA", SHA, b"%d" % count, *names, *records]
    assert words(space.script_request(SHA, tuple(blocks))) == script


def test_a_record_may_be_empty_and_end_in_anything() -> None:
    blocks = [KeyRecord(bytes(32), b""), KeyRecord(b"\r\n" * 16, b"\r\n")]
    names = [b"k:{0000000000000000}:" + bytes(24), b"k:{0d0a0d0a0d0a0d0a}:" + b"\r\n" * 12]
    told = [b"MSET", names[0], b"", names[1], b"\r\n"]
    assert words(KeySpace("k").set_request(blocks)) == told
