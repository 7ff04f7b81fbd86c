"""The contract of whoever reads many blocks at once, for targets that take values of one
description only (kvstore/segment/batch_read.py); in Python and compiled."""

from __future__ import annotations

from typing import Any

from batch_parts import mapped
from each_input import each

from kvstore.core.events import Fill, Mark, Seal
from kvstore.segment.attached import AttachedShm
from kvstore.segment.batch_read import BatchReader
from kvstore.segment.header import FREE
from kvstore.segment.shm import OwnedShm

SLOT = 3
DATA, META = bytes(range(250)) * 4, b"described"


def key_of(hint: int) -> bytes:
    return b"a".ljust(8) + hint.to_bytes(4, "little") + b"a".ljust(20)


KEY = key_of(9)


def save(owned: OwnedShm, meta: bytes = META, slot: int = SLOT, key: bytes = KEY) -> None:
    owned.apply(Mark(slot, 1, 1))
    owned.apply(Fill(slot * 4096, DATA + meta))
    owned.apply(Seal(slot, 1, key, len(DATA + meta), 0, 2, len(meta), 0, 0))


def read(reader: BatchReader, shm: AttachedShm, out: Any, **more: Any) -> Any:
    (value,), size_bytes = reader.read(mapped(shm), [KEY], [out], 0, **more)
    assert size_bytes == (0 if value is None else len(value))
    return value


@each(
    ("meta", "wanted"),
    [
        (META, [META]),
        (META, [b"", b"another", META]),
        (b"", [b""]),
        (b"", [META, b""]),
        (b"x" * 255, [b"x" * 255]),
    ],
)
def test_a_value_of_that_description_and_size_is_read(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, meta: bytes, wanted: list[bytes]
) -> None:
    save(owned, meta)
    room = bytearray(1002)
    got = read(reader, shm, (memoryview(room)[1:1001], *wanted))
    assert (type(got), got, got.obj) == (memoryview, DATA, room)
    assert room == b"\0" + DATA + b"\0"
    del got
    room.clear()  # a buffer that somebody has kept would forbid it


@each(
    ("meta", "wanted"),
    [
        (META, [b"describee"]),
        (META, [b"Described"]),
        (META, [META + b"x"]),
        (META, [META[:-1]]),
        (META, [b""]),
        (META, []),
        (b"", [META]),
        (b"", []),
    ],
)
def test_a_value_of_another_description_is_the_callers_and_nothing_is_written(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, meta: bytes, wanted: list[bytes]
) -> None:
    save(owned, meta)
    room = bytearray(1000)
    assert read(reader, shm, (memoryview(room), *wanted)) is None
    assert not any(room)


@each("size", [0, 999, 1001, 1009, 2000])
@each("meta", [META, b""])
def test_a_room_of_another_size_is_the_callers(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, size: int, meta: bytes
) -> None:
    save(owned, meta)
    room = bytearray(size)
    assert read(reader, shm, (memoryview(room), meta)) is None
    assert not any(room)


def odd_outs() -> list[Any]:
    room = memoryview(bytearray(1000))
    released = memoryview(bytearray(1000))
    released.release()
    return [
        (),
        (META,),
        (None, META),
        (bytearray(1000), META),
        ((room,), META),
        (room, "text"),
        (room, None, META),
        [room, META],
        (room.toreadonly(), META),
        (room.cast("b"), META),
        (released, META),
    ]


@each("number", range(len(odd_outs())))
def test_what_is_no_room_with_descriptions_is_the_callers(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, number: int
) -> None:
    save(owned)
    assert read(reader, shm, odd_outs()[number]) is None


def test_the_description_is_said_to_be_touched_and_looked_at_only_then(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    """Its page may be another one than the payload's, and be gone."""
    save(owned)
    said: list[Any] = []
    room = bytearray(1000)

    def found(*place: int) -> None:
        said.append(place)
        owned.apply(Fill(SLOT * 4096 + len(DATA), META.upper()))

    assert read(reader, shm, (memoryview(room), META), found=found) is None
    assert said == [(SLOT * 4096, len(DATA + META))]
    assert not any(room)
    assert read(reader, shm, (memoryview(room), META.upper()), found=lambda *_: False) is None
    assert not any(room)


def test_a_block_that_changes_while_it_is_copied_is_no_hit(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned)
    out = (memoryview(bytearray(1000)), META)
    assert read(reader, shm, out, copied=lambda: owned.apply(Mark(SLOT, FREE, 1))) is None


def test_each_of_a_batch_has_its_own_description(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned)
    save(owned, b"", 5, key_of(10))
    save(owned, b"other", 6, key_of(11))
    rooms = [memoryview(bytearray(1000)) for _ in range(3)]
    outs: list[Any] = [(rooms[0], META), rooms[1], (rooms[2], b"wrong")]
    values, size_bytes = reader.read(mapped(shm), [key_of(i) for i in (9, 10, 11)], outs, 0)
    assert values == [DATA, DATA, None]
    assert size_bytes == 2 * len(DATA)
