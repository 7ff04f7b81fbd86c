"""Runs in each forked child what it must not share with its parent: connections, threads, locks.

Two processes that read from one socket get each other's answers; a thread does not
come along, and a lock that it held stays held. What says that the parent lives must end
with the parent (filelock.py), so the child must not be able to write what the parent
may (memory_files.py, rule 5).
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol


class Forgetful(Protocol):
    def after_fork_in_child(self) -> None:
        """Forget what is the parent's, without a word to anyone. No other thread runs."""
        ...


_all: weakref.WeakSet[Forgetful] = weakref.WeakSet()

no_forks = threading.RLock()
"""While a thread has it, other threads' forks wait: for a moment, never over a call that waits."""


def in_each_child(owner: Forgetful) -> None:
    """Call `after_fork_in_child` of an object in each child, for as long as the object lives."""
    _all.add(owner)


def _after_fork_in_child() -> None:
    with contextlib.ExitStack() as each:  # one that raises keeps no other from its part
        each.callback(no_forks.release)
        for owner in list(_all):
            each.callback(owner.after_fork_in_child)


os.register_at_fork(
    before=no_forks.acquire,
    after_in_parent=no_forks.release,
    after_in_child=_after_fork_in_child,
)
