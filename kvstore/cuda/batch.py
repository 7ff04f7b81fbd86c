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

VARIABLE = "KVSTORE_CUDA_BATCH"
"""With `no` in it every copy is a call of its own: for a driver whose call for many hangs."""
SINCE = 12080
"""CUDA 12.8, as the driver numbers versions."""
IN_STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream has come so far."""


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
        self.attributes = _Attributes(IN_STREAM_ORDER)

    def __call__(self, copies: Sequence[Copy], stream: int) -> int:
        """Queue at most `CUDA_BATCH_COPIES_MAX` copies, to be carried out in any order; the
        driver's answer.

        After another answer than 0 some of them may have been queued.
        """
        count = len(copies)
        to, source, sizes = (
            (ctypes.c_uint64 * count)(*column) for column in zip(*copies, strict=True)
        )
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        arrays = (to, source, sizes, count, ctypes.byref(self.attributes), ctypes.byref(first), 1)
        return int(self._call(*arrays, ctypes.byref(failed), stream))


def batch_copies(driver: Driver, device: Handle = 0) -> BatchCopies | None:
    """The function of this driver (`cuda.bindings.driver`).

    None when the driver is older than `SINCE`, when KVSTORE_CUDA_BATCH says no, and when
    `device` cannot use addresses of page-locked memory as they are (WSL2, virtual GPUs): there the
    call faults, and every later one of the process.
    """
    attribute = driver.CUdevice_attribute
    attribute = attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    error, usable = driver.cuDeviceGetAttribute(attribute, device)
    if os.environ.get(VARIABLE) == "no" or int(error) or not usable:
        return None
    try:
        error, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", SINCE, 0)
    except RuntimeError:  # what cuda-python says of a driver without the asking
        return None
    return BatchCopies(int(address)) if int(error) == 0 and int(address or 0) else None
