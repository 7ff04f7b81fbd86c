"""Lets the operator's file move constants: those that a module of limits declares with a range.

`STREAM_CONNECTIONS_MAX: Annotated[int, NumberRange(1)] = 256` is `stream_connections_max` in the
module's table of the file. A process takes them when it imports that module, so whoever imports
a limit has the one in force, and it stays for the life of the process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import Any, get_type_hints

from kvstore.errors import UsageError
from kvstore.settings.reader import check_settings, read_settings
from kvstore.settings.toml_file import CONFIG, read_toml


class LimitTable:
    """The constants of `module` that declare a range, as the table `table` of the file."""

    def __init__(self, module: str, table: str) -> None:
        """Read what `module` declares so far, so make it at the module's end."""
        self.module = sys.modules[module]
        self.table = table
        self.kind: type = make_dataclass(
            "MovableLimits",
            [
                (name.lower(), hint, getattr(self.module, name))
                for name, hint in get_type_hints(self.module, include_extras=True).items()
            ],
            namespace={"__post_init__": lambda made: check_settings(made, inside=f"{table}.")},
            frozen=True,
            kw_only=True,
        )
        """A dataclass of them with their defaults, names in lower case."""

    def __contains__(self, name: object) -> bool:
        return name in self.kind.__dataclass_fields__  # type: ignore[attr-defined]

    def move(self) -> None:
        """Give the constants the file's values, or leave all as they are if one of these is wrong.

        Nothing is raised here, where a package is imported: who reads the file for its other
        settings says what is wrong with it.
        """
        try:
            path, tables = read_toml()
            table = tables.get(self.table, {})
            given = {name: value for name, value in table.items() if name in self}
            read_settings(self.kind, given, where=f"{path} [{self.table}]")
        except UsageError:
            return
        for name, value in given.items():
            setattr(self.module, name.upper(), value)

    def in_force(self) -> Any:
        """The values that hold in this process, as an instance of `kind`."""
        names = self.kind.__dataclass_fields__  # type: ignore[attr-defined]
        return self.kind(**{name: getattr(self.module, name.upper()) for name in names})

    def not_in_force(self, values: Mapping[str, object], *, where: str) -> list[str]:
        """The names in `values` whose value does not hold in this process.

        Raises `UsageError` for an unknown name and for a value that cannot be.
        """
        read_settings(self.kind, values, where=where)
        return [n for n, value in values.items() if getattr(self.module, n.upper()) != value]

    def check(self, values: Mapping[str, object], *, where: str) -> None:
        """Raise `UsageError` for a value that cannot be, and for one that does not hold here."""
        for name in self.not_in_force(values, where=where):
            raise UsageError(where, name, f"has no effect: set {CONFIG} before importing kvstore")
