"""A test that meets many inputs in one item fails for any of them, and says for which."""

from __future__ import annotations

import inspect

import pytest
from each_input import each


def test_every_input_is_met_with_the_fixtures_of_the_item() -> None:
    met = []

    @each("a, b", [(1, "x"), (2, "y")])
    def claim(place: str, a: int, b: str) -> None:
        met.append((place, a, b))

    assert list(inspect.signature(claim).parameters) == ["place"]
    claim(place="here")
    assert met == [("here", 1, "x"), ("here", 2, "y")]


def test_two_lists_of_inputs_are_met_in_every_combination() -> None:
    met = []

    @each("a", [1, 2])
    @each(("b",), [[3], [4]])
    def claim(a: int, b: int) -> None:
        met.append((a, b))

    claim()
    assert sorted(met) == [(1, 3), (1, 4), (2, 3), (2, 4)]


def test_the_input_that_fails_is_named() -> None:
    @each("number", [3, pytest.param(4, id="four"), 5], ids=["a", "b", "c"])
    def claim(number: int) -> None:
        assert number == 3

    with pytest.raises(AssertionError) as caught:
        claim()
    assert caught.value.__notes__ == ["input 2 of 3: four number=4"]


def test_a_failure_that_is_no_exception_is_named_too() -> None:
    @each("number", [1])
    def claim(number: int) -> None:
        with pytest.raises(ValueError, match="never"):
            pass

    with pytest.raises(pytest.fail.Exception) as caught:
        claim()
    assert caught.value.__notes__ == ["input 1 of 1: - number=1"]


def test_an_input_that_is_skipped_is_a_failure() -> None:
    @each("number", [1])
    def claim(number: int) -> None:
        pytest.skip("not here")

    with pytest.raises(AssertionError, match="skipped"):
        claim()


def test_no_inputs_and_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError, match="cannot fail"):
        each("a", [])
    with pytest.raises(AssertionError, match="a, b"):
        each("a, b", [(1, 2), (3,)])
    with pytest.raises(AssertionError, match="takes no"):
        each("a", [1])(lambda b: None)
    with pytest.raises(AssertionError, match="no marks"):
        each("a", [pytest.param(1, marks=pytest.mark.skip)])
