"""Reads and checks settings: a dataclass declares them, this finds what is wrong with a value.

The annotation of a field is what it may be; `Annotated[int, NumberRange(1, 8)]` bounds a number,
`Annotated[Sequence[int], ItemsMax(8)]` a list. `check_settings` holds an instance against it,
however it was made; `read_settings` makes one of what a file, an environment or an engine gave.
Both raise `UsageError` that names the field, the value and what is allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of
from weakref import WeakKeyDictionary

from kvstore.errors import UsageError
from kvstore.settings.removed import REMOVED

T = TypeVar("T")


class NumberRange(NamedTuple):
    """Bounds of a number, both inclusive, unless it must be `above` one."""

    least: float | None = None
    most: float | None = None
    above: float | None = None

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int | float)
        return (
            abs(number) < math.inf  # which, unlike isfinite, takes integers of any size
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f" from {_plain(self.least)} to {_plain(self.most)}"
        bounds = []
        if self.least is not None:
            bounds.append(f"of at least {_plain(self.least)}")
        if self.above is not None:
            bounds.append(f"above {_plain(self.above)}")
        if self.most is not None:
            bounds.append(f"at most {_plain(self.most)}")
        return "".join([" ", ", ".join(bounds)]) if bounds else ""


class ItemsMax(NamedTuple):
    """How many items a list may have."""

    most: int


@dataclass(frozen=True, slots=True)
class Allowed:
    """What one field may be; `optional` says whether it may be None besides."""

    kind: Any
    range: NumberRange
    count: ItemsMax | None
    optional: bool
    of: Allowed | None
    """What each item of a list may be; None where it is no list."""
    empty: bool
    """Whether a text may be empty: it may where the default is."""

    def __str__(self) -> str:
        if self.kind is bool:
            return "true or false"
        if self.kind is int:
            return f"a whole number{self.range}"
        if self.kind is float:
            return f"a number{self.range}"
        if self.kind is str:
            return "a string" if self.empty else "a string that is not empty"
        if self.kind is Path:
            return "a path"
        if self.of is not None:
            most = f" of at most {self.count.most}" if self.count else ""
            return f"a list{most}, each {self.of}"
        if get_origin(self.kind) is Literal:
            words = (
                one if one and isinstance(one, str) else json.dumps(one)
                for one in get_args(self.kind)
            )
            return f"one of {', '.join(words)}"
        return "a table of names and values"

    def takes(self, value: object) -> bool:
        """Return whether the field may have `value`. An instance of a dataclass has checked
        itself."""
        if value is None:
            return self.optional
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind in (int, float):
            kinds = int if self.kind is int else int | float
            return isinstance(value, kinds) and type(value) is not bool and value in self.range
        if self.kind is str:
            return isinstance(value, str) and (self.empty or value != "")
        if self.of is not None:
            items = value if isinstance(value, list | tuple) else ()
            most = self.count.most if self.count else len(items)
            return items is value and len(items) <= most and all(map(self.of.takes, items))
        if get_origin(self.kind) is Literal:
            return any(value == one and type(value) is type(one) for one in get_args(self.kind))
        return isinstance(value, get_origin(self.kind) or self.kind)


def check_settings(settings: object, *, inside: str = "") -> None:
    """Raise `UsageError` for the first field of the dataclass `settings` that its annotation does
    not allow.

    `inside` is what messages put before the name of a field.
    """
    for name, allowed in allowed_in(type(settings)).items():
        value = getattr(settings, name)
        if not allowed.takes(value):
            raise UsageError(inside + name, value, f"must be {allowed}{_meant(value, allowed)}")


def _meant(value: object, allowed: Allowed) -> str:
    """Return the nearest of the words that a field may be, for a mistyped one."""
    if get_origin(allowed.kind) is not Literal or not isinstance(value, str):
        return ""
    words = [one for one in get_args(allowed.kind) if one and isinstance(one, str)]
    near = get_close_matches(value, words, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def read_settings(
    kind: type[T],
    values: Mapping[str, object],
    *,
    where: str,
    only: Collection[str] = (),
    besides: Mapping[str, object] | None = None,
) -> T:
    """Make a `kind`, a dataclass, of `values` as TOML, JSON or an engine has them.

    `where` says in messages where the values stand. With `only`, a name that is not among these
    is unknown too: it would have no effect. `besides` are the values of fields that `values` does
    not name. Raises `UsageError` for a name that is unknown, and what `kind` raises for a value.
    """
    known_names(values, only or allowed_in(kind), where=where)
    made: dict[str, object] = dict(besides or {})
    for name, value in values.items():
        made[name] = _made(allowed_in(kind)[name], value, f"{where}.{name}")
    return kind(**made)


def known_names(values: Mapping[str, object], known: Collection[str], *, where: str) -> None:
    """Raise `UsageError` for the first name in `values` that is not among `known`; its message has
    what became of it if it was a setting once, else the nearest one that is."""
    if not isinstance(values, Mapping):
        raise UsageError(where, values, "must be a table of names and values")
    for name in values:
        if name not in known:
            if name in REMOVED:
                raise UsageError(where, name, REMOVED[name])
            near = get_close_matches(str(name), known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(where, name, f"unknown: {meant}known are {', '.join(sorted(known))}")


def allowed_in(kind: type) -> dict[str, Allowed]:
    """Return what each field of the dataclass `kind` may be, by the field's name."""
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = _allowed_in(kind)
    return found


_known: WeakKeyDictionary[type, dict[str, Allowed]] = WeakKeyDictionary()


def _allowed_in(kind: type) -> dict[str, Allowed]:
    hints = hints_of(kind, include_extras=True)
    return {f.name: _allowed(hints[f.name], _default(f) == "") for f in fields(kind) if f.init}


def default_of(kind: type, name: str) -> object:
    """Return what the field `name` of the dataclass `kind` is when nobody sets it."""
    return next(_default(f) for f in fields(kind) if f.name == name)


def _default(f: Field[object]) -> object:
    if f.default_factory is not MISSING:
        return f.default_factory()
    return f.default


def _allowed(hint: Any, empty: bool = False) -> Allowed:
    kind, bounds, count, optional, of = hint, NumberRange(), None, False, None
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
        optional = True
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        bounds = next((note for note in notes if isinstance(note, NumberRange)), bounds)
        count = next((note for note in notes if isinstance(note, ItemsMax)), None)
    if get_origin(kind) in (Sequence, list, tuple):
        of = _allowed(get_args(kind)[0])
    return Allowed(kind, bounds, count, optional, of, empty)


def _made(allowed: Allowed, value: Any, where: str) -> object:
    if is_dataclass(allowed.kind) and isinstance(allowed.kind, type):
        return (
            value
            if isinstance(value, allowed.kind)
            else read_settings(allowed.kind, value, where=where)
        )
    if allowed.kind is Path and isinstance(value, str) and value:
        return Path(value)
    return value


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"
