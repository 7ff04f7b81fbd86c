"""Requests as bytes, against what redis-py makes of the same."""

from __future__ import annotations

import redis.crc
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.index.redis_wire import key_slot


@given(st.one_of(st.binary(), st.text("{}a").map(str.encode)))
@example(b"{}a{b}")
@example(b"a{b}{c}")
@example(b"a{b")
def test_a_key_lies_in_the_slot_that_redis_gives_it(key: bytes) -> None:
    assert key_slot(key) == redis.crc.key_slot(key)
