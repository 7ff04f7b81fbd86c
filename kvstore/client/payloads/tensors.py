"""Encodes buffers, numpy arrays and torch tensors as bytes, and decodes them. Neither numpy nor
torch is imported before a caller has given one of theirs."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from kvstore.client.payloads.dtypes import numpy_name, of_torch, read_meta
from kvstore.errors import UsageError
from kvstore.limits import META_BYTES_MAX, TENSOR_DIMS_MAX
from kvstore.types import Kind, Value

if TYPE_CHECKING:
    import numpy as np
    import torch

_NUMPY_DTYPE = re.compile(r"[<>|=][biufcmMSU]\d{1,9}(\[\w{1,8}\])?", re.ASCII)
_COMMON_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)", re.ASCII)
_ML_DTYPE = re.compile(r"[a-z][a-z0-9_]{2,30}")
_PLAIN_TYPES = frozenset((bytes, bytearray, memoryview))
_BYTES = Kind.BYTES  # looked up once: an enumeration's members are slow to find
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


def encode(value: Value) -> Payload:
    """Return a value as what is saved of it. Raises `UsageError` for what has no plain bytes."""
    if type(value) in _PLAIN_TYPES:
        data = as_bytes("value", value)
        return Payload(data, b"" if data.nbytes else EMPTY, _BYTES)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        data = tensor_bytes("value", value)
        return Payload(data, _meta(of_torch(value.dtype), value.shape), Kind.TORCH)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if isinstance(value, numpy.ma.MaskedArray):
            raise UsageError("value", "a masked array", "put its `data`: a mask is not kept")
        array = numpy.ascontiguousarray(value)
        plain = array.dtype.kind != "V" or not array.dtype.name.startswith(("void", "record"))
        if array.dtype.hasobject or not plain:
            raise UsageError("value.dtype", str(array.dtype), "must be a plain number type")
        flat = memoryview(array.reshape(-1).view(numpy.uint8)) if array.size else memoryview(b"")
        return Payload(flat, _meta(numpy_name(array.dtype), numpy.shape(value)), Kind.NUMPY)
    data = as_bytes("value", value)
    return Payload(data, b"" if data.nbytes else EMPTY, Kind.BYTES)


def encode_block(block: Value) -> Payload:
    """A KV block: described when it has a dtype, so that it is read into no other. Plain bytes
    need no room for a description. Raises `UsageError` as `encode`."""
    payload = encode(block)
    plain = payload.kind == Kind.BYTES or str(block.dtype) in ("uint8", "torch.uint8")
    return payload._replace(meta=b"" if plain else payload.meta, kind=Kind.BLOCK)


def _meta(dtype: str, shape: Sequence[int]) -> bytes:
    if len(shape) > TENSOR_DIMS_MAX:
        raise UsageError("value.shape", tuple(shape), f"at most {TENSOR_DIMS_MAX} dimensions")
    meta: bytes = msgpack.packb([dtype, list(shape)])
    if len(meta) > META_BYTES_MAX:
        raise UsageError("value.shape", tuple(shape), "is too long to keep")
    return meta


def tensor_bytes(field: str, tensor: torch.Tensor, *, own: bool = False) -> memoryview:
    """Return bytes of a tensor: in place when it is contiguous in CPU memory, or with `own`. Raises
    `UsageError` for one whose numbers are not its bytes (sparse, quantised, without memory)."""
    import torch

    plain = tensor.detach()
    shown = f"{plain.device} tensor, {plain.layout}, {plain.dtype}"
    if plain.layout is not torch.strided or plain.is_quantized or plain.is_meta or plain.is_nested:
        raise UsageError(field, shown, "must be a dense tensor of plain numbers (`to_dense()`)")
    if not own:
        # A conjugated or negated view has the bytes of what it is a view of.
        plain = plain.resolve_conj().resolve_neg().cpu().contiguous()
    elif plain.device.type != "cpu" or not plain.is_contiguous():
        raise UsageError(field, shown, "must be contiguous in CPU memory")
    elif plain.is_conj() or plain.is_neg():
        raise UsageError(field, shown, "must not be a conjugated or negated view")
    size_bytes = plain.numel() * plain.element_size()
    if size_bytes == 0:
        return memoryview(bytearray())
    try:
        address = plain.data_ptr()
    except RuntimeError:
        address = 0
    if not address:  # as a `FakeTensor` says
        raise UsageError(field, shown, "must have memory of its own")
    raw = (ctypes.c_ubyte * size_bytes).from_address(address)
    raw.owner = plain  # the view must not outlive the storage it looks at
    return memoryview(raw).cast("B")


def as_bytes(field: str, value: Value) -> memoryview:
    """Return a flat byte view of anything with the buffer protocol; copies only what is not
    contiguous."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as e:
        must = "must be a buffer, a numpy array or a torch tensor"
        raise UsageError(field, value, must, typed=True) from e
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def make(kind: int, meta: bytes, size_bytes: int) -> tuple[Value, memoryview]:
    """Return a fresh value of that kind and the memory to copy its `size_bytes` into.

    Raises `UsageError` when the library it needs is not installed, `ValueError`
    when `meta` does not describe `size_bytes` bytes.
    """
    if kind == Kind.TORCH:
        return _make_tensor(meta, size_bytes)
    if kind == Kind.NUMPY:
        return _make_array(meta, size_bytes)
    raw = bytearray(size_bytes)
    return raw, memoryview(raw)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of that name. Raises `UsageError` when the library that knows it is
    missing, `ValueError` when none does."""
    try:
        import numpy
    except ImportError as e:
        raise UsageError("value", "a numpy array", "needs numpy to be read") from e
    try:
        if _NUMPY_DTYPE.fullmatch(name) or _COMMON_DTYPE.fullmatch(name):
            return numpy.dtype(name)
        return numpy.dtype(_ml_dtype(name))
    except TypeError as e:
        raise ValueError(f"no dtype: {name!r}") from e


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of that name. Raises `UsageError` without torch, and for one it has
    not."""
    try:
        import torch
    except ImportError as e:
        raise UsageError("value", "a torch tensor", "needs torch to be read") from e
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise UsageError("value", f"{name} numbers", "torch has no such dtype")
    return dtype


