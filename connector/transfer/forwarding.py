"""Forwards a protocol's calls to several connectors: by which rule, and what comes of the answers.

A rule is a function that makes the calls and one answer of theirs; `forwarding` makes the methods
of a class from a table of rules. A call that the protocol gains and nobody has decided about
stops the import.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import isfunction
from typing import Any, Protocol, TypeVar

from kvstore import InternalError, UsageError

log = logging.getLogger(f"kvstore.{__name__}")

T = TypeVar("T")
Calls = Iterable[Callable[[], Any]]
"""One call for each child, in order, not made yet."""
Rule = Callable[[str, Calls], object]
"""Makes the calls and one answer of theirs. The first argument is the method's name."""
_Class = TypeVar("_Class", bound=type)


class _Several(Protocol):
    _children: Sequence[object]


def each(name: str, calls: Calls) -> None:
    """Every child is told; the first that raises ends it."""
    for call in calls:
        call()


def each_whatever_happens(name: str, calls: Calls) -> None:
    """Every child is told, also after one has raised; the first error is raised at the end."""
    error: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as e:
            log.exception("%s of a connector failed", name)
            error = error or e
    if error is not None:
        raise error


def any_of(name: str, calls: Calls) -> bool:
    """Every child is asked, for some answers change something."""
    return True in [bool(call()) for call in calls]


def none_refuses(name: str, calls: Calls) -> bool:
    """Every child is asked; None is no refusal."""
    return False not in [call() for call in calls]


def united(name: str, calls: Calls) -> set[object]:
    return set().union(*(call() for call in calls))


def one_after_another(name: str, calls: Calls) -> list[object]:
    return [item for call in calls for item in call()]


def the_same(name: str, calls: Calls) -> object:
    """Return what those children say that say something. Raises `UsageError` when they differ."""
    return _only(name, [answer for call in calls if (answer := call()) is not None])


def the_same_of_all(name: str, calls: Calls) -> object:
    """Do as `the_same`, but return None as soon as one child says nothing."""
    answers = [call() for call in calls]
    return None if None in answers else _only(name, answers)


def _only(name: str, answers: Sequence[T]) -> T | None:
    if len(set(answers)) > 1:
        raise UsageError(name, answers, "must be the same for all connectors of a MultiConnector")
    return answers[0] if answers else None


def calls_of(protocol: type) -> set[str]:
    """Return names of the protocol's methods."""
    return {n for n, member in vars(protocol).items() if n[0] != "_" and isfunction(member)}


def forwarding(protocol: type, rules: Mapping[str, Rule]) -> Callable[[_Class], _Class]:
    """Class decorator: a method for each of `rules`, which asks `self._children` in turn.

    Raises `InternalError` unless the class has every method of `protocol` then,
    each either in its body or by a rule.
    """

    def method(name: str, rule: Rule) -> Callable[..., object]:
        def forward(self: _Several, *args: object, **kwargs: object) -> object:
            bound = [getattr(child, name) for child in self._children]
            return rule(name, [partial(call, *args, **kwargs) for call in bound])

        forward.__name__ = name
        forward.__doc__ = getattr(protocol, name).__doc__
        return forward

    def decorate(cls: _Class) -> _Class:
        wanted, own = calls_of(protocol), calls_of(cls)
        undecided, foreign = wanted - own - set(rules), set(rules) - wanted
        twice = own & set(rules)
        if undecided or foreign or twice:
            raise InternalError(
                f"{cls.__name__} must forward each call of {protocol.__name__} once: "
                f"missing {sorted(undecided)}, unknown {sorted(foreign)}, twice {sorted(twice)}"
            )
        for name, rule in rules.items():
            setattr(cls, name, method(name, rule))
        return cls

    return decorate
