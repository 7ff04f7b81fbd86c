"""Handlers of signals that raise, and signals that arrive in a given call."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest  # noqa: TC002  # as in every test


class SignalledError(Exception):
    pass


ERRORS = [SignalledError, TimeoutError, ConnectionResetError, ValueError]


@contextmanager
def handling(handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def raising(error: type[BaseException]) -> Callable[..., object]:
    def handler(*_: object) -> None:
        deeper()

    def deeper() -> None:
        raise error("by the handler")

    return handler


def signals_in(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Have the signal arrive in that call, once."""
    real = getattr(owner, name)

    def signalled(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(owner, name, real)
        signal.raise_signal(signal.SIGUSR1)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, signalled)