def _make_array(meta: bytes, size_bytes: int) -> tuple[Value, memoryview]:
    name, shape = read_meta(meta)
    dtype = numpy_dtype(name)
    import numpy

    # Before any memory is taken. An array of objects would take its bytes for pointers.
    if dtype.hasobject or prod(shape) * dtype.itemsize != size_bytes:
        raise ValueError(f"{name} of {shape} is not {size_bytes} bytes")
    try:
        array = numpy.empty(shape, dtype)
    except (OverflowError, MemoryError) as e:  # sizes it cannot count, beside a zero
        raise ValueError(f"{name} of {shape} cannot be made") from e
    if array.nbytes != size_bytes:
        raise ValueError(f"{name} of {shape} is not {size_bytes} bytes")
    if size_bytes == 0:
        return array, memoryview(bytearray())
    return array, memoryview(array.reshape(-1).view(numpy.uint8).data)


def _ml_dtype(name: str) -> type:
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


def _make_tensor(meta: bytes, size_bytes: int) -> tuple[Value, memoryview]:
    try:
        import torch
    except ImportError as e:
        raise UsageError("value", "a torch tensor", "needs torch to be read") from e
    name, shape = read_meta(meta)
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype) or prod(shape) * dtype.itemsize != size_bytes:
        raise ValueError(f"{name} of {shape} is not {size_bytes} bytes")
    try:
        tensor = torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError, OverflowError) as e:  # quantised, or it cannot count them
        raise ValueError(f"{name} of {shape} cannot be made") from e
    return tensor, tensor_bytes("value", tensor, own=True)
