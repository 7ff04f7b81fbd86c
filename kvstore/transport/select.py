"""Chooses the transport that reads from a node."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from kvstore.errors import UsageError
from kvstore.transport.cuda_memory import NAME as CUDA_IPC
from kvstore.transport.nixl.transport import NAME as NIXL
from kvstore.transport.stream.transport import NAME as STREAM

SHM = "shm"
"""Segments of this host, which a reader maps and reads in place: not a `Transport`."""
TRANSPORTS = (SHM, CUDA_IPC, NIXL, STREAM)
"""All there are, the nearest first."""
VARIABLE = "KVSTORE_TRANSPORTS"


def allowed(names: Sequence[str] | None) -> tuple[str, ...]:
    """`names` in the order of `TRANSPORTS`; without them, those in KVSTORE_TRANSPORTS (separated by
    commas), else all.

    Raises `UsageError` for a name that is no transport's, and when there is no name.
    """
    if names is None:
        text = os.environ.get(VARIABLE, "")
        names = [name.strip() for name in text.split(",")] if text else TRANSPORTS
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown or not names or isinstance(names, str):
        raise UsageError("transports", names, f"must be some of {', '.join(TRANSPORTS)}")
    return tuple(name for name in TRANSPORTS if name in names)


def choose(allowed: Sequence[str], offered: Collection[str], *, mapped: bool) -> str | None:
    """The nearest of the `allowed` transports to a node that announces `offered` and whose
    memory is `mapped` here or not; None when it is out of reach."""
    for name in allowed:
        if mapped if name == SHM else name in offered:
            return name
    return None
