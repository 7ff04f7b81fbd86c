"""kvstore/settings/reader.py: an error of a setting says field, value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from each_input import each

from kvstore import UsageError
from kvstore.settings.reader import ItemsMax, NumberRange, check_settings, read_settings


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: Annotated[int, NumberRange(1, 9)] = 3

    def __post_init__(self) -> None:
        check_settings(self, inside="inner.")


@dataclass(frozen=True, kw_only=True)
class Settings:
    url: str | None = None
    advertise: str = ""
    size_bytes: Annotated[int, NumberRange(4096)] = 4096
    timeout_s: Annotated[float, NumberRange(above=0, most=600)] = 0.5
    share: float = 0.5
    loud: bool = False
    verify: Literal["never", "always"] = "never"
    run_dir: Path | None = None
    sizes: Annotated[Sequence[Annotated[int, NumberRange(1)]], ItemsMax(3)] = (1, 2)
    more: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        check_settings(self)


GOOD = {
    "url": "redis://h",
    "advertise": "",
    "size_bytes": 4096,
    "timeout_s": 600,
    "share": -1.5,
    "loud": True,
    "verify": "always",
    "run_dir": None,
    "sizes": [1, 2, 3],
    "more": {"a": 1},
}


def test_what_is_allowed_is_taken_over():
    read_settings(Settings, {}, where="file")
    for name, value in GOOD.items():
        assert getattr(read_settings(Settings, {name: value}, where="file"), name) == value


def test_a_path_may_be_given_as_text_and_a_part_as_a_table():
    made = read_settings(Settings, {"run_dir": "/run/kv", "inner": {"depth": 9}}, where="file")
    assert made.run_dir == Path("/run/kv")
    assert made.inner == Inner(depth=9)


@each(
    ("name", "value", "must"),
    [
        ("url", "", "a string that is not empty"),
        ("url", 7, "a string that is not empty"),
        ("advertise", None, "a string"),
        ("size_bytes", 4095, "a whole number of at least 4096"),
        ("size_bytes", "4096", "a whole number of at least 4096"),
        ("size_bytes", 4096.0, "a whole number of at least 4096"),
        ("size_bytes", True, "a whole number of at least 4096"),
        ("timeout_s", 0, "a number above 0, at most 600"),
        ("timeout_s", 600.1, "a number above 0, at most 600"),
        ("timeout_s", math.nan, "a number above 0, at most 600"),
        ("share", math.inf, "a number"),
        ("loud", 1, "true or false"),
        ("verify", "sometimes", "one of never, always"),
        ("run_dir", 5, "a path"),
        ("run_dir", "", "a path"),
        ("sizes", [1, 2, 3, 4], "a list of at most 3, each a whole number of at least 1"),
        ("sizes", [0], "a list of at most 3, each a whole number of at least 1"),
        ("sizes", "12", "a list of at most 3, each a whole number of at least 1"),
        ("more", [1], "a table of names and values"),
    ],
)
def test_what_is_not_allowed_is_named_with_its_value_and_what_is(name, value, must):
    with pytest.raises(UsageError) as caught:
        read_settings(Settings, {name: value}, where="file")
    assert str(caught.value) == f"{name}={value!r}: must be {must}"
    with pytest.raises(UsageError):
        Settings(**{name: value})  # made in code, it is held against the same


def test_a_part_says_where_it_stands():
    with pytest.raises(UsageError, match=r"^inner\.depth=10: must be a whole number from 1 to 9$"):
        read_settings(Settings, {"inner": {"depth": 10}}, where="file")
    with pytest.raises(UsageError, match=r"^file\.inner='dept': unknown: did you mean depth\?"):
        read_settings(Settings, {"inner": {"dept": 1}}, where="file")
    with pytest.raises(UsageError, match=r"^file\.inner=7: must be a table"):
        read_settings(Settings, {"inner": 7}, where="file")


def test_an_unknown_name_is_said_with_the_nearest_and_all_known_ones():
    with pytest.raises(UsageError) as caught:
        read_settings(Settings, {"timeout": 1}, where="file")
    assert str(caught.value).startswith("file='timeout': unknown: did you mean timeout_s? known")
    assert "advertise, inner, loud" in str(caught.value)
    with pytest.raises(UsageError, match="unknown: known are"):
        read_settings(Settings, {"qqqqqq": 1}, where="file")


def test_a_known_name_that_would_have_no_effect_is_unknown():
    with pytest.raises(UsageError, match=r"unknown: known are loud$"):
        read_settings(Settings, {"verify": "never"}, where="adapter", only=["loud"])
