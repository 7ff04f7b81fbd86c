"""Copies of other users' values take so much memory of a process, and no more."""

from __future__ import annotations

import gc

import pytest

from kvstore.client import copies as module
from kvstore.client.copies import Copies


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    monkeypatch.setattr(module, "ANOTHERS_BYTES_MAX", 100)
    return Copies()


class Pinned:
    def when_gone(self, call, *args):
        self.gone = lambda: call(*args)


def test_room_is_counted_as_long_as_anybody_has_a_view_of_it(copies: Copies) -> None:
    first = copies.room(60)
    assert first is not None
    assert first.nbytes == 60
    assert copies.room(41) is None
    rest = copies.room(40)
    assert rest is not None
    view = first[10:20]
    del first
    gc.collect()
    assert copies.room(1) is None
    del view
    gc.collect()
    assert copies.room(61) is None
    assert copies.room(60) is not None


def test_room_that_cannot_be_had_is_nobodys(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(size_bytes: int) -> bytearray:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(module, "_Room", no_memory)
        with pytest.raises(MemoryError):
            copies.room(100)
    assert copies.room(100) is not None


def test_a_pin_counts_until_it_is_gone_and_only_if_room_was_taken_for_it(copies: Copies) -> None:
    claims = [copies.claim() for _ in range(3)]
    assert len(set(claims)) == 3
    assert copies.take(claims[0], 100)
    assert not copies.take(claims[1], 1)
    kept, other = Pinned(), Pinned()
    copies.keep(claims[0], kept)
    copies.keep(claims[1], other)
    assert not hasattr(other, "gone")
    kept.gone()
    assert copies.take(claims[2], 100)
    copies.release(claims[2])
    copies.release(claims[2])
    assert copies.room(100) is not None
