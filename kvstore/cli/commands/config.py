"""`kvstore config` prints the settings in force on this host as TOML, and where each comes from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from kvstore.cli.node_table import VARIABLES, node_table
from kvstore.cli.options import no_password, use_config
from kvstore.config_file import ConfigFile, SecurityFiles, read_config
from kvstore.index.redis.url import redacted
from kvstore.settings.reader import allowed_in
from kvstore.settings.toml_file import CONFIG

FOR_ENGINES = ("connector", "transfer")
"""Tables that an engine reads and checks when it starts."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"read this file (default: {CONFIG})"
    )


def run(args: argparse.Namespace) -> int:
    if args.config is not None:
        use_config(args.config)
    file = read_config()
    source = "--config" if args.config else CONFIG
    print(f"# {file.path} ({source})" if file.path else f"# no file: {CONFIG} is not set")
    for line in _lines(file):
        print(line)
    return 0


def _lines(file: ConfigFile) -> Iterator[str]:
    yield "\n[limits]"
    yield from _table(file, "limits", file.limits(), {})
    yield "\n[security]"
    yield from _table(file, "security", file.security(), _security_variables())
    yield "\n[node]"
    yield from _table(file, "node", node_table(file), VARIABLES)
    for name in FOR_ENGINES:
        table = file.table(name)
        if table:
            yield f"\n[{name}]  # engines check it when they start"
            yield from (f"{key} = {_toml(value)}" for key, value in table.items())


def _table(file: ConfigFile, name: str, values: object, variables: dict[str, str]) -> Iterator[str]:
    for field in allowed_in(type(values)):
        value = getattr(values, field)
        variable = variables.get(field)
        if variable and os.environ.get(variable):
            said = variable
            if isinstance(values, SecurityFiles):
                value = None
        else:
            said = "file" if field in file.table(name) else "default"
        if field == "url" and value:
            value = no_password(value)
        shown = f"# {field}: {said}" if value is None else f"{field} = {_toml(value)}  # {said}"
        yield shown


def _security_variables() -> dict[str, str]:
    """Return, for each name of `[security]`, the variable that wins over it."""
    found = {}
    for field in allowed_in(SecurityFiles):
        variable = f"KVSTORE_{field.upper()}"
        plain = variable.removesuffix("_FILE")
        found[field] = plain if os.environ.get(plain) else variable
    return found


def _toml(value: object) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {_toml(one)}" for key, one in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str) and "://" in value:
        value = redacted(value)  # what engines read may name a Redis too
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))
