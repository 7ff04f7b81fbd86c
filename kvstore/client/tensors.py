"""Values to bytes and back: buffers, numpy arrays and torch tensors, none of them imported here
before a caller has shown up with one."""

from __future__ import annotations

import ctypes
import re
import sys
from math import prod
from typing import Any, NamedTuple

import msgpack

from kvstore.errors import UsageError
from kvstore.limits import META_BYTES_MAX, TENSOR_DIMS_MAX
from kvstore.types import Kind

_NUMPY_DTYPE = re.compile(r"[<>|=][biufcmMSU]\d{1,9}(\[\w{1,8}\])?", re.ASCII)
_ML_DTYPE = re.compile(r"[a-z][a-z0-9_]{2,30}")
EMPTY = b"\xc0"
"""Meta of an empty value: a slot cannot have zero bytes."""


class Payload(NamedTuple):
    """A value on its way into a slot: its bytes, then `meta`, which says what it was."""

    data: memoryview
    meta: bytes
    kind: Kind

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes + len(self.meta)


def encode(value: Any) -> Payload:
    """Raises `UsageError` for what has no plain bytes."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return Payload(_tensor_bytes(value), _meta(name, value.shape), Kind.TORCH)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        array = numpy.ascontiguousarray(value)
        plain = array.dtype.kind != "V" or not array.dtype.name.startswith(("void", "record"))
        if array.dtype.hasobject or not plain:
            raise UsageError("value.dtype", str(array.dtype), "must be a plain number type")
        flat = memoryview(array.reshape(-1).view(numpy.uint8)) if array.size else memoryview(b"")
        return Payload(flat, _meta(_numpy_name(array.dtype), numpy.shape(value)), Kind.NUMPY)
    data = as_bytes("value", value)
    return Payload(data, b"" if data.nbytes else EMPTY, Kind.BYTES)


def _numpy_name(dtype: Any) -> str:
    # ml_dtypes (bfloat16, fp8) all call themselves '|V1' or '<V2'; their names tell them apart.
    return str(dtype.name if dtype.kind == "V" else dtype.str)


def _meta(dtype: str, shape: Any) -> bytes:
    if len(shape) > TENSOR_DIMS_MAX:
        raise UsageError("value.shape", tuple(shape), f"at most {TENSOR_DIMS_MAX} dimensions")
    meta: bytes = msgpack.packb([dtype, list(shape)])
    if len(meta) > META_BYTES_MAX:
        raise UsageError("value.shape", tuple(shape), "is too long to keep")
    return meta


def _tensor_bytes(tensor: Any, *, own: bool = False) -> memoryview:
    """Bytes of a tensor: in place when it is contiguous in CPU memory."""
    plain = tensor.detach()
    if not own:
        plain = plain.cpu().contiguous()
    elif plain.device.type != "cpu" or not plain.is_contiguous():
        raise UsageError("out", f"{plain.device} tensor", "must be contiguous in CPU memory")
    size_bytes = plain.numel() * plain.element_size()
    if size_bytes == 0:
        return memoryview(bytearray())
    raw = (ctypes.c_ubyte * size_bytes).from_address(plain.data_ptr())
    raw.owner = plain  # the view must not outlive the storage it looks at
    return memoryview(raw).cast("B")


def as_bytes(field: str, value: Any) -> memoryview:
    """A flat byte view of anything with the buffer protocol; copies only what is not contiguous."""
    try:
        view = memoryview(value)
    except TypeError as e:
        raise UsageError(
            field, type(value).__name__, "must be a buffer, a numpy array or a torch tensor"
        ) from e
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def is_tensor(value: Any) -> bool:
    """Whether it is torch's, without importing torch."""
    return type(value).__module__.startswith("torch")


