"""Defines the errors of the store: one root, three families.

`UsageError` is the caller's fault, `PeerError` that of Redis, a node or the machine, and
`InternalError` a bug of ours. A miss is a value (`None`, a shorter run, a `PutResult`), never
one of these.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable

SHOWN_CHARS_MAX = 120
"""Characters of a value in a message."""


class _Repr(reprlib.Repr):
    """Does what `repr` does, for what a peer may have sent: megabytes, or lists in lists without
    end."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 64
        self.maxstring = self.maxother = self.maxlong = 2048

    def repr_bytes(self, raw: bytes, level: int) -> str:
        return repr(raw[: self.maxstring])


_repr = _Repr()


def shown(value: object, chars_max: int = SHOWN_CHARS_MAX) -> str:
    """Return `value` as a message shows it, in at most `chars_max` characters. It never fails and
    takes little time, whatever `value` is."""
    text = _repr.repr(value)
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


class KVStoreError(Exception):
    """The root of all errors that this project raises on purpose."""


class UsageError(KVStoreError, ValueError):
    """The caller's fault: an argument or a setting is wrong.

    The message names the field, the value and the limit; nothing was changed.
    """

    def __init__(self, field: str, value: object, must: str, *, typed: bool = False) -> None:
        """Make the message. With `typed`, which is for a value of the wrong type, it names the
        type."""
        kind = f" ({type(value).__name__})" if typed else ""
        super().__init__(f"{field}={shown(value)}{kind}: {must}")
        self.field = field

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        # It has to come back whole from another process: a pool waits for ever for what does not.
        return _told_elsewhere, (type(self), self.field, str(self))


def _told_elsewhere(kind: type[UsageError], field: str, message: str) -> UsageError:
    error = kind.__new__(kind, message)
    ValueError.__init__(error, message)
    error.field = field
    return error


NO_DESCRIPTORS = "raise the limit of open files (`ulimit -n`), or close some"


class PeerError(KVStoreError):
    """A peer's fault: Redis, a node or the machine did not do its part."""


class IndexUnavailableError(PeerError):
    """Redis refused, timed out, or its circuit breaker is open."""


class IndexDeadlineError(IndexUnavailableError):
    """The index did not answer in time."""


class IndexRefusedError(IndexUnavailableError):
    """The index answers, and this user's name, password or rights are wrong, or it is full: waiting
    does not help."""


class IndexBreakerOpenError(IndexUnavailableError):
    """The index was not asked: it failed lately and is being probed. How it failed last is its
    `__cause__`."""


class NodeUnavailableError(PeerError):
    """The memory node is gone, hung, or was never there."""


class DeadlineError(PeerError, TimeoutError):
    """A wait reached its deadline."""


class NoSpaceError(PeerError):
    """The machine has no room for what was asked at start-up (/dev/shm, memlock)."""


class DeviceError(PeerError):
    """A CUDA device, its driver or its bindings are missing, or refused."""


class InternalError(KVStoreError):
    """Our bug: an invariant does not hold. Please report it."""
