"""This process's sign of life at a node: a file whose lock ends with the process (rule 5)."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from kvstore.errors import NodeUnavailableError
from kvstore.nodedir import try_lock


def lease_at(leases: Path) -> Lease | None:
    """A lease, None for a user who may only read there: who cannot write needs none.

    Raises `NodeUnavailableError`.
    """
    try:
        return Lease(leases)
    except NodeUnavailableError as e:
        if isinstance(e.__cause__, PermissionError):
            return None
        raise


class Lease:
    """Held from construction to `release`. A forked child keeps it: it has the mapping too."""

    def __init__(self, leases: Path) -> None:
        self.client_id = secrets.token_hex(16)
        self._path = leases / self.client_id
        try:
            fd = try_lock(self._path)
        except OSError as e:
            raise NodeUnavailableError(f"no lease at {leases}: {e.strerror}") from e
        assert fd is not None, "a fresh random name cannot be locked by another"
        self._fd: int | None = fd

    def release(self) -> None:
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._fd)
        self._fd = None
