"""Tells what a handler of signals raised from what a peer or our code did.

Python runs handlers between any two instructions of the main thread, so what one raises comes out
of whatever call is under way there: a `TimeoutError` of somebody's alarm looks as if Redis had
been late. It is its user's, and must not end as a miss.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from types import CodeType, TracebackType


def interruption(error: BaseException) -> BaseException | None:
    """Return what a handler of signals raised, when `error` is that or was made of it; else None.

    None in an event loop too: it would end a callback or a task of the loop, not the call that
    the signal was meant for.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    if asyncio._get_running_loop() is not None:
        return None
    handlers = _handlers()
    cause: BaseException | None = error
    while handlers and cause is not None:
        if _passed(cause.__traceback__, handlers):
            return cause
        cause = cause.__cause__
    return None


def let_through(error: BaseException) -> None:
    """Raises what a handler of signals raised, if `error` is that or was made of it: for whoever
    catches what a peer or the machine raises."""
    raised = interruption(error)
    if raised is not None:
        raise raised from raised.__cause__


class Suppressed:
    """As `contextlib.suppress`, but what a handler of signals raised goes through."""

    def __init__(self, *errors: type[Exception]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return isinstance(error, self._errors) and interruption(error) is None


def _handlers() -> set[CodeType]:
    """The code of those that are written in Python."""
    found: set[CodeType] = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if not callable(handler):
            continue
        for part in (handler, getattr(handler, "func", None), getattr(handler, "__call__", None)):  # noqa: B004
            code = getattr(part, "__code__", None)
            if isinstance(code, CodeType):
                found.add(code)
    return found


def _passed(trace: TracebackType | None, codes: set[CodeType]) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
