"""Who goes when there is no room: the oldest of whoever has most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.system.waiting import Waiting


def test_nobody_goes_while_there_is_room() -> None:
    waiting = Waiting[int]()
    assert [waiting.enter(i, "a", 3) for i in range(3)] == [None] * 3
    assert list(waiting) == [0, 1, 2]


def test_who_opens_many_pushes_out_their_own() -> None:
    waiting = Waiting[int]()
    waiting.enter(0, "other", 4)
    gone = [waiting.enter(i, "crowd", 4) for i in range(1, 10)]
    assert gone == [None, None, None, 1, 2, 3, 4, 5, 6]
    assert waiting.enter(10, "third", 4) == 7


def test_who_has_left_is_not_the_next() -> None:
    waiting = Waiting[int]()
    for i in range(3):
        waiting.enter(i, "a", 9)
    assert waiting.leave(0)
    assert not waiting.leave(0)
    assert waiting.next() == waiting.next() == 1
    waiting.leave(1)
    assert waiting.next() == 2
    waiting.leave(2)
    assert waiting.next() is None


@given(st.lists(st.sampled_from("aab"), max_size=40), st.integers(1, 6))
def test_there_are_never_more_than_may_be(owners: list[str], most: int) -> None:
    waiting = Waiting[int]()
    for i, owner in enumerate(owners):
        waiting.enter(i, owner, most)
        assert len(waiting) <= most
    crowd = owners.count("a")
    if "b" in owners and most > 1 and crowd > owners.count("b"):
        assert any(owners[i] == "b" for i in waiting), "the smaller crowd is not pushed out"
