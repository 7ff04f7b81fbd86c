"""Authenticates a stream: all bytes are the other side's, complete and in order. Pure.

Each direction of a connection has a *seal* of its own at both ends, which count what went by.
A message ends in a tag over it and its number; payloads have a tag of their own, since their
bytes may change under a sender's hands while a slot is reused.

    keyed   AES-GMAC or keyed BLAKE3, with keys that only this connection has: nobody without
            the secret can change, repeat, leave out, reorder or reflect anything unseen
    plain   CRC-32 against accidents: where TLS protects the bytes, or nothing is to
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol
from zlib import crc32

from blake3 import blake3

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext

TAG_BYTES = 16
KEY_BYTES = 32
_NUMBER = struct.Struct("<Q")
_NONCE = struct.Struct("<QI")
"""The nonce of GCM, 96 bits. A key serves one direction of one connection, so none is used
twice."""


class Mac(enum.IntEnum):
    """How a stream is authenticated; of those that both sides have, the one with the lowest number
    is used."""

    GMAC = 1
    """It takes a third of the time of BLAKE3; `cryptography` brings it ('pip install
    cryptography')."""
    BLAKE3 = 2


class StreamSeal(Protocol):
    """One end of one direction. One thread at a time may use it, in the order of the bytes."""

    def update(self, piece: memoryview) -> None:
        """Count a part of a payload that goes by."""
        ...

    def payload_tag(self) -> bytes:
        """Return the tag of the payload that passed since the last such tag."""
        ...

    def tag(self, message: bytes) -> bytes: ...


class PlainSeal:
    """A CRC-32 of messages; payloads have their checksums."""

    def update(self, piece: memoryview) -> None:
        """Count nothing: payloads have checksums of their own."""

    def payload_tag(self) -> bytes:
        return bytes(TAG_BYTES)

    def tag(self, message: bytes) -> bytes:
        return crc32(message).to_bytes(TAG_BYTES, "little")


PLAIN = PlainSeal()


class Blake3Seal:
    """Keyed BLAKE3 over the tag's number and its content."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._payload: blake3 | None = None

    def _next(self) -> blake3:
        self._number += 1
        return blake3(_NUMBER.pack(self._number), key=self._key)

    def update(self, piece: memoryview) -> None:
        if self._payload is None:
            self._payload = self._next()
        self._payload.update(piece)

    def payload_tag(self) -> bytes:
        payload, self._payload = self._payload or self._next(), None
        tag: bytes = payload.digest(length=TAG_BYTES)
        return tag

    def tag(self, message: bytes) -> bytes:
        tag: bytes = self._next().update(message).digest(length=TAG_BYTES)
        return tag


class GmacSeal:
    """AES-256-GCM without a text: the number is the nonce, the content the associated data."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._short = AESGCM(key)
        self._aes, self._cipher, self._gcm = algorithms.AES(key), Cipher, modes.GCM
        self._numbers = count(1)
        self._payload: AEADEncryptionContext | None = None

    def update(self, piece: memoryview) -> None:
        if self._payload is None:
            nonce = _NONCE.pack(next(self._numbers), 0)
            self._payload = self._cipher(self._aes, self._gcm(nonce)).encryptor()
        self._payload.authenticate_additional_data(piece)

    def payload_tag(self) -> bytes:
        if self._payload is None:
            return self.tag(b"")
        payload, self._payload = self._payload, None
        payload.finalize()
        tag: bytes = payload.tag
        return tag

    def tag(self, message: bytes) -> bytes:
        return self._short.encrypt(_NONCE.pack(next(self._numbers), 0), b"", message)


class Seals(NamedTuple):
    """The seals of one end of a connection, one for each direction."""

    sent: StreamSeal
    received: StreamSeal


PLAIN_SEALS = Seals(PLAIN, PLAIN)


def keyed(mac: Mac, sent_key: bytes, received_key: bytes) -> Seals:
    """Raises `ImportError` for one that is not `available`."""
    make = GmacSeal if mac is Mac.GMAC else Blake3Seal
    return Seals(make(sent_key), make(received_key))


@cache
def available() -> frozenset[Mac]:
    """Return the MACs that this installation can make."""
    try:
        GmacSeal(bytes(KEY_BYTES)).tag(b"")
    except Exception:  # not installed, or of a kind that its own checks of this machine refuse
        return frozenset({Mac.BLAKE3})
    return frozenset(Mac)


def best(macs: Sequence[Mac] | frozenset[Mac]) -> Mac | None:
    return min(macs, default=None)


matches: Callable[[bytes, bytes], bool] = hmac.compare_digest
"""Returns whether two tags are the same, in a time that tells nothing."""
