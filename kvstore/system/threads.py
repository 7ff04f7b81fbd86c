"""Runs calls on daemon threads, also once the interpreter begins to end.

Then (in functions of `atexit`, in a thread that outlives the main one) executors of
`concurrent.futures` and of asyncio take no call any more, and from Python 3.12 on no thread starts.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvstore.errors import PeerError
from kvstore.system.fork import in_each_child

NO_THREAD = (
    "this host gives no thread to run the call on: raise the limit of processes (`ulimit -u`, "
    "a container's pids limit)"
)
R = TypeVar("R")


def interpreter_ends(error: RuntimeError) -> bool:
    """Return whether a thread was not started because the interpreter ends, and not because the
    host has none to give: `Thread.start` raises `RuntimeError` for both."""
    return "shutdown" in str(error) or not threading.main_thread().is_alive()


class DaemonThreads:
    """Runs calls in their order on at most `threads_max` threads, each started when no other is
    free. They end after `close`, or when nobody has this any more. Thread-safe."""

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads_max, self._name = threads_max, name
        self.after_fork_in_child()
        in_each_child(self)

    def after_fork_in_child(self) -> None:
        """Begin anew: threads do not come along."""
        self._lock = threading.RLock()
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._started = 0
        self._closed = False
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, call: Callable[[], R]) -> Future[R]:
        """Run `call` on a thread; in the caller's, before this returns, where there is none because
        the interpreter ends. Raises `PeerError` after `close` and where the host gives not even the
        first thread; `call` never runs then."""
        future: Future[R] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as e:
                    future.set_exception(e)

        with self._lock:
            if self._closed:
                raise PeerError(f"{self._name}: no call is taken after the close")
            if self._free.empty() and self._started < self._threads_max:
                self._start_one()
            elif not self._free.empty():
                self._free.get()
            if self._started:
                self._calls.put(run)
                return future
        run()
        return future

    def _start_one(self) -> None:
        """Raises `PeerError` where there is no thread, and will be when the host has some again."""
        queues = self._calls, self._free
        try:
            threading.Thread(target=_work, args=queues, name=self._name, daemon=True).start()
            self._started += 1
        except RuntimeError as e:
            if not self._started and not interpreter_ends(e):
                raise PeerError(NO_THREAD) from e

    def close(self) -> None:
        """Take no more calls; those that were taken are done."""
        self._closed = True
        self._calls.put(None)


def _work(
    calls: queue.SimpleQueue[Callable[[], None] | None], free: queue.SimpleQueue[None]
) -> None:
    """Run until the end is in the queue, which is left there for the other threads."""
    while (run := calls.get()) is not None:
        run()
        del run
        free.put(None)
    calls.put(None)
