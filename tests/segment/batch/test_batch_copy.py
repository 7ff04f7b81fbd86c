"""The contract of whoever copies the values of a put (kvstore/segment/batch_read.py), in Python and
compiled."""

from __future__ import annotations

import pytest
from batch_readers import reader_of, streaming_reader

from kvstore.segment.batch_read import BatchReader


@pytest.fixture(params=["Python", "compiled, by lines", "compiled, by pages"])
def reader(request: pytest.FixtureRequest) -> BatchReader:
    if request.param == "Python":
        return reader_of("Python")
    return streaming_reader(pages=request.param.endswith("pages"))


EDGE = 4096
SIZES = [0, 1, 63, 64, 65, 4095, 4096, 4097, EDGE + 63, EDGE + 64, EDGE + 65, (1 << 20) + 7]


def test_each_is_copied_whole_and_nothing_beside_it(reader: BatchReader) -> None:
    """Wherever the targets begin in a line of the cache; alone and so many that the GIL is let
    go."""
    for more in (0, 3):
        sources = [bytes([i + 1]) * size for i, size in enumerate(SIZES + [500_001] * more)]
        for at in (0, 1, 15, 16, 48, 63):
            rooms = [bytearray(b"x" * (len(source) + 200)) for source in sources]
            targets = [
                memoryview(room)[100 + at : 100 + at + len(source)]
                for room, source in zip(rooms, sources, strict=True)
            ]
            reader.copy_each(targets, list(map(memoryview, sources)))
            for room, source in zip(rooms, sources, strict=True):
                assert room == b"x" * (100 + at) + source + b"x" * (100 - at)


def test_every_byte_of_a_large_copy_is_in_its_place(reader: BatchReader) -> None:
    source = b"".join(i.to_bytes(4, "little") for i in range(600_000))
    for skip in (0, 1, 17):
        room = bytearray(len(source) + 64)
        view = memoryview(room)[5 : 5 + len(source) - skip]
        reader.copy_each([view], [memoryview(source)[skip:]])
        assert view == source[skip:]


def test_nothing_to_copy_is_fine(reader: BatchReader) -> None:
    reader.copy_each([], [])


@pytest.mark.parametrize("size", [10, 2 << 20])
def test_copies_that_do_not_fit_are_refused(reader: BatchReader, size: int) -> None:
    room, large = bytearray(b"x" * (size + 2)), memoryview(bytes(size + 1))
    for target, source in (
        (memoryview(room)[1 : size + 1], large),
        (memoryview(room)[1 : size + 1], large[: size - 1]),
        (memoryview(bytes(size)), large[:size]),
    ):
        with pytest.raises((ValueError, TypeError, BufferError)):
            reader.copy_each([target], [source])
    assert set(room) == {ord("x")}
    for targets, sources in (([memoryview(room)], []), ([], [large])):
        with pytest.raises(ValueError):
            reader.copy_each(targets, sources)


@pytest.mark.parametrize("size", [10, 2 << 20])
@pytest.mark.parametrize("wrong", ["", "length", "read-only"])
def test_no_buffer_is_kept_by_a_copy(reader: BatchReader, size: int, wrong: str) -> None:
    """Also when the last one is refused."""
    rooms = [bytearray(size) for _ in range(4)]
    targets, sources = list(map(memoryview, rooms[:2])), list(map(memoryview, rooms[2:]))
    if wrong == "length":
        sources[1] = sources[1][1:]
    elif wrong == "read-only":
        targets[1] = targets[1].toreadonly()
    if wrong:
        with pytest.raises((ValueError, TypeError, BufferError)):
            reader.copy_each(targets, sources)
    else:
        reader.copy_each(targets, sources)
    del targets, sources
    for room in rooms:
        room.clear()  # a buffer that somebody has kept would forbid it
