"""Checks at import that the LMCache that is installed has the interface the adapters are made for.

LMCache's interfaces change between releases, also those of one minor version.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from kvstore import UsageError

log = logging.getLogger(f"kvstore.{__name__}")

TESTED = ("0.5.6", "0.5.7rc2")


@contextmanager
def names_of_lmcache() -> Iterator[None]:
    """Refuse an LMCache that lacks a name which is imported in here."""
    try:
        yield
    except ImportError as e:
        if (e.name or "").partition(".")[0] != "lmcache" or installed() is None:
            raise  # a package that LMCache needs, or LMCache itself, is not there
        raise _refusal(str(e)) from e


def check_interface(made: type, base: type, calls: Mapping[str, Sequence[str]]) -> None:
    """Raise `UsageError`, which names both versions, unless `made` fits its `base` of LMCache's.

    `calls` names what `made` calls of `base`, and the arguments it gives each. A version that was
    not tested but fits is warned of once.
    """
    misfits = set(getattr(made, "__abstractmethods__", ()))
    for name, theirs in inspect.getmembers(base, inspect.isfunction):
        if name != "__init__" and not _takes(
            inspect.getattr_static(made, name), list(inspect.signature(theirs).parameters)
        ):
            misfits.add(name)
    misfits |= {n for n, given in calls.items() if not _takes(getattr(base, n, None), given)}
    if misfits:
        raise _refusal(f"{base.__name__} differs in {', '.join(sorted(misfits))}")
    _warn_unless_tested(installed())


def installed() -> str | None:
    """Return LMCache's version; None where it is not installed."""
    try:
        return version("lmcache")
    except PackageNotFoundError:
        return None


def _takes(method: object, arguments: Sequence[str]) -> bool:
    """Return whether a method has parameters for these arguments, by place and by name."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
        inspect.signature(method).bind(**dict.fromkeys(arguments))
    except TypeError:
        return False
    return True


def _refusal(why: str) -> UsageError:
    must = f"must be {' or '.join(TESTED)}, or have their interface: {why}"
    return UsageError("the version of LMCache", installed(), must)


@cache
def _warn_unless_tested(found: str | None) -> None:
    if found not in TESTED:
        log.warning("LMCache %s has the interface of %s, but is not tested", found, TESTED)