def room_of(out: Any) -> memoryview:
    """All bytes of `out`, writable. Raises `UsageError` when it cannot be written."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out, torch.Tensor):
        return _tensor_bytes(out, own=True)
    try:
        view = memoryview(out)
    except TypeError as e:
        raise UsageError("out", type(out).__name__, "must be a writable buffer") from e
    if view.readonly or not view.c_contiguous:
        raise UsageError("out", type(out).__name__, "must be writable and contiguous")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def check_room(room: memoryview, size_bytes: int) -> None:
    """Raises `UsageError` when `size_bytes` do not fit."""
    if room.nbytes < size_bytes:
        raise UsageError("out", f"{room.nbytes} bytes", f"must have at least {size_bytes} bytes")


def target_of(out: Any, size_bytes: int) -> memoryview:
    """The first `size_bytes` of `out`, writable. Raises `UsageError` when it does not fit."""
    room = room_of(out)
    check_room(room, size_bytes)
    return room[:size_bytes]


def make(kind: int, meta: bytes, size_bytes: int) -> tuple[Any, memoryview]:
    """A fresh value of that kind and the memory to copy its `size_bytes` into.

    Raises `UsageError` when the library it needs is not installed, `ValueError`
    when `meta` does not describe `size_bytes` bytes.
    """
    if kind == Kind.TORCH:
        return _make_tensor(meta, size_bytes)
    if kind == Kind.NUMPY:
        return _make_array(meta, size_bytes)
    raw = bytearray(size_bytes)
    return raw, memoryview(raw)


def _read_meta(meta: bytes) -> tuple[str, list[int]]:
    """The description, checked: it may be damaged, or somebody else's."""
    try:
        dtype, shape = msgpack.unpackb(meta)
    except (ValueError, TypeError, msgpack.UnpackException) as e:
        raise ValueError(f"no description: {meta!r}") from e
    right = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= TENSOR_DIMS_MAX
    if not right or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
        raise ValueError(f"no description: {meta!r}")
    return dtype, shape


def _make_array(meta: bytes, size_bytes: int) -> tuple[Any, memoryview]:
    try:
        import numpy
    except ImportError as e:
        raise UsageError("value", "a numpy array", "needs numpy to be read") from e
    name, shape = _read_meta(meta)
    try:
        dtype = numpy.dtype(name if _NUMPY_DTYPE.fullmatch(name) else _ml_dtype(name))
    except TypeError as e:
        raise ValueError(f"no dtype: {name!r}") from e
    # Before any memory is taken. An array of objects would take its bytes for pointers.
    if dtype.hasobject or prod(shape) * dtype.itemsize != size_bytes:
        raise ValueError(f"{name} of {shape} is not {size_bytes} bytes")
    array = numpy.empty(shape, dtype)
    if array.nbytes != size_bytes:
        raise ValueError(f"{name} of {shape} is not {size_bytes} bytes")
    if size_bytes == 0:
        return array, memoryview(bytearray())
    return array, memoryview(array.reshape(-1).view(numpy.uint8).data)


def _ml_dtype(name: str) -> Any:
    """bfloat16, the fp8 types and their like, which numpy knows from `ml_dtypes`."""
    if not _ML_DTYPE.fullmatch(name):
        raise ValueError(f"no dtype: {name!r}")
    try:
        import ml_dtypes
    except ImportError as e:
        raise UsageError("value", f"a {name} array", "needs ml_dtypes to be read") from e
    found = getattr(ml_dtypes, name, None)
    if not isinstance(found, type):
        raise ValueError(f"no dtype: {name!r}")
    return found


def _make_tensor(meta: bytes, size_bytes: int) -> tuple[Any, memoryview]:
    try:
        import torch
    except ImportError as e:
        raise UsageError("value", "a torch tensor", "needs torch to be read") from e
    name, shape = _read_meta(meta)
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype) or prod(shape) * dtype.itemsize != size_bytes:
        raise ValueError(f"{name} of {shape} is not {size_bytes} bytes")
    try:
        tensor = torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError) as e:  # quantised types, and sizes it cannot count
        raise ValueError(f"{name} of {shape} cannot be made") from e
    return tensor, _tensor_bytes(tensor, own=True)
