"""The contract of whoever reads many blocks at once (kvstore/segment/batch_read.py): exactly the
bytes that were saved for a key, or the block is left to the caller; in Python and compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from batch_readers import READERS, compiled_module, reader_of

from kvstore.compiled import part
from kvstore.core.events import Fill, Mark, Seal
from kvstore.segment import batch_read
from kvstore.segment.attached import AttachedShm
from kvstore.segment.batch_read import BatchReader, CompiledReader, MappedSegment, PythonReader
from kvstore.segment.header import FREE, SUPERBLOCK_BYTES, Header, Superblock, hint_of, pack
from kvstore.segment.shm import OwnedShm

SIZE = 128 << 10
SLOTS = SIZE // 4096
VALUE = bytes(range(250)) * 4
KINDS = 1 << 1 | 1 << 0


def key_of(hint: int, name: bytes = b"a") -> bytes:
    return name.ljust(8) + hint.to_bytes(4, "little") + name.ljust(20)


KEY = key_of(9)


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> BatchReader:
    return reader_of(request.param)


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedShm]:
    segment = OwnedShm(tmp_path / "s", Superblock(7, 1, 0, SIZE))
    yield segment
    segment.close()


@pytest.fixture
def shm(owned: OwnedShm) -> Iterator[AttachedShm]:
    attached = AttachedShm(owned.data_path, owned.head_path)
    yield attached
    attached.close()


def save(
    owned: OwnedShm,
    slot_id: int = 3,
    key: bytes = KEY,
    value: bytes = VALUE,
    *,
    granule: int = 0,
    kind: int = 1,
    meta_length: int = 0,
    generation: int = 1,
) -> None:
    owned.apply(Mark(slot_id, generation, 1))
    owned.apply(Fill(slot_id * 4096 + granule * 1024, value))
    whole = (generation, key, len(value), granule, kind, meta_length, 0, 0)
    owned.apply(Seal(slot_id, *whole))


def seal(owned: OwnedShm, slot_id: int, length: int, granule: int = 0, meta: int = 0) -> None:
    """Say so in a header, whatever there is."""
    owned.apply(Seal(slot_id, 1, KEY, length, granule, 1, meta, 0, 0))


def read(
    reader: BatchReader, shm: AttachedShm, *keys: bytes, outs: list[Any] | None = None, **more: Any
) -> list[Any]:
    wanted = list(keys) or [KEY]
    targets = [None] * len(wanted) if outs is None else outs
    values, size_bytes = reader.read(shm._mapped, wanted, targets, KINDS, **more)
    assert size_bytes == sum(len(value) for value in values if value is not None)
    return values


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
    assert reader.read(shm._mapped, [], [], KINDS) == ([], 0)


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


@pytest.mark.parametrize("at", range(32))
def test_every_byte_of_a_key_counts(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, at: int
) -> None:
    save(owned)
    other = KEY[:at] + bytes([KEY[at] ^ 1]) + KEY[at + 1 :]
    owned._hints[hint_of(other, len(owned._hints))] = 3
    assert read(reader, shm, other) == [None]


@pytest.mark.parametrize("at", range(64))
def test_a_header_with_any_byte_changed_is_not_believed(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, at: int
) -> None:
    save(owned)
    owned._head[SUPERBLOCK_BYTES + 3 * 64 + at] ^= 0x40
    assert read(reader, shm) == [None]


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
    owned._head[SUPERBLOCK_BYTES + 3 * 64 : SUPERBLOCK_BYTES + 4 * 64] = whole(bytes(raw))
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


@pytest.mark.parametrize("slot_id", [SLOTS, SLOTS + 1, 1 << 31, (1 << 32) - 1])
def test_a_hint_that_leads_out_of_the_headers_leads_nowhere(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, slot_id: int
) -> None:
    """Behind the headers lie the hints: what they say may look like a header."""
    start = SUPERBLOCK_BYTES + SLOTS * 64
    owned._head[start : start + 128] = pack((1, KEY, 10, 0, 1, 0, 0, 0)) * 2
    place = hint_of(key_of(40), len(owned._hints))
    forged = KEY[:8] + place.to_bytes(4, "little") + KEY[12:]
    owned._head[start : start + 128] = pack((1, forged, 10, 0, 1, 0, 0, 0)) * 2
    owned._hints[place] = slot_id
    owned._hints[place ^ 1] = slot_id
    assert read(reader, shm, forged) == [None]


def test_no_hint_lies_beyond_the_table(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    """Bits of a key that the table has no place for do not count."""
    key = key_of(0xFFFFFFFF)
    save(owned, 3, key)
    assert read(reader, shm, key) == [VALUE]


@pytest.mark.parametrize("kind", [2, 3, 31, 32, 33, 63, 64, 255])
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


@pytest.mark.parametrize(
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


# --- what happens meanwhile (rule 4) -------------------------------------------


@pytest.mark.parametrize("into", [False, True])
def test_a_block_that_changes_while_it_is_copied_is_no_hit(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, into: bool
) -> None:
    copies: list[None] = []

    def change() -> None:
        copies.append(None)
        if len(copies) == 2:  # the second one
            owned.apply(Mark(4, FREE, 1))

    keys = [key_of(i) for i in range(3)]
    for i, key in enumerate(keys):
        save(owned, 3 + i, key, bytes([i]) * 100)
    outs = [memoryview(bytearray(100)) for _ in keys] if into else None
    got = read(reader, shm, *keys, outs=outs, copied=change)
    assert got == [b"\0" * 100, None, b"\2" * 100]
    assert len(copies) == 3


@pytest.mark.parametrize(
    "changed", [{"generation": 2}, {"key": key_of(9, b"b")}, {"value": VALUE[:-1]}, {"kind": 2}]
)
@pytest.mark.parametrize("when", ["found", "copied"])
def test_a_slot_that_is_used_again_meanwhile_is_no_hit(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, changed: dict[str, Any], when: str
) -> None:
    save(owned)
    again = {when: lambda *_: save(owned, **changed)}
    assert read(reader, shm, **again) == [None]


@pytest.mark.parametrize("at", range(64))
def test_every_byte_of_the_header_is_looked_at_again(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, at: int
) -> None:
    save(owned)

    def change() -> None:
        owned._head[SUPERBLOCK_BYTES + 3 * 64 + at] ^= 1

    assert read(reader, shm, copied=change) == [None]


def test_the_header_that_counts_is_the_one_that_was_found(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    """Where the bytes are is not read a second time from memory that may have changed."""
    save(owned)
    room = bytearray(b"x" * 3000)

    def lie(*_: object) -> None:
        seal(owned, 3, 2000)

    got = read(reader, shm, outs=[memoryview(room)[:1000]], found=lie)
    assert got == [None]
    assert set(room[1000:]) == {ord("x")}


def test_what_is_about_to_be_copied_is_said_before_any_is(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned, meta_length=10)
    save(owned, 5, key_of(10), b"other", granule=1)
    said: list[Any] = []
    read(
        reader,
        shm,
        KEY,
        key_of(11),
        key_of(10),
        found=lambda *place: said.append(place),
        copied=lambda: said.append("copied"),
    )
    assert said == [(3 * 4096, 990), (5 * 4096 + 1024, 5), "copied", "copied"]


def test_a_block_whose_pages_are_gone_is_not_touched(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned)
    save(owned, 4, key_of(10), b"other")
    rooms = [bytearray(b"x" * 1000), bytearray(1000)]
    copies: list[None] = []
    got = read(
        reader,
        shm,
        KEY,
        key_of(10),
        outs=list(map(memoryview, rooms)),
        found=lambda offset, _: offset != 3 * 4096,
        copied=lambda: copies.append(None),
    )
    assert got == [None, b"other"]
    assert set(rooms[0]) == {ord("x")}
    assert len(copies) == 1
    assert read(reader, shm, KEY, key_of(10), found=lambda *_: False) == [None, None]


@pytest.mark.parametrize("when", ["found", "copied"])
def test_what_is_raised_meanwhile_goes_through_and_nothing_is_kept(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader, when: str
) -> None:
    save(owned)
    save(owned, 4, key_of(10))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    room = bytearray(1000)
    with pytest.raises(KeyboardInterrupt):
        read(reader, shm, KEY, key_of(10), outs=[memoryview(room), None], **{when: stop})
    room.clear()
    shm.close()
    assert shm._mapped.data.closed, "no buffer of it was kept"
    assert shm._mapped.head.closed


_GROWS = """
import gc
import sys
sys.path[:] = {path!r}
from batch_readers import compiled_module
from pathlib import Path
from kvstore.segment import batch_read
read = compiled_module(batch_read.SOURCE, Path({scratch!r})).read
key = bytes(32)
head = bytearray(4096) + {image!r} + bytes(7 * 64 + 32 * 4)
data, keys, outs = bytearray(8 * 4096), [key] * 4, [None] * 4

