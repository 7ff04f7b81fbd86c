"""Seals of a stream: what is sent is opened, and anything else is not."""

import os

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from each_input import each

from kvstore.protocol import stream_seal as ss
from kvstore.protocol.stream_seal import Mac, PlainSeal, Seals

ONE, OTHER = b"1" * ss.KEY_BYTES, b"2" * ss.KEY_BYTES


def ends(mac: Mac) -> tuple[Seals, Seals]:
    """Of the two ends of one connection."""
    return ss.keyed(mac, ONE, OTHER), ss.keyed(mac, OTHER, ONE)


@pytest.mark.parametrize("mac", Mac)
def test_two_ends_agree_on_every_tag_of_both_directions(mac):
    for sent, received in (ends(mac), ends(mac)[::-1]):
        for _ in range(3):
            message, payload = os.urandom(40), memoryview(os.urandom(300_000))
            assert sent.sent.tag(message) == received.received.tag(message)
            sent.sent.update(payload)
            for start in range(0, len(payload), 70_000):
                received.received.update(payload[start : start + 70_000])
            assert sent.sent.payload_tag() == received.received.payload_tag()
            assert sent.sent.payload_tag() == received.received.payload_tag(), "of nothing"


@pytest.mark.parametrize("mac", Mac)
def test_a_tag_is_good_for_one_key_one_place_and_one_message(mac):
    seals, _ = ends(mac)
    message = b"a message"
    tags = [seals.sent.tag(message) for _ in range(4)]
    tags += [seals.received.tag(message), ends(mac)[0].sent.tag(b"a messagE")]
    other, _ = ends(mac)
    other.sent.update(memoryview(message + b"!"))
    tags.append(other.sent.payload_tag())
    assert len(set(tags)) == len(tags), "repeated, reordered, reflected, changed, longer"
    assert all(len(tag) == ss.TAG_BYTES for tag in tags)


@pytest.mark.parametrize("mac", Mac)
def test_a_message_after_one_that_was_left_out_does_not_open(mac):
    ours, theirs = ends(mac)
    ours.sent.tag(b"left out")
    assert ours.sent.tag(b"next") != theirs.received.tag(b"next")


@each("mac", Mac)
@each("size", [1, 1000, 300_000])
def test_every_bit_of_a_payload_counts(mac, size):
    payload = bytearray(os.urandom(size))
    tags = set()
    for at in {0, size // 2, size - 1}:
        payload[at] ^= 0x10
        seal = ends(mac)[0].sent
        seal.update(memoryview(payload))
        tags.add(seal.payload_tag())
        payload[at] ^= 0x10
    seal = ends(mac)[0].sent
    seal.update(memoryview(payload))
    assert seal.payload_tag() not in tags


@pytest.mark.parametrize("mac", Mac)
def test_tags_are_numbered_from_one_as_every_release_must_that_speaks_this_version(mac):
    seal, message = ends(mac)[0].sent, b"a message"
    for number in (1, 2, 3):
        raw = number.to_bytes(8, "little")
        if mac is Mac.BLAKE3:
            expected = blake3(raw + message, key=ONE).digest(length=ss.TAG_BYTES)
        else:
            expected = AESGCM(ONE).encrypt(raw + bytes(4), b"", message)
        assert seal.tag(message) == expected


def test_the_fastest_that_both_sides_have_is_taken():
    assert ss.available() == frozenset(Mac), "the tests need cryptography"
    assert ss.best(frozenset(Mac)) is Mac.GMAC
    assert ss.best(frozenset()) is None


def test_without_the_library_there_is_still_a_seal(monkeypatch):
    def missing(key):
        raise ImportError("no cryptography")

    monkeypatch.setattr(ss, "GmacSeal", missing)
    assert ss.available.__wrapped__() == {Mac.BLAKE3}


def test_a_plain_seal_finds_accidents():
    seal = PlainSeal()
    assert seal.tag(b"a message") != seal.tag(b"a messagE")
