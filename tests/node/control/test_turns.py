"""Who has much for a node to do waits in a row, a turn each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.node.control.turns import Turns


class Loop:
    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.due.append((delay_s, call))

    def once(self) -> None:
        (delay_s, call) = self.due.pop()
        assert (delay_s, self.due) == (0.0, []), "one at a time, and at once"
        call()


class Row:
    def __init__(self) -> None:
        self.loop = Loop()
        self.turns = Turns(self.loop)
        self.had: list[str] = []

    def enter(self, name: str, turns: int) -> None:
        left = [turns]

        def turn() -> bool:
            self.had.append(name)
            left[0] -= 1
            return left[0] > 0

        self.turns.enter(turn)

    def all(self) -> list[str]:
        while self.loop.due:
            self.loop.once()
        return self.had


def test_they_have_their_turns_one_after_the_other_until_each_is_done() -> None:
    row = Row()
    for name, turns in (("a", 3), ("b", 1), ("c", 2)):
        row.enter(name, turns)
    assert row.had == [], "whoever enters waits for a turn"
    assert row.all() == ["a", "b", "c", "a", "c", "a"]
    row.enter("d", 2)
    assert row.all()[6:] == ["d", "d"]


def test_who_enters_in_the_middle_of_a_turn_is_behind_the_others() -> None:
    row = Row()

    def turn() -> bool:
        row.had.append("a")
        row.enter("late", 1)
        return False

    row.turns.enter(turn)
    row.enter("b", 1)
    assert row.all() == ["a", "b", "late"]


def test_one_that_fails_has_no_other_turn_and_the_others_go_on() -> None:
    row = Row()

    def fails() -> bool:
        raise KeyError("a bug")

    row.turns.enter(fails)
    row.enter("b", 2)
    with pytest.raises(KeyError):
        row.loop.once()
    assert row.all() == ["b", "b"]