def grow(phase, _):
    if len(keys) < 5000:
        keys.extend([key] * 5000)
        outs.extend([None] * 5000)

kept = [[] for _ in range(1000)]  # no list is left over that could be taken without a collection
counts = []
for _ in range(20):
    del keys[4:], outs[4:]
    gc.callbacks.append(grow)
    fresh = [[], [], [], []]
    gc.set_threshold(1)
    values, size = read(head, data, keys, outs, 3, None, None)
    gc.set_threshold(0)
    gc.callbacks.clear()
    assert values == [bytes(100)] * len(values) and size == 100 * len(values)
    counts.append((len(values), len(keys)))
print(any(count < there for count, there in counts))
"""


def test_lists_that_grow_while_it_makes_room_are_read_as_they_were(tmp_path: Path) -> None:
    """A garbage collection may run anybody's code wherever an object is made."""
    compiled_module(batch_read.SOURCE, tmp_path)  # or there is none here
    image = pack(Header(1, bytes(32), 100, 0, 1, 0, 0, 0))
    code = _GROWS.format(path=sys.path, scratch=str(tmp_path), image=image)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, f"{ran.returncode}: {ran.stderr}"
    if sys.version_info < (3, 12):  # where an object that is made may be what sets it off
        assert ran.stdout == "True\n", "the lists did not grow when they should"


