"""Restarts a node's background tasks after an error, which must never end them silently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from kvstore.node.seldom import Seldom

log = logging.getLogger("kvstore.node")

RESTART_AFTER_S = 1.0
"""Pause between the failure of a task and its next start."""

Task = Callable[[], Coroutine[None, None, None]]


class BackgroundTasks:
    """The tasks of one node's event loop, from `start` to `end`."""

    def __init__(self, node: str, counts: dict[str, int]) -> None:
        """Start with no tasks. `node` is the name for the log; `counts` counts the tasks that
        failed."""
        self._node = node
        self._counts = counts
        self._say = Seldom(log)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *tasks: Task) -> None:
        """Run each of `tasks`, and again from its beginning after it has raised. One that returns
        is done."""
        self._tasks += [asyncio.ensure_future(self._keep_going(task)) for task in tasks]

    async def _keep_going(self, task: Task) -> None:
        while True:
            try:
                await task()
                return
            except Exception as e:
                self._counts["tasks_failed"] += 1
                name = getattr(task, "__qualname__", repr(task))
                text = f"node %s: {name} failed, and starts anew"
                self._say.warning(text, self._node, exc_info=e)
            await asyncio.sleep(RESTART_AFTER_S)

    async def end(self) -> None:
        """Cancel what still runs, and wait for its end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
