"""Imports each public name when it is first used: a router needs no client, a client no node."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def on_first_use(
    module: str, imports: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for `module`. `imports` says what to import from each
    module below `kvstore`, as an import statement would."""
    places = {}
    for place, names in imports.items():
        for each in names.split(", "):
            attribute, _, alias = each.partition(" as ")
            places[alias or attribute] = (f"kvstore.{place}", attribute)
    namespace = vars(sys.modules[module])

    def find(name: str) -> object:
        if name not in places:
            raise AttributeError(
                f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module]
            )
        place, attribute = places[name]
        namespace[name] = found = getattr(import_module(place), attribute)
        return found

    return find, lambda: sorted({*namespace, *places})
