"""Prints aligned tables and sizes for people, JSON for programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence

COLUMNS_MIN = 80
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def human_bytes(count: float) -> str:
    """Return a size in three digits or so: `512 B`, `1.5 GiB`."""
    size = float(count)
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    text = f"{size:.0f}" if size == int(size) or size >= 100 else f"{size:.1f}"
    return f"{text} {_UNITS[unit]}"


def human_count(count: float) -> str:
    """Return a count as it is up to a million, then three digits or so: `12.3M`, `1.5G`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:g}"


def screen_columns() -> int:
    """Return how wide lines may be: the terminal's width, COLUMNS where that is set, at least
    80."""
    return max(shutil.get_terminal_size((COLUMNS_MIN, 24)).columns, COLUMNS_MIN)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    left: int = 1,
    elastic: Sequence[int] = (0,),
    columns: int | None = None,
) -> str:
    """Return text of columns as wide as their widest cell, the first `left` aligned left, the rest
    right.

    What others chose, such as names, cannot move the cursor.

    When that is wider than `columns` (None: the screen), the widest of the `elastic` ones are cut
    until it fits, down to their heads.
    """
    lines = [list(head), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    room = (screen_columns() if columns is None else columns) - 2 * (len(head) - 1)
    while sum(widths) > room:
        widest = max(elastic, key=lambda i: widths[i] - len(head[i]))
        if widths[widest] <= len(head[widest]):
            break
        widths[widest] -= 1
    return "\n".join(
        "  ".join(
            _cut(cell, width).ljust(width) if i < left else _cut(cell, width).rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1] + "…"


def human_age(seconds: float | None) -> str:
    """Return an age in one number and its unit: `12s`, `3m`, `5h`, `9d`; `-` when it is not
    known."""
    if seconds is None:
        return "-"
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length_s:
            return f"{int(seconds // length_s)}{unit}"
    return f"{int(seconds)}s"


def printable(text: str) -> str:
    """`text` for a terminal: what somebody else chose must not move its cursor or colour it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def as_json(value: object) -> str:
    return json.dumps(value, indent=2)
