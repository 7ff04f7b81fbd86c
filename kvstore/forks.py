"""What a forked child must not share with its parent: connections, threads, locks.

Two processes that read from one socket get each other's answers; a thread does not
come along, and a lock that it held stays held.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forgetful(Protocol):
    def after_fork_in_child(self) -> None:
        """Forget what is the parent's, without a word to anyone. No other thread runs."""
        ...


_all: weakref.WeakSet[Forgetful] = weakref.WeakSet()


def in_each_child(owner: Forgetful) -> None:
    """Call its `after_fork_in_child` there, for as long as it lives."""
    _all.add(owner)


def _after_fork_in_child() -> None:
    for owner in list(_all):
        owner.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
