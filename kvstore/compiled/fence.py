"""Keeps looks at shared memory, and changes of it, in the order in which the code makes them.

x86-64 does so by itself for all that this code stores and loads; ARM may let any two change places
that no fence stands between (docs/decisions/0086 goes through every pair). So there must be one:

- in who reads: between the first look at a header and the copy, and between that and the second
- in the node: before a header says SEALED, and before it writes payload where another block was

What passes between two processes by a message is in order anyway: the kernel's locks see to that.
`FENCE` is chosen once, at import; None where none is needed, so that it costs nothing there.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from kvstore.compiled import part

ORDERED = ("x86_64",)
"""Machines, as `platform.machine` names them, whose processors keep the order themselves."""
MODULE = "kvstore.compiled._fence"
SOURCE = Path(__file__).with_suffix(".c")


class Fence(NamedTuple):
    """How the order of memory accesses is kept in this process."""

    name: str
    """The name that `kvstore doctor` shows."""
    call: Callable[[], object] | None


def by_lock() -> None:
    """Pass a full fence on ARMv8, which keeps a release before a later acquire. The acquire of a
    lock alone would let accesses after it pass accesses before it."""
    lock = Lock()  # of this call alone: a signal's handler may come in between
    lock.acquire()
    lock.release()
    lock.acquire()


def choose(machine: str, wanted: str | None, module: str = MODULE) -> Fence:
    """Return the fence for that machine, with `wanted` in `KVSTORE_COMPILED`. Raises `ImportError`
    when that is `yes` and there is no compiled part that fits."""
    if machine in ORDERED:
        return Fence("the processor", None)
    compiled = part.load(wanted, module, SOURCE)
    if compiled is None:
        return Fence("locks, in place of the compiled part", by_lock)
    return Fence("the compiled part", compiled.fence)


CHOSEN = choose(platform.machine(), part.wanted())
FENCE = CHOSEN.call
