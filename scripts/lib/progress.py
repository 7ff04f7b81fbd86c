"""Shows how far a script is: bars in a terminal, lines where its output goes elsewhere."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY_S = 10.0
"""Between two lines of a task at least, but for its first and last."""


class Steps(Protocol):
    """Takes what tasks tell of themselves; safe to call from several threads."""

    def __enter__(self) -> Steps: ...

    def __exit__(self, *exc: object) -> None: ...

    def add(self, title: str, total: int) -> int:
        """Add a task of `total` steps; return its number."""

    def advance(self, task: int) -> None:
        """Note that one step of it is done."""


class Bars:
    """Shows progress to people at a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:38}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def add(self, title: str, total: int) -> int:
        return self._progress.add_task(title, total=total)

    def advance(self, task: int) -> None:
        self._progress.advance(self._progress.task_ids[task])


class Lines:
    """Shows progress in pipes, files and CI: a line when a task begins and ends, and now and then
    between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._started_at = time.monotonic()
        self._tasks: list[tuple[str, int]] = []
        self._done: list[int] = []
        self._said_at: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """End the display: nothing is left to say."""

    def add(self, title: str, total: int) -> int:
        with self._lock:
            self._tasks.append((title, total))
            self._done.append(0)
            self._said_at.append(0.0)
            self._say(len(self._tasks) - 1)
            return len(self._tasks) - 1

    def advance(self, task: int) -> None:
        with self._lock:
            self._done[task] += 1
            last = self._done[task] == self._tasks[task][1]
            if last or time.monotonic() - self._said_at[task] >= LINE_EVERY_S:
                self._say(task)

    def _say(self, task: int) -> None:
        now = time.monotonic()
        self._said_at[task] = now
        title, total = self._tasks[task]
        line = f"{now - self._started_at:4.0f} s  {title}: {self._done[task]} of {total}"
        self._console.print(line, highlight=False, soft_wrap=True)


def steps(console: Console) -> Steps:
    """Return whichever display fits where the console's output goes."""
    return Bars(console) if console.is_terminal else Lines(console)
