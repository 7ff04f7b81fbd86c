"""Runs an engine's tasks on threads, and keeps the results until they are asked for."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from connector.limits import RESULTS_MAX, SHUTDOWN_TIMEOUT_S, TASKS_MAX

log = logging.getLogger(f"kvstore.{__name__}")

R = TypeVar("R")
IDLE_EVERY_S = 1.0
"""Seconds between two times that an idle thread cleans up."""


class Results(Generic[R]):
    """Keeps results by task number, and gives each out once. Thread-safe and bounded."""

    def __init__(self, signal: Callable[[], None]) -> None:
        self._signal = signal
        self._lock = threading.Lock()
        self._results: dict[int, R] = {}

    def put(self, task_id: int, result: R) -> None:
        """Keep a result, then signal; the oldest that nobody asked for makes room."""
        with self._lock:
            if len(self._results) >= RESULTS_MAX:
                self._results.pop(next(iter(self._results)))
            self._results[task_id] = result
        self._signal()

    def pop(self, task_id: int) -> R | None:
        with self._lock:
            return self._results.pop(task_id, None)

    def pop_all(self) -> dict[int, R]:
        with self._lock:
            results, self._results = self._results, {}
        return results


class TaskThreads:
    """Runs tasks on one thread, in their order, or begins them in their order on several. Every
    task ends: done, failed, or refused at once. Thread-safe.

    Not `WorkThread`, which may leave out what it was given: here an engine waits for the end of
    each task, so what waits fails by name at the end, and what gives back has no limit."""

    def __init__(self, name: str, clean_up: Callable[[], None], threads: int = 1) -> None:
        """Start without threads. `clean_up` runs now and then between tasks of one of the
        threads."""
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._tasks: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._closing = False
        self._numbers = 0
        self._threads = [
            threading.Thread(
                target=self._loop,
                args=(clean_up if i == 0 else _nothing,),
                name=f"{name}-{i}" if i else name,
                daemon=True,
            )
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads) and not self._closing

    def number(self) -> int:
        """Return a number for one more task."""
        with self._lock:
            self._numbers += 1
            return self._numbers

    def submit(
        self, task: Callable[[], None], failed: Callable[[], None], *, urgent: bool = False
    ) -> None:
        """Run `task` on a thread, or `failed` when it raises or cannot be run.

        `urgent` tasks, which give something back, have no limit of their own:
        there are no more of them than of the tasks that took it.
        """
        with self._lock:
            accepted = not self._closing and (urgent or len(self._tasks) < TASKS_MAX)
            if accepted:
                self._tasks.append((task, failed))
                self._wake.notify()
        if not accepted:
            failed()

    def close(self) -> bool:
        """End after the tasks that run now; what waits fails. False: they did not end in time."""
        with self._lock:
            self._closing = True
            waiting, self._tasks = list(self._tasks), deque()
            self._wake.notify_all()
        for _, failed in waiting:
            failed()
        give_up_at = time.monotonic() + SHUTDOWN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _loop(self, clean_up: Callable[[], None]) -> None:
        clean_up_at = time.monotonic() + IDLE_EVERY_S
        while True:
            with self._lock:
                if not self._tasks and not self._closing:
                    self._wake.wait(max(0.0, clean_up_at - time.monotonic()))
                if self._closing:
                    return
                task, failed = self._tasks.popleft() if self._tasks else (None, None)
            if task is not None and failed is not None:
                self._run(task, failed)
            if time.monotonic() >= clean_up_at:
                self._run(clean_up, _nothing)
                clean_up_at = time.monotonic() + IDLE_EVERY_S

    @staticmethod
    def _run(task: Callable[[], None], failed: Callable[[], None]) -> None:
        try:
            task()
        except Exception:
            log.exception("a task failed; the engine is told that nothing was found or saved")
            failed()


def _nothing() -> None:
    return None
