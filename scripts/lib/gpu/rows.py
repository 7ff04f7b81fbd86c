"""Prints what a probe or an engine has shown, at once, one JSON object a line.

A run that is cut off still tells what it has seen. `benchmarks.gpu_judge` judges rows with a bound.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Say = Callable[..., None]
"""See `Rows.say`."""


class Rows:
    """Writes the rows of one stage to standard output, and to the end of a file."""

    def __init__(self, stage: str, path: Path | None = None) -> None:
        self._stage = stage
        self._path = path

    def say(
        self,
        name: str,
        value: Any,
        unit: str = "",
        *,
        least: float | None = None,
        most: float | None = None,
        **more: Any,
    ) -> None:
        """Write a row; `least` and `most` are what the value must be, and `more` explains it."""
        row = {"stage": self._stage, "name": name, "value": value}
        given = {"unit": unit or None, "least": least, "most": most, **more}
        row |= {key: one for key, one in given.items() if one is not None}
        line = json.dumps(row, default=str)
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{line}\n")
