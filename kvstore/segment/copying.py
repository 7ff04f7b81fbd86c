"""Copies between buffers of this host; large ones without the GIL, so that other threads run."""

from __future__ import annotations

import ctypes

from kvstore.system.memory_files import PYBUF_SIMPLE, PyBuffer, get_buffer, release_buffer

GIL_FREE_BYTES = 1 << 20
"""From this size a copy takes long enough (about 0.1 ms) to let other threads run."""


def copy(destination: memoryview, source: memoryview) -> None:
    """Copy `source` over `destination`, both of format 'B' and contiguous.

    Raises `ValueError` unless they are equally long.
    """
    size_bytes = source.nbytes
    if size_bytes < GIL_FREE_BYTES:
        destination[:] = source
        return
    if destination.nbytes != size_bytes or destination.readonly:
        raise ValueError(f"cannot copy {size_bytes} bytes into {destination.nbytes}")
    to, from_ = PyBuffer(), PyBuffer()
    get_buffer(destination, ctypes.byref(to), PYBUF_SIMPLE)
    try:
        get_buffer(source, ctypes.byref(from_), PYBUF_SIMPLE)
        try:
            ctypes.memmove(to.buf, from_.buf, size_bytes)
        finally:
            release_buffer(ctypes.byref(from_))
    finally:
        release_buffer(ctypes.byref(to))
