"""Blocks that clients report as damaged are looked at in turns, and only the wrong ones dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import xxhash
from segment_bytes import data_of

from kvstore.core.events import CheckSlot
from kvstore.node import checks
from kvstore.node.checks import STEP_BYTES, WAITING_MAX, Checks
from kvstore.node.control.turns import Turns
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm

KIB = 1 << 10


class Loop:
    """Calls back when it is told to."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.due.append(call)

    def once(self) -> bool:
        """One turn of whoever waits; whether anybody did."""
        if not self.due:
            return False
        self.due.pop(0)()
        return True


class Segment:
    """Counts what is read of it, in steps."""

    def __init__(self, checksum: int = 1) -> None:
        self.read_bytes = 0
        self.checksum = checksum

    def checksum_steps(self, offset: int, length: int, step_bytes: int) -> Iterator[int | None]:
        while length > step_bytes:
            self.read_bytes += step_bytes
            length -= step_bytes
            yield None
        self.read_bytes += length
        yield self.checksum


def check(number: int, length: int, checksum: int = 1) -> CheckSlot:
    return CheckSlot(number, 1, 0, length, checksum)


@pytest.mark.parametrize("lengths", [[1 << 30], [STEP_BYTES - 1] * 64, [KIB] * WAITING_MAX])
def test_between_two_turns_little_is_read_whatever_is_to_be_looked_at(lengths: list[int]) -> None:
    loop, segment, damaged = Loop(), Segment(), list[CheckSlot]()
    all_of_them = Checks(segment, Turns(loop), damaged.append)
    all_of_them.add([check(i, length) for i, length in enumerate(lengths)])
    assert segment.read_bytes == 0, "who reported it waits for nothing"
    seen = 0
    while loop.once():
        assert segment.read_bytes - seen <= 2 * STEP_BYTES
        seen = segment.read_bytes
    assert seen == sum(lengths)
    assert damaged == []


def test_others_have_their_turns_between() -> None:
    loop, segment, order = Loop(), Segment(), list[int]()
    turns = Turns(loop)
    all_of_them = Checks(segment, turns, lambda _: None)
    all_of_them.add([check(0, 4 * STEP_BYTES)])
    left = [1, 2, 3]
    turns.enter(lambda: order.append(segment.read_bytes // STEP_BYTES) or bool(left.pop() > 1))
    while loop.once():
        pass
    assert order == [1, 2, 3]


def test_what_is_wrong_is_said_and_what_is_right_is_not() -> None:
    loop, damaged = Loop(), list[CheckSlot]()
    all_of_them = Checks(Segment(checksum=5), Turns(loop), damaged.append)
    wrong, right = check(1, 2 * STEP_BYTES, checksum=6), check(2, KIB, checksum=5)
    all_of_them.add([wrong, right])
    while loop.once():
        pass
    assert damaged == [wrong]
    all_of_them.add([wrong])  # anew, when there was nothing left
    while loop.once():
        pass
    assert damaged == [wrong, wrong]


def test_beyond_a_limit_reports_are_passed_over_and_after_the_end_nothing_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "WAITING_MAX", 3)
    loop, segment = Loop(), Segment()
    all_of_them = Checks(segment, Turns(loop), lambda _: None)
    all_of_them.add([check(i, STEP_BYTES) for i in range(2)])
    all_of_them.add([check(i, STEP_BYTES) for i in range(2)])
    assert loop.once()
    all_of_them.stop()
    while loop.once():
        pass
    assert segment.read_bytes == STEP_BYTES
    all_of_them.add([check(i, STEP_BYTES) for i in range(9)])
    while loop.once():
        pass
    assert segment.read_bytes == 4 * STEP_BYTES


def test_there_is_one_turn_for_all_reports_and_none_for_no_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "WAITING_MAX", 3)
    loop, segment = Loop(), Segment()
    all_of_them = Checks(segment, Turns(loop), lambda _: None)
    all_of_them.add([])
    assert loop.due == []
    for _ in range(3):
        all_of_them.add([check(i, 2 * STEP_BYTES) for i in range(2)])
    turns = 0
    while loop.once():
        turns += 1
    assert (turns, segment.read_bytes) == (2 * 3, 3 * 2 * STEP_BYTES)


def test_a_turn_goes_on_while_anything_of_its_bytes_is_left() -> None:
    loop, segment = Loop(), Segment()
    all_of_them = Checks(segment, Turns(loop), lambda _: None)
    all_of_them.add([check(0, STEP_BYTES - 1), check(1, KIB), check(2, KIB)])
    assert loop.once()
    assert segment.read_bytes == STEP_BYTES - 1 + KIB


def test_a_checksum_in_steps_is_that_of_the_whole(tmp_path: Path) -> None:
    with closing(OwnedShm(tmp_path / "s", Superblock(7, 1, 0, 128 << 10))) as owned:
        data_of(owned)[: 100 * KIB] = bytes(range(256)) * (100 * KIB // 256)
        for length in (1, KIB, 3 * KIB, 10 * KIB + 1):
            *before, last = owned.checksum_steps(5, length, KIB)
            assert before == [None] * ((length - 1) // KIB)
            assert last == owned.checksum(5, length)
            assert last == xxhash.xxh3_64_intdigest(bytes(data_of(owned)[5 : 5 + length]))
