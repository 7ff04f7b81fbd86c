"""What every `Saver` promises. Subclasses give `saving`: a saver, and how to ask it for memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest

from kvstore import PutResult, PutStatus
from kvstore.client.base import Saver
from kvstore.cuda.base import Buffer, DeviceRange, address_of
from kvstore.spi import AnyReservation, Key, NodeUnavailableError

SIZE = 40_000
"""Bytes of a block here: larger than what travels inline."""


class Saving(NamedTuple):
    reserve: Callable[[Sequence[Key], int], Sequence[AnyReservation | PutResult]]
    """Ask the saver for memory of a size for each of the keys."""
    saver: Callable[[], Saver]
    """The one that is to grant it, when it has."""
    lose: Callable[[], None]
    """Make all places go where it saves to."""


def keys(count: int) -> list[Key]:
    return [os.urandom(32) for _ in range(count)]


def start_of(buffer: Buffer) -> int:
    return buffer.address if isinstance(buffer, DeviceRange) else address_of(buffer)


class SaverContract:
    @pytest.fixture
    def saving(self) -> Saving:
        raise NotImplementedError

    def reserved(self, saving: Saving, wanted: Sequence[Key]) -> list[AnyReservation]:
        granted = saving.reserve(wanted, SIZE)
        assert [r.key for r in granted] == list(wanted)
        assert all(len(r.buffer) == SIZE for r in granted)
        return list(granted)

    def statuses(self, saving: Saving, wanted: Sequence[Key]) -> list[PutStatus | None]:
        """Of asking for them again, which reserves nothing: None where that would be granted."""
        answers = saving.reserve(wanted, SIZE)
        granted = [one for one in answers if not isinstance(one, PutResult)]
        if granted:
            granted[0].saver.abort(granted)
        return [one.status if isinstance(one, PutResult) else None for one in answers]

    def test_a_reservation_names_who_takes_it_back(self, saving: Saving) -> None:
        granted = self.reserved(saving, keys(2))
        assert {r.saver for r in granted} == {saving.saver()}
        saving.saver().abort(granted)

    def test_what_is_committed_is_stored_and_nothing_else(self, saving: Saving) -> None:
        wanted = keys(4)
        granted = self.reserved(saving, wanted)
        later = saving.saver().commit_later([granted[2], granted[0]])
        assert [result.status for result in later()] == [PutStatus.STORED] * 2
        saving.saver().abort([granted[1], granted[3]])
        exists = PutStatus.EXISTS
        assert self.statuses(saving, wanted) == [exists, None, exists, None]

    def test_what_was_aborted_is_not_sealed_by_a_commit(self, saving: Saving) -> None:
        (key,) = keys(1)
        granted = self.reserved(saving, [key])
        saving.saver().abort(granted)
        saving.saver().abort(granted)
        (result,) = saving.saver().commit_later(granted)()
        assert result.status is PutStatus.REJECTED
        assert self.statuses(saving, [key]) == [None]

    def test_a_second_commit_or_an_abort_changes_nothing(self, saving: Saving) -> None:
        (key,) = keys(1)
        granted = self.reserved(saving, [key])
        assert [bool(result) for result in saving.saver().commit_later(granted)()] == [True]
        assert [bool(result) for result in saving.saver().commit_later(granted)()] == [False]
        saving.saver().abort(granted)
        assert self.statuses(saving, [key]) == [PutStatus.EXISTS]

    def test_memory_that_is_reserved_is_nobody_elses(self, saving: Saving) -> None:
        """Rule 5: also when that which was reserved beside it was given back."""
        granted = self.reserved(saving, keys(8))
        saving.saver().abort(granted[::2])
        held = granted[1::2] + self.reserved(saving, keys(8))
        starts = sorted(start_of(r.buffer) for r in held)
        assert all(b - a >= SIZE for a, b in pairwise(starts))
        saving.saver().abort(held)

    def test_without_its_place_a_commit_says_so_and_an_abort_is_quiet(self, saving: Saving) -> None:
        granted = self.reserved(saving, keys(3))
        saver = saving.saver()
        saving.lose()
        try:
            results = saver.commit_later(granted[:2])()
        except NodeUnavailableError:
            results = []
        assert not any(results)
        saver.abort(granted)
