"""Queues many copies by one call of the driver, `cuMemcpyBatchAsync`, which it has since CUDA 12.8.

Its signature changed with CUDA 13, and cuda-python has the one of its own major version, over lists
of objects. So the driver is asked for the function as it was in 12.8, which newer ones have too,
and is given arrays.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from kvstore.cuda.base import Copy, Driver, Handle
from kvstore.errors import UsageError

VARIABLE = "KVSTORE_CUDA_COPIES"
SINGLE, ANY_ORDER, OVERLAP, LOW_PRIORITY = "single", "any-order", "overlap", "low-priority"
"""What may stand in it, with commas between. Which is fastest, no device has shown yet.

    single        every copy is a call of its own: for a driver whose call for many hangs
    any-order     sources that nothing writes to any more, those of loads, are read at any time
    overlap       the call prefers to overlap with computing
    low-priority  our streams go behind the engine's, not before them
"""
SINCE = 12080
"""CUDA 12.8, as the driver numbers versions."""
IN_STREAM_ORDER, IN_ANY_ORDER = 1, 3
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream has come so far; _ANY: at any
time, even after the call has returned."""
PREFER_OVERLAP = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE."""


def wanted() -> frozenset[str]:
    """Return what the variable says. Raises `UsageError` for a word that is none of it."""
    value = os.environ.get(VARIABLE, "")
    chosen = frozenset(value.replace(",", " ").split())
    allowed = (SINGLE, ANY_ORDER, OVERLAP, LOW_PRIORITY)
    if not chosen <= {*allowed}:
        raise UsageError(VARIABLE, value, f"must be some of {', '.join(allowed)}")
    return chosen


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. Its hints are for managed memory, which ours is not."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    ]


class BatchCopies:
    """The function, found once. Any thread may call it, in the device's context."""

    def __init__(self, address: int) -> None:
        """`address` is the function's, of the signature of `SINCE`."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        arrays = [pointer, pointer, pointer, size, pointer, pointer, size]
        # What is called through ctypes runs without the GIL.
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, *arrays, pointer, pointer)(address)
        chosen = wanted()
        flags = PREFER_OVERLAP if OVERLAP in chosen else 0
        self._attributes = _Attributes(IN_STREAM_ORDER, flags=flags)
        complete = IN_ANY_ORDER if ANY_ORDER in chosen else IN_STREAM_ORDER
        self._of_complete = _Attributes(complete, flags=flags)

    def __call__(self, copies: Sequence[Copy], stream: int, *, complete: bool = False) -> int:
        """Queue at most `CUDA_BATCH_COPIES_MAX` copies, to be carried out in any order; the
        driver's answer. `complete` says that nothing writes to the sources any more.

        After another answer than 0 some of them may have been queued.
        """
        count = len(copies)
        to, source, sizes = (
            (ctypes.c_uint64 * count)(*column) for column in zip(*copies, strict=True)
        )
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        attributes = ctypes.byref(self._of_complete if complete else self._attributes)
        arrays = (to, source, sizes, count, attributes, ctypes.byref(first), 1)
        return int(self._call(*arrays, ctypes.byref(failed), stream))


def batch_copies(driver: Driver, device: Handle = 0) -> BatchCopies | None:
    """Return the function of this driver (`cuda.bindings.driver`).

    None when the driver is older than `SINCE`, when KVSTORE_CUDA_COPIES says single, and when
    `device` cannot use addresses of page-locked memory as they are (WSL2, virtual GPUs): there the
    call faults, and every later one of the process.
    """
    attribute = driver.CUdevice_attribute
    attribute = attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    error, usable = driver.cuDeviceGetAttribute(attribute, device)
    if SINGLE in wanted() or int(error) or not usable:
        return None
    try:
        error, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", SINCE, 0)
    except RuntimeError:  # what cuda-python says of a driver without the asking
        return None
    return BatchCopies(int(address)) if int(error) == 0 and int(address or 0) else None
