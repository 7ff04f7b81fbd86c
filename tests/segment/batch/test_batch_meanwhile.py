"""The contract of batch readers while others write, end or misuse them (rule 4), and which one
a process has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from batch_parts import KEY, KINDS, SIZE, VALUE, key_of, mapped, read, save, seal
from batch_readers import compiled_module, reader_of
from own_python import printed
from segment_bytes import head_of

from kvstore.compiled import part
from kvstore.core.events import Mark
from kvstore.segment import batch_read
from kvstore.segment.attached import AttachedShm
from kvstore.segment.batch_read import BatchReader, CompiledReader, MappedSegment, PythonReader
from kvstore.segment.header import FREE, SUPERBLOCK_BYTES, Header, Superblock, pack
from kvstore.segment.shm import OwnedShm

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


def test_every_byte_of_the_header_is_looked_at_again(
    owned: OwnedShm, shm: AttachedShm, reader: BatchReader
) -> None:
    save(owned)
    for at in range(SUPERBLOCK_BYTES + 3 * 64, SUPERBLOCK_BYTES + 4 * 64):

        def change(at: int = at) -> None:
            head_of(owned)[at] ^= 1

        assert read(reader, shm, copied=change) == [None], at
        change()
    assert read(reader, shm) != [None]


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
    assert mapped(shm).data.closed, "no buffer of it was kept"
    assert mapped(shm).head.closed


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
    ran = printed(code)
    if sys.version_info < (3, 12):  # where an object that is made may be what sets it off
        assert ran == "True\n", "the lists did not grow when they should"


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
    mixed = MappedSegment(mapped(shm).head, mapped(other).data, *mapped(shm)[2:])
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
        reader_of("compiled").read(mapped(shm), keys, outs, KINDS)


@pytest.mark.parametrize("keys", [["text"], [7], [None], [bytearray(32)]])
def test_a_key_that_is_no_bytes_is_an_error(shm: AttachedShm, keys: list[Any]) -> None:
    with pytest.raises(TypeError):
        reader_of("compiled").read(mapped(shm), keys, [None], KINDS)


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
    ran = printed(code, env={part.COMPILED: "no", "PATH": ""})
    assert ran == "Python\n"
