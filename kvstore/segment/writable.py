"""Maps a segment writable for this process alone: a child that it forks may only read it.

The child does not keep its parent's sign of life (filelock.py), so once the parent is dead the
slots go to others, and nobody may write to them any more (rule 5): a child that tries is
ended by the kernel (SIGSEGV). Reading stays, for views and headers that it has.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from kvstore.fork import in_each_child, no_forks
from kvstore.segment.copying import address_of

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class WritableMap(mmap.mmap):
    """A file mapped for reading and writing, shared with all who have it mapped."""

    def __new__(cls, fd: int, size_bytes: int) -> WritableMap:
        with no_forks:  # a child would have it and not know of it
            self = super().__new__(cls, fd, size_bytes)
            in_each_child(self)
        return self

    def after_fork_in_child(self) -> None:
        """No slot of the parent's can be written from here on."""
        if self.closed:
            return
        with memoryview(self) as whole:
            if _mprotect(address_of(whole), len(whole), mmap.PROT_READ) == 0:
                return
        os.abort()  # less would leave a writer whom nobody knows of
