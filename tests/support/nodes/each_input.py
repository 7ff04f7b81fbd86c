"""Lets one test meet many inputs: a claim is one item, and says which input broke it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from reprlib import Repr
from typing import Any

import pytest

_shown = Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 200


def each(
    names: str | Sequence[str],
    inputs: Iterable[Any],
    ids: Iterable[str] | Callable[[Any], object] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test once for every input, as `pytest.mark.parametrize` does, but in one item and
    with the same fixtures: for inputs that leave those as they were. The first input that fails
    ends the test, and its error says which one it was. An input may not be skipped."""
    wanted = [one.strip() for one in names.split(",")] if isinstance(names, str) else [*names]
    # As in parametrize: an input for several names is a row of values, one for a name is a value.
    several = len(wanted) > 1 or not isinstance(names, str)
    rows = []
    for one in inputs:
        if isinstance(one, type(pytest.param())):
            assert not one.marks, "an input of one item has no marks of its own"
            rows.append((one.id, list(one.values)))
        else:
            rows.append((None, list(one) if several else [one]))
    assert rows, "a test without inputs cannot fail"
    assert all(len(values) == len(wanted) for _, values in rows), f"inputs are {names}"
    given = [] if ids is None or callable(ids) else list(ids)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        missing = set(wanted) - set(signature.parameters)
        assert not missing, f"the test takes no {missing}"

        @functools.wraps(test)
        def all_inputs(*args: Any, **fixtures: Any) -> None:
            for number, (name, values) in enumerate(rows):
                row = dict(zip(wanted, values, strict=True))
                try:
                    test(*args, **fixtures, **row)
                except BaseException as e:
                    label = name or (given[number] if given else "-")
                    told = ", ".join(f"{key}={_shown.repr(value)}" for key, value in row.items())
                    e.add_note(f"input {number + 1} of {len(rows)}: {label} {told}")
                    if isinstance(e, pytest.skip.Exception):
                        raise AssertionError("one input of an item is skipped") from e
                    raise

        kept = [one for one in signature.parameters.values() if one.name not in wanted]
        all_inputs.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return all_inputs

    return decorate
