"""The tables of docs/settings.md, made from the code. Run as a program, it writes them there."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from connector.settings import ConnectorSettings
from connector.transfer.config import KVTransferConfig
from kvstore import Limits
from kvstore.cli.node_table import NodeTable
from kvstore.config_file import SecurityFiles
from kvstore.settings.reader import allowed_in, default_of

DOCUMENT = Path(__file__).parents[1] / "docs" / "settings.md"
MARK = "<!-- made from the code by tests/settings_reference.py: what is below is not edited -->"
KINDS = {
    "limits": Limits,
    "security": SecurityFiles,
    "node": NodeTable,
    "connector": ConnectorSettings,
    "transfer": KVTransferConfig,
}
OF_THIS_MACHINE = {("transfer", "kv_buffer_device"): "cuda where there is a driver, else cpu"}


def described(kind: type) -> dict[str, str]:
    """The docstring below each field of a class."""
    body: Any = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(below.value).split())
        for field, below in itertools.pairwise(body[0].body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def lines() -> Iterator[str]:
    yield MARK
    for table, kind in KINDS.items():
        yield from (
            "",
            f"## [{table}]",
            "",
            "| name | what | default | meaning |",
            "|---|---|---|---|",
        )
        yield from rows(table, kind, described(kind))


def rows(table: str, kind: type, said: dict[str, str]) -> Iterator[str]:
    for name, allowed in allowed_in(kind).items():
        default = OF_THIS_MACHINE.get((table, name)) or shown(default_of(kind, name))
        meaning = said[name].replace("|", "\\|")
        yield f"| `{name}` | {allowed} | {default} | {meaning} |"


def shown(value: object) -> str:
    if value is None or value == "" or isinstance(value, Limits):
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = list(value)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def text() -> str:
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    head = DOCUMENT.read_text().partition(MARK)[0]
    DOCUMENT.write_text(head + text())
    sys.exit(0)
