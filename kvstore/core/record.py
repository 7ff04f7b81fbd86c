"""The index record: one location in 44 bytes (Redis keeps up to 44 as embstr).

The CRC covers the key too, so a record under the wrong key is as good as none.
"""

from __future__ import annotations

import struct
from zlib import crc32

from kvstore.types import Key, Location

RECORD_VERSION = 1
_BODY = struct.Struct("<BBHIQQIIQ")
_CRC = struct.Struct("<I")
RECORD_BYTES = _BODY.size + _CRC.size
assert RECORD_BYTES == 44


def pack_record(key: Key, location: Location) -> bytes:
    """`location` as the index keeps it under `key`."""
    node_id, epoch, segment, slot, generation, size_class, length, checksum = location
    body = _BODY.pack(
        RECORD_VERSION, size_class, segment, epoch, node_id, generation, slot, length, checksum
    )
    return body + _CRC.pack(crc32(body, crc32(key)))


def unpack_record(key: Key, record: bytes) -> Location | None:
    """The location in `record`; None when it is damaged or not for `key`: a miss."""
    if len(record) != RECORD_BYTES or record[0] != RECORD_VERSION:
        return None
    body = record[: _BODY.size]
    if _CRC.unpack_from(record, _BODY.size)[0] != crc32(body, crc32(key)):
        return None
    _, size_class, segment, epoch, node_id, generation, slot, length, checksum = _BODY.unpack(body)
    return Location(node_id, epoch, segment, slot, generation, size_class, length, checksum)
