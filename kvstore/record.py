"""The index record: one location in 44 bytes (Redis keeps up to 44 as embstr).

The CRC covers the key too, so a record under the wrong key is as good as none.
A CRC anyone can compute; where Redis is not trusted, a signature of 16 bytes follows.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from hmac import compare_digest
from zlib import crc32

from kvstore.types import DiskBlock, Key, Location

RECORD_VERSION = 2
_BODY = struct.Struct("<BBHIQQIIQ")
_CRC = struct.Struct("<I")
_NODE_START = slice(4, 16)
_CHECKSUM = slice(32, 40)
_START = struct.Struct("<IQ")
RECORD_BYTES = _BODY.size + _CRC.size
assert RECORD_BYTES == 44
SIGNATURE_BYTES = 16
SIGNED_RECORD_BYTES = RECORD_BYTES + SIGNATURE_BYTES
BlockParts = tuple[int, int, Key, int, int, int, int, int, int]
"""Slot, generation, key, length, granule, kind, length of the description, checksum and namespace
id of a block."""
_WORD_FIELD = b', "signature": "%s"}'
_WORD_FIELD_BYTES = len(_WORD_FIELD % bytes(2 * SIGNATURE_BYTES))


def pack_record(key: Key, location: Location) -> bytes:
    """Return `location` as the index keeps it under `key`."""
    return pack_place(key, *location)


def disk_location(node_id: int, epoch: int, block: DiskBlock) -> Location:
    """Return where a block on a disk of that start of a node is: segment 0 is memory, and each disk
    is one of the segments after it."""
    device, page, lap = block.place
    return Location(node_id, epoch, 1 + device, page, lap, 0, block.length, block.checksum)


def pack_place(
    key: Key,
    node_id: int,
    epoch: int,
    segment: int,
    slot: int,
    generation: int,
    granule: int,
    length: int,
    checksum: int,
) -> bytes:
    """Pack a record as `pack_record` does, from the parts of a location."""
    body = _BODY.pack(
        RECORD_VERSION, granule, segment, epoch, node_id, generation, slot, length, checksum
    )
    return body + _CRC.pack(crc32(body, crc32(key)))


def pack_each(start: bytes, blocks: list[BlockParts]) -> list[bytes]:
    """Return the records of blocks in the first segment of the node of that `node_start`."""
    epoch, node_id = _START.unpack(start)
    return [
        pack_place(key, node_id, epoch, 0, slot, generation, granule, length, checksum)
        for slot, generation, key, length, granule, _, _, checksum, _ in blocks
    ]


def unpack_record(key: Key, record: bytes) -> Location | None:
    """Return the location in `record`; None when it is damaged or not for `key`: a miss.

    A signature is passed over: whether it is right is for `RecordSigner` to say.
    """
    if len(record) not in (RECORD_BYTES, SIGNED_RECORD_BYTES) or record[0] != RECORD_VERSION:
        return None
    body = record[: _BODY.size]
    if _CRC.unpack_from(record, _BODY.size)[0] != crc32(body, crc32(key)):
        return None
    _, granule, segment, epoch, node_id, generation, slot, length, checksum = _BODY.unpack(body)
    return Location(node_id, epoch, segment, slot, generation, granule, length, checksum)


def node_start_of(key: Key, record: bytes) -> bytes | None:
    """Return node and epoch in `record`, as raw bytes to tell starts of nodes apart by; None when
    it is damaged or not for `key`. It costs half of `unpack_record`: a router looks at
    thousands."""
    if len(record) not in (RECORD_BYTES, SIGNED_RECORD_BYTES) or record[0] != RECORD_VERSION:
        return None
    right = crc32(record[: _BODY.size], crc32(key)).to_bytes(4, "little")
    return record[_NODE_START] if record[_BODY.size : RECORD_BYTES] == right else None


def node_start(node_id: int, epoch: int) -> bytes:
    """Return epoch and node id as records have them."""
    return _START.pack(epoch, node_id)


def has_checksum(record: bytes) -> bool:
    """Return whether the block of a record has one; nothing else is checked."""
    return any(record[_CHECKSUM])


def slot_of(record: bytes) -> tuple[int, int]:
    """Return the (slot, generation) in a record that this node has made itself; nothing is
    checked."""
    _, _, _, _, _, generation, slot, _, _ = _BODY.unpack_from(record)
    return slot, generation


class RecordSigner:
    """Signs records of one tenant and announcements of its nodes, and tells right signatures
    from wrong ones.

    BLAKE2b with a key, 128 bits, over tenant, key and record. Whoever can check a
    signature can make one: it keeps out those who reach Redis and lack the secret.
    """

    __slots__ = ("_start", "_start_word")

    def __init__(self, secret: bytes, tenant: str) -> None:
        """Derive the keys. `tenant` is the key prefix; the secret may have any length (blake2b
        itself takes at most 64 bytes)."""
        key = blake2b(secret, digest_size=32, person=b"kvstore-sign-key").digest()
        self._start = blake2b(key=key, digest_size=SIGNATURE_BYTES, person=b"kvstore-record")
        self._start_word = blake2b(key=key, digest_size=SIGNATURE_BYTES, person=b"kvstore-node")
        # As long as it says, so that no two tenants and keys are the same bytes.
        raw = tenant.encode()
        for start in (self._start, self._start_word):
            start.update(len(raw).to_bytes(4, "little") + raw)

    def signed(self, key: Key, record: bytes) -> bytes:
        """Return `record`, which is that of `key`, followed by its signature."""
        return record + self._signature(key, record)

    def right(self, key: Key, record: bytes) -> bool:
        """Return whether `record` ends in the signature that it must have under `key`."""
        expected = self._signature(key, record[:RECORD_BYTES])
        return compare_digest(expected, record[RECORD_BYTES:])

    def announcement(self, raw: bytes) -> bytes:
        """Return the JSON object `raw` with one more field at its end: the signature of all before
        it. Readers without the key pass it over, as any field that they do not know."""
        return raw[:-1] + self._word_field(raw)

    def announced(self, raw: bytes) -> bool:
        """Return whether `raw` is what `announcement` made of an object."""
        end = len(raw) - _WORD_FIELD_BYTES
        return compare_digest(self._word_field(raw[:end] + b"}"), raw[end:])

    def _word_field(self, raw: bytes) -> bytes:
        state = self._start_word.copy()
        state.update(raw)
        return _WORD_FIELD % state.hexdigest().encode()

    def _signature(self, key: Key, record: bytes) -> bytes:
        state = self._start.copy()
        state.update(key + record)
        return state.digest()
