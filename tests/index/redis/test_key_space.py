"""Requests for many blocks are the same in Python and compiled (compiled/block_writes.c)."""

from __future__ import annotations

import random

import hiredis
import pytest
from block_writes import block_writes

from kvstore.index.base import KeyRecord
from kvstore.index.redis import key_space
from kvstore.index.redis.key_space import KeySpace, Pack, pack_pairs, packer

SHA = b"f" * 40


@pytest.fixture(params=["Python", "compiled"])
def pack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pack:
    pack: Pack = pack_pairs if request.param == "Python" else block_writes().request
    monkeypatch.setattr(key_space, "PACK", pack)
    return pack


def some(count: int) -> list[KeyRecord]:
    rng = random.Random(count)
    return [KeyRecord(rng.randbytes(32), rng.randbytes(rng.choice([44, 60]))) for _ in range(count)]


def words(request: bytes) -> object:
    reader = hiredis.Reader()
    reader.feed(request)
    told = reader.gets()
    assert not reader.has_data()
    return told


@pytest.mark.usefixtures("pack")
@pytest.mark.parametrize("count", [1, 2, 300])
@pytest.mark.parametrize("prefix", ["k", "kv:default", "p" * 128])
def test_a_request_says_each_key_and_its_record(count: int, prefix: str) -> None:
    space, blocks = KeySpace(prefix), some(count)
    names = [b"%s:{%s}:%s" % (prefix.encode(), k[:8].hex().encode(), k[8:]) for k, _ in blocks]
    assert names == [space.redis_key(key) for key, _ in blocks]
    records = [record for _, record in blocks]
    paired = [word for pair in zip(names, records, strict=True) for word in pair]
    assert words(space.set_request(blocks)) == [b"MSET", *paired]
    script = [b"EVALSHA", SHA, b"%d" % count, *names, *records]
    assert words(space.script_request(SHA, tuple(blocks))) == script


def test_a_record_may_be_empty_and_end_in_anything(pack: Pack) -> None:
    pairs = [(bytes(32), b""), (b"\r\n" * 16, b"\r\n")]
    assert pack(b"", b"<", b">", pairs, True) == (
        b"<0000000000000000>" + bytes(24) + b"\r\n$0\r\n\r\n"
        b"<0d0a0d0a0d0a0d0a>" + b"\r\n" * 13 + b"$2\r\n\r\n\r\n"
    )


@pytest.mark.parametrize(
    "pairs",
    [
        [(bytes(31), b"")],
        [(bytes(33), b"")],
        [(bytes(32), bytes(61))],
        [("k" * 32, b"")],
        [(bytes(32), 7)],
        [(bytes(32),)],
        [[bytes(32), b""]],
        [7],
    ],
)
def test_compiled_what_is_no_block_is_refused(pairs: list[object]) -> None:
    """Whoever calls has looked at them (index/checks.py): nothing is read beyond them anyway."""
    for paired in (True, False):
        with pytest.raises((ValueError, TypeError, IndexError, SystemError)):
            block_writes().request(b"", b"", b"", pairs, paired)


def test_python_packs_where_it_is_asked_to_and_nobody_else_can() -> None:
    assert packer("no") is packer(None, "kvstore.no_such_part") is pack_pairs
    with pytest.raises(ImportError):
        packer("yes", "kvstore.no_such_part")
