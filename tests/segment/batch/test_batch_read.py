"""The contract of whoever reads many blocks at once (kvstore/segment/batch_read.py): exactly the
bytes that were saved for a key, or the block is left to the caller; in Python and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from batch_parts import KEY, KINDS, SIZE, SLOTS, VALUE, key_of, mapped, read, save, seal
from each_input import each
from segment_bytes import head_of, hints_in_head

from kvstore.core.events import Mark
from kvstore.segment.attached import AttachedShm
from kvstore.segment.batch_read import BatchReader
from kvstore.segment.header import FREE, SUPERBLOCK_BYTES, Superblock, hint_of, pack
from kvstore.segment.shm import OwnedShm

# --- hits ---------------------------------------------------------------------


def test_each_key_has_its_own_value(owned: OwnedShm, shm: AttachedShm, reader: BatchReader) -> None:
    for i in range(4):
        save(owned, i, key_of(i), bytes([i]) * (900 + i), granule=i)
    assert read(reader, shm, key_of(2), key_of(7), key_of(0), key_of(3)) == [
        b"\2" * 902,
        None,
        b"\0" * 900,
        b"\3" * 903,
    ]
    assert reader.read(mapped(shm), [], [], KINDS) == ([], 0)


def test_values_of_their_own_and_parts_of_what_was_given(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned)
    save(owned, 4, key_of(10), b"other")
    room = bytearray(b"x" * 2000)
    own, part = read(reader, shm, KEY, key_of(10), outs=[None, memoryview(room)])
    assert (type(own), own) == (bytes, VALUE)
    assert (type(part), part, part.obj) == (memoryview, b"other", room)
    assert room == b"other".ljust(2000, b"x"), "nothing beside it is written"


def test_a_room_of_just_the_values_size_is_filled_and_let_go(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned)
    room = bytearray(b"x" * 1002)
    got = read(reader, shm, outs=[memoryview(room)[1:1001]])
    assert got == [VALUE]
    assert room == b"x" + VALUE + b"x"
    del got
    room.clear()  # a buffer that somebody has kept would forbid it


def test_many_keys_and_large_values(tmp_path: Path, reader: BatchReader) -> None:
    """More than are noted without asking for memory, and so much that the GIL is let go."""
    segment = OwnedShm(tmp_path / "large", Superblock(7, 1, 0, 8 << 20))
    shm = AttachedShm(segment.data_path, segment.head_path)
    values = {key_of(i): bytes([i]) * (64 << 10) for i in range(100)}
    for i, (key, value) in enumerate(values.items()):
        save(segment, i * 16, key, value)
    assert read(reader, shm, *values) == list(values.values())
    outs = [memoryview(bytearray(64 << 10)) for _ in values]
    assert read(reader, shm, *values, outs=outs) == list(values.values())
    shm.close()
    segment.close()


def test_a_batch_past_the_caches_is_exact_and_looked_at_again(
    tmp_path: Path, reader: BatchReader
) -> None:
    """8 MiB and more, of sizes and into rooms that no line of the cache begins or ends with."""
    segment = OwnedShm(tmp_path / "larger", Superblock(7, 1, 0, 16 << 20))
    shm = AttachedShm(segment.data_path, segment.head_path)
    values = {key_of(i): bytes([i + 1]) * ((512 << 10) - 7 * i) for i in range(20)}
    for i, (key, value) in enumerate(values.items()):
        save(segment, i * 132, key, value, granule=i % 4)
    rooms = [bytearray(b"x" * (1 << 20)) for _ in values]
    outs = [memoryview(room)[i + 3 :] for i, room in enumerate(rooms)]
    assert read(reader, shm, *values, outs=outs) == list(values.values())
    for i, (room, value) in enumerate(zip(rooms, values.values(), strict=True)):
        assert room == b"x" * (i + 3) + value + b"x" * ((1 << 20) - len(value) - i - 3)
    assert read(reader, shm, *values) == list(values.values())
    changed = read(reader, shm, *values, found=lambda *_: segment.apply(Mark(132, FREE, 1)))
    assert changed == [None if i == 1 else value for i, value in enumerate(values.values())]
    del outs
    shm.close()
    segment.close()


def test_the_last_byte_of_a_segment_can_be_read(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    for slot_id, length, granule in ((SLOTS - 1, 4096, 0), (SLOTS - 1, 1024, 3), (0, SIZE, 0)):
        save(owned, slot_id, KEY, b"e" * length, granule=granule)
        assert read(reader, shm) == [b"e" * length]


def test_a_key_is_found_at_its_second_place(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned, 3, key_of(9, b"a"), b"a" * 10)
    save(owned, 4, key_of(9, b"b"), b"b" * 10)
    assert read(reader, shm, key_of(9, b"a"), key_of(9, b"b")) == [b"a" * 10, b"b" * 10]


def test_a_description_is_no_part_of_the_value(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned, meta_length=10)
    room = memoryview(bytearray(1000))
    assert read(reader, shm, outs=[room]) == [VALUE[:-10]]
    assert not any(room[990:])


# --- what is left to the caller -------------------------------------------------


def test_every_byte_of_a_key_counts(owned: OwnedShm, shm: AttachedShm, reader: BatchReader) -> None:
    save(owned)
    for at in range(32):
        other = KEY[:at] + bytes([KEY[at] ^ 1]) + KEY[at + 1 :]
        hints_in_head(owned)[hint_of(other, len(hints_in_head(owned)))] = 3
        assert read(reader, shm, other) == [None], at


def test_a_header_with_any_byte_changed_is_not_believed(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned)
    for at in range(64):
        head_of(owned)[SUPERBLOCK_BYTES + 3 * 64 + at] ^= 0x40
        assert read(reader, shm) == [None], at
        head_of(owned)[SUPERBLOCK_BYTES + 3 * 64 + at] ^= 0x40
    assert read(reader, shm) != [None]


def test_a_slot_that_is_not_sealed_has_nothing(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned)
    for state in (FREE, 1):
        owned.apply(Mark(3, state, 1))
        assert read(reader, shm) == [None]
    # Its CRC right all the same: a header that says another state than SEALED.
    raw = bytearray(pack((1, KEY, 1000, 0, 1, 0, 0, 0)))
    raw[0] = FREE
    head_of(owned)[SUPERBLOCK_BYTES + 3 * 64 : SUPERBLOCK_BYTES + 4 * 64] = whole(bytes(raw))
    assert read(reader, shm) == [None]


def whole(raw: bytes) -> bytes:
    return raw[:60] + crc32(raw[:60]).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("slot_id", "length", "granule", "meta"),
    [
        (SLOTS - 1, 4097, 0, 0),
        (SLOTS - 1, 3073, 1, 0),
        (0, SIZE + 1, 0, 0),
        (0, (1 << 32) - 1, 0, 0),
        (0, 100, 4, 0),
        (0, 100, 255, 0),
        (0, 100, 0, 101),
        (0, 100, 0, 65535),
        (0, 100, 0, 100),
        (0, 0, 0, 0),
    ],
)
def test_a_header_that_leads_out_of_segment_page_or_value_is_not_believed(
    owned: OwnedShm,
    shm: AttachedShm,
    reader: BatchReader,
    slot_id: int,
    length: int,
    granule: int,
    meta: int,
) -> None:
    seal(owned, slot_id, length, granule, meta)
    room = memoryview(bytearray(b"x" * 2 * SIZE))
    assert read(reader, shm, outs=[room]) == [None]
    assert set(room) == {ord("x")}
    assert read(reader, shm) == [None]


@each("slot_id", [SLOTS, SLOTS + 1, 1 << 31, (1 << 32) - 1])
def test_a_hint_that_leads_out_of_the_headers_leads_nowhere(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, slot_id: int
) -> None:
    """Behind the headers lie the hints: what they say may look like a header."""
    start = SUPERBLOCK_BYTES + SLOTS * 64
    head_of(owned)[start : start + 128] = pack((1, KEY, 10, 0, 1, 0, 0, 0)) * 2
    place = hint_of(key_of(40), len(hints_in_head(owned)))
    forged = KEY[:8] + place.to_bytes(4, "little") + KEY[12:]
    head_of(owned)[start : start + 128] = pack((1, forged, 10, 0, 1, 0, 0, 0)) * 2
    hints_in_head(owned)[place] = slot_id
    hints_in_head(owned)[place ^ 1] = slot_id
    assert read(reader, shm, forged) == [None]


def test_no_hint_lies_beyond_the_table(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    """Bits of a key that the table has no place for do not count."""
    key = key_of(0xFFFFFFFF)
    save(owned, 3, key)
    assert read(reader, shm, key) == [VALUE]


@each("kind", [2, 3, 31, 32, 33, 63, 64, 255])
def test_a_value_that_needs_its_description_is_made_by_the_caller(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, kind: int
) -> None:
    save(owned, kind=kind)
    assert read(reader, shm) == [None]
    assert read(reader, shm, outs=[memoryview(bytearray(1000))]) == [VALUE], "bytes take any"


def released() -> memoryview:
    view = memoryview(bytearray(1000))
    view.release()
    return view


@each(
    "out",
    [
        memoryview(bytearray(999)),
        memoryview(bytearray()),
        memoryview(bytes(1000)),
        memoryview(bytearray(1000)).toreadonly(),
        memoryview(bytearray(1000)).cast("b"),
        memoryview(bytearray(8000)).cast("d"),
        memoryview(bytearray(2000))[::2],
        memoryview(bytearray(2000))[::-1],
        memoryview(bytearray(1000)).cast("B", (10, 100)),
        released(),
        bytearray(1000),
        bytes(1000),
        7,
        "text",
    ],
    ids=str,
)
def test_an_out_that_is_no_room_for_plain_bytes_is_the_callers(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, out: Any
) -> None:
    save(owned)
    save(owned, 4, key_of(10), b"other")
    before = None if isinstance(out, int | str) or is_released(out) else bytes(out)
    assert read(reader, shm, KEY, key_of(10), outs=[out, None]) == [None, b"other"]
    assert before is None or bytes(out) == before


def is_released(out: Any) -> bool:
    try:
        return isinstance(out, memoryview) and len(out) < 0
    except ValueError:
        return True
