"""What every `BlockFile` promises. Subclasses give `file`, of `SIZE` bytes."""

from __future__ import annotations

import os

import pytest

from kvstore.segment.disk.base import BlockFile, aligned

PAGE = 4096
SIZE = 16 * PAGE


def filled(pages: int, fill: int) -> memoryview:
    memory = aligned(pages * PAGE)
    memory[:] = bytes([fill]) * len(memory)
    return memory


def read(file: BlockFile, page: int, pages: int = 1) -> bytes:
    into = aligned(pages * PAGE)
    file.read(page * PAGE, into)
    return bytes(into)


class BlockFileContract:
    @pytest.fixture
    def file(self) -> BlockFile:
        raise NotImplementedError

    def test_a_fresh_file_has_its_size_and_zeros(self, file: BlockFile) -> None:
        assert file.size_bytes == SIZE
        assert not any(read(file, 0, 16))

    @pytest.mark.parametrize("synced", [False, True])
    def test_what_is_written_is_read_back(self, file: BlockFile, synced: bool) -> None:
        random = aligned(PAGE)
        random[:] = os.urandom(PAGE)
        file.write(3 * PAGE, [filled(2, 1), random, filled(1, 2)])
        if synced:
            file.sync()
        expected = bytes([1]) * 2 * PAGE + bytes(random) + bytes([2]) * PAGE
        assert read(file, 3, 4) == expected
        assert not any(read(file, 2))
        assert not any(read(file, 7))

    def test_the_last_write_counts(self, file: BlockFile) -> None:
        for fill in (1, 2, 3):
            file.write(PAGE, [filled(1, fill)])
        assert set(read(file, 1)) == {3}

    def test_memory_may_be_written_that_is_read_only(self, file: BlockFile) -> None:
        file.write(0, [filled(1, 9).toreadonly()])
        assert set(read(file, 0)) == {9}

    def test_nothing_is_read_behind_the_end(self, file: BlockFile) -> None:
        with pytest.raises(OSError):
            read(file, 15, 2)

    def test_nothing_is_written_behind_the_end(self, file: BlockFile) -> None:
        with pytest.raises(OSError):
            file.write(15 * PAGE, [filled(1, 1), filled(1, 1)])
        assert file.size_bytes == SIZE
        assert file.trouble() is None

    def test_only_whole_pages_are_read_and_written(self, file: BlockFile) -> None:
        with pytest.raises(OSError):
            file.write(100, [filled(1, 1)])
        with pytest.raises(OSError):
            file.write(0, [filled(1, 1)[:100]])
        with pytest.raises(OSError):
            file.read(0, aligned(PAGE)[:100])

    def test_a_closed_file_refuses_and_may_be_closed_again(self, file: BlockFile) -> None:
        for _ in range(2):
            file.close()
        with pytest.raises(OSError):
            read(file, 0)
        with pytest.raises(OSError):
            file.write(0, [filled(1, 1)])
        with pytest.raises(OSError):
            file.sync()
