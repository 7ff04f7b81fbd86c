"""Threads that a test starts together and waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread

PATIENCE_S = 60.0


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Make these calls at once, on a thread each, and wait for all."""
    threads = [Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
