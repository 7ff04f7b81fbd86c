"""Copies between buffers of this host; large ones without the GIL, so that other threads run."""

from __future__ import annotations

import ctypes

GIL_FREE_BYTES = 1 << 20
"""From this size a copy takes long enough (about 0.1 ms) to let other threads run."""


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of the stable C API: the only way to a read-only buffer's address."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None
_PYBUF_SIMPLE = 0


def address_of(view: memoryview) -> int:
    """The address at which a contiguous view begins; good for as long as the view is."""
    buffer = _PyBuffer()
    _get_buffer(view, ctypes.byref(buffer), _PYBUF_SIMPLE)
    try:
        return int(buffer.buf or 0)
    finally:
        _release_buffer(ctypes.byref(buffer))


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
    to, from_ = _PyBuffer(), _PyBuffer()
    _get_buffer(destination, ctypes.byref(to), _PYBUF_SIMPLE)
    try:
        _get_buffer(source, ctypes.byref(from_), _PYBUF_SIMPLE)
        try:
            ctypes.memmove(to.buf, from_.buf, size_bytes)
        finally:
            _release_buffer(ctypes.byref(from_))
    finally:
        _release_buffer(ctypes.byref(to))
