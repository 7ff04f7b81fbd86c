"""Gets a password that changes, from a file or from a function, when a connection is opened."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import RLock, Thread
from time import monotonic

from kvstore.errors import IndexUnavailableError, UsageError
from kvstore.secret import read_secret
from kvstore.system.fork import in_each_child
from kvstore.system.renewed import Renewed
from kvstore.system.threads import NO_THREAD

Password = str | Callable[[float], str]
"""A fixed password, or a function that gives it until a deadline (`monotonic`)."""
KEPT_S = 5.0
"""Seconds for which an answer of the function is used for all connections."""


def password_in(path: str) -> Password:
    """Return what the file has when it is asked for. Raises `UsageError` for one that is unusable
    now."""

    def read() -> str:
        password = read_secret("password_file", Path(path)).decode(errors="surrogateescape").strip()
        if not password:
            raise UsageError("password_file", path, "must not be empty")
        return password

    renewed = Renewed([Path(path)], read)
    return lambda deadline: renewed.get()


class AskedPassword:
    """Asks a function of the user's, in a thread: it may ask a service, and no call of ours waits
    for that beyond its own deadline."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self._ask = ask
        self.after_fork_in_child()
        in_each_child(self)

    def after_fork_in_child(self) -> None:
        self._lock = RLock()
        self._answer, self._ask_at = Future[str](), float("-inf")
        self._answer.cancel()

    def __call__(self, deadline: float) -> str:
        with self._lock:
            answer = self._answer
            if answer.done() and monotonic() >= self._ask_at:
                answer = Future[str]()
                find = Thread(
                    target=self._find, args=(answer,), name="kvstore-password", daemon=True
                )
                try:
                    find.start()
                except RuntimeError as e:
                    raise IndexUnavailableError(NO_THREAD) from e
                self._answer, self._ask_at = answer, monotonic() + KEPT_S
        return answer.result(max(deadline - monotonic(), 0.0))

    def _find(self, answer: Future[str]) -> None:
        try:
            password = self._ask()
            if not isinstance(password, str) or not password:
                raise TypeError("it returned no text")
            answer.set_result(password)
        except Exception as e:  # whatever it is; its text may quote a token
            why = f"the function that gives Redis' password failed: {type(e).__name__}"
            answer.set_exception(IndexUnavailableError(why))
