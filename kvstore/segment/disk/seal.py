"""Encrypts the blocks of a disk device, and decrypts them (extra `crypto`), and says why that is
safe.

    region     each filling has a key of its own: HKDF-SHA256 of a key of the operator's, with 16
               random bytes as salt, and UUID, region and lap as context. Its header has the salt,
               and the id of the operator's key
    payload    AES-256-GCM. Nonce: first page (u32) and checksum of the plain bytes (u64).
               Associated data: key, lap, length, namespace, length of the description, kind
    tag        16 bytes, in the entry on the device and in the node's table. It takes the place of
               the checksum in each read; that is compared once, before the block is encrypted
    entry      its checksum is masked with a keyed BLAKE3 of page and tag: it would tell who guesses
               a block that he is right

All else is plain: keys and namespaces of blocks, which are hashes, lengths, times, the log.

Why no nonce is used twice with a key
-------------------------------------
A salt is drawn when a region is begun (`DiskDevice.begin`), and serves what that process writes
there until it begins the next: what is read in a header serves reading alone. Meanwhile places
ascend (`DiskDevice.write` refuses others), so each page is in one nonce at most.

    restart          what was open is not gone on with: the next region begun has a new salt
    power loss       may take back header, entries and the record of laps, so that lap, page and
                     number come again: with another salt
    old copies       of the superblock or the file, clones that two nodes write: with other salts
    failed writes    the region takes no more
    same salts       by chance: 1 in 2^65 after 2^32 regions, which are 2^60 bytes
    same memory      a virtual machine that is resumed twice from one snapshot has a salt twice,
                     until its next region. There alone the checksum in the nonce must keep values
                     apart, as far as its 64 bits do

What a tag shows
----------------
These bytes were encrypted as this key's block at this place, in this filling of this region of this
device. Who writes to the drive can take blocks away, and bring back all of an earlier state, with
what was deleted since: the log has no tag.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from blake3 import blake3

from kvstore.segment.disk.format import TAG_BYTES, Sealing, lap_in, sealing_in
from kvstore.types import DiskBlock, DiskKeys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext
    from typing_extensions import Buffer

PIECE_BYTES = 512 << 10
"""Bytes that are encrypted or decrypted at a time: with older versions of `cryptography` (47, not
50) nothing else of the process runs meanwhile."""
KEY_BYTES = 32
_INFO = struct.Struct("<16s16sII")
_NONCE = struct.Struct("<IQ")
_HEADER = struct.Struct("<32sIIIHB")
_MASK = struct.Struct("<I16s")


class Opening:
    """Decrypts one block where it lies, in the order of its bytes. Nothing of them counts before
    `is_right` has said so."""

    def __init__(self, decryptor: AEADDecryptionContext) -> None:
        self._decryptor = decryptor

    def update(self, piece: memoryview) -> Opening:
        for start in range(0, piece.nbytes, PIECE_BYTES):
            part = piece[start : start + PIECE_BYTES]
            self._decryptor.update_into(part, part)
        return self

    def is_right(self) -> bool:
        """Return whether all of it had the block's tag. To be asked once."""
        from cryptography.exceptions import InvalidTag

        try:
            self._decryptor.finalize()
        except InvalidTag:
            return False
        return True


class RegionSeal:
    """Encrypts and decrypts the blocks of one filling of a region. Thread-safe."""

    def __init__(self, key: bytes, salt: bytes, uuid: bytes, region: int, lap: int) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = _INFO.pack(b"kvstore disk 1", uuid, region, lap)
        raw = HKDF(SHA256(), 2 * KEY_BYTES, salt, info).derive(key)
        self._aes, self._mask = algorithms.AES(raw[:KEY_BYTES]), raw[KEY_BYTES:]
        self._cipher, self._gcm = Cipher, modes.GCM

    def seal(self, block: DiskBlock, payload: memoryview, into: memoryview) -> DiskBlock:
        """Encrypt a payload; return its block with the tag."""
        encryptor = self._cipher(self._aes, self._gcm(_nonce_of(block))).encryptor()
        encryptor.authenticate_additional_data(_header_of(block))
        for start in range(0, payload.nbytes, PIECE_BYTES):
            encryptor.update_into(payload[start : start + PIECE_BYTES], into[start:])
        encryptor.finalize()
        return block._replace(tag=encryptor.tag)

    def opening(self, block: DiskBlock) -> Opening:
        """Return what decrypts the block."""
        mode = self._gcm(_nonce_of(block), block.tag.ljust(TAG_BYTES, b"\0"))
        decryptor = self._cipher(self._aes, mode).decryptor()
        decryptor.authenticate_additional_data(_header_of(block))
        return Opening(decryptor)

    def masked(self, block: DiskBlock) -> DiskBlock:
        """Return the block as its entry has it, and of that the block."""
        digest = blake3(_MASK.pack(block.place.page, block.tag), key=self._mask).digest(length=8)
        return block._replace(checksum=block.checksum ^ int.from_bytes(digest, "little"))


def _nonce_of(block: DiskBlock) -> bytes:
    return _NONCE.pack(block.place.page, block.checksum)


def _header_of(block: DiskBlock) -> bytes:
    described = (block.length, block.namespace_id, block.meta_length, block.kind)
    return _HEADER.pack(block.key, block.place.lap, *described)


class RegionSeals:
    """The seals of a device's regions, each made when it is first needed. Thread-safe."""

    def __init__(self, keys: DiskKeys, uuid: bytes, header: Callable[[int], Buffer]) -> None:
        """`header` reads that page of a region, and raises `OSError`."""
        self._keys, self._uuid, self._header = keys, uuid, header
        self._made: dict[int, tuple[int, RegionSeal]] = {}

    def of(self, region: int, lap: int) -> RegionSeal | None:
        """Return what opens the blocks of that filling; None where it is another one's turn, not
        encrypted, or with a key that is not there. Raises `OSError`."""
        found = self._made.get(region)
        if found is not None and found[0] == lap:
            return found[1]
        page = self._header(region)
        sealing = sealing_in(page) if lap_in(page, self._uuid, region) == lap else None
        return None if sealing is None else self.make(region, lap, sealing)

    def make(self, region: int, lap: int, sealing: Sealing) -> RegionSeal | None:
        """Return the seal of a filling whose header says `sealing`."""
        key = self._keys.get(sealing.key_id)
        if key is None:
            return None
        seal = RegionSeal(key, sealing.salt, self._uuid, region, lap)
        self._made[region] = lap, seal
        return seal