def test_an_out_that_is_put_in_anothers_place_meanwhile_is_no_ones_value(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned)
    rooms, others = [bytearray(1000), bytearray(1000)], [bytearray(1000), bytearray(1000)]
    outs = list(map(memoryview, rooms))

    def change() -> None:
        outs[:] = list(map(memoryview, others))

    for got in read(reader, shm, KEY, KEY, outs=outs, copied=change):
        assert got == VALUE


# --- what is no segment ----------------------------------------------------------


def test_a_closed_segment_is_an_error_and_no_crash(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned)
    shm.close()
    with pytest.raises(ValueError):
        read(reader, shm)


def test_a_header_file_of_a_smaller_segment_is_refused(
    owned: OwnedShm, shm: AttachedShm, tmp_path: Path
) -> None:
    """The compiled reader works out the headers' place by itself: it must not read beyond."""
    reader = reader_of("compiled")
    large = OwnedShm(tmp_path / "large", Superblock(7, 1, 0, 2 * SIZE))
    other = AttachedShm(large.data_path, large.head_path)
    mixed = MappedSegment(shm._mapped.head, other._mapped.data, *shm._mapped[2:])
    with pytest.raises(ValueError, match="not of that segment"):
        reader.read(mixed, [KEY], [None], KINDS)
    other.close()
    large.close()


@pytest.mark.parametrize(
    ("keys", "outs"), [([KEY], []), ([], [None]), ([KEY[:-1]], [None]), ([KEY + b"x"], [None])]
)
def test_what_cannot_be_a_batch_is_an_error(
    shm: AttachedShm, keys: list[bytes], outs: list[Any]
) -> None:
    with pytest.raises(ValueError):
        reader_of("compiled").read(shm._mapped, keys, outs, KINDS)


@pytest.mark.parametrize("keys", [["text"], [7], [None], [bytearray(32)]])
def test_a_key_that_is_no_bytes_is_an_error(shm: AttachedShm, keys: list[Any]) -> None:
    with pytest.raises(TypeError):
        reader_of("compiled").read(shm._mapped, keys, [None], KINDS)


# --- which one ---------------------------------------------------------------------


def test_the_variable_chooses_and_a_part_that_does_not_fit_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(batch_read.choose("no"), PythonReader)
    built = compiled_module(batch_read.SOURCE, tmp_path)
    monkeypatch.setitem(sys.modules, "built", built)
    assert isinstance(batch_read.choose(None, "built"), CompiledReader)
    assert isinstance(batch_read.choose(None, "not_there"), PythonReader)
    with pytest.raises(ImportError):
        batch_read.choose("yes", "not_there")
    monkeypatch.setattr(built, "SOURCE_CRC32", built.SOURCE_CRC32 ^ 1)
    assert isinstance(batch_read.choose(None, "built"), PythonReader)
    with pytest.raises(ImportError, match="build it again"):
        batch_read.choose("yes", "built")
    monkeypatch.setattr(batch_read, "SOURCE", tmp_path / "not installed.c")
    assert isinstance(batch_read.choose("yes", "built"), CompiledReader)


def test_a_process_can_be_told_to_do_without() -> None:
    code = "from kvstore.segment.batch_read import READER; print(READER.name)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={part.COMPILED: "no", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout == "Python\n"
