"""Checks what may go into the caller's memory for a value, and what a get then answers.

A buffer of plain bytes takes any value that fits. An array or a tensor of anything else takes
what has its dtype and shape: other bytes in it would be wrong numbers.
"""

from __future__ import annotations

import sys
from types import ModuleType

from kvstore.client.payloads.dtypes import (
    Described,
    described,
    descriptions,
    of_format,
    of_numpy,
    of_torch,
)
from kvstore.client.payloads.tensors import tensor_bytes
from kvstore.errors import UsageError
from kvstore.types import Kind, Value

_BYTE_FORMATS = ("B", "b", "c")


class Out:
    """One `out` of a caller. Raises `UsageError` when it cannot be written."""

    __slots__ = ("_array", "_is", "_out", "room")

    room: memoryview
    """All its bytes, writable, format 'B'."""

    def __init__(self, out: Value) -> None:
        self._out = out
        self._is: Described | None = None
        """Its dtype and shape; None for plain bytes."""
        if type(out) is memoryview and _is_plain(out):
            self._array = False
            self.room = _writable(out)
            return
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        self._array = True
        if torch is not None and isinstance(out, torch.Tensor):
            self.room = tensor_bytes("out", out, own=True)
            if out.dtype != torch.uint8 or out.dim() != 1:
                self._is = Described(of_torch(out.dtype), tuple(out.shape))
        elif numpy is not None and isinstance(out, numpy.ndarray):
            self.room = _array_bytes(numpy, out)
            if out.dtype != numpy.uint8 or out.ndim != 1:
                self._is = Described(of_numpy(out.dtype), out.shape)
        else:
            self._array = False
            self.room = self._buffer_bytes(out)

    def _buffer_bytes(self, out: Value) -> memoryview:
        try:
            view = memoryview(out)
        except (TypeError, ValueError) as e:
            raise UsageError("out", type(out).__name__, "must be a writable buffer") from e
        _writable(view, type(out).__name__)
        if view.ndim != 1 or view.format.lstrip("@=<>!") not in _BYTE_FORMATS:
            self._is = Described(of_format(view.format, view.itemsize), tuple(view.shape or ()))
        return view.cast("B") if view.nbytes else memoryview(bytearray())

    @property
    def target(self) -> memoryview | tuple[memoryview | bytes, ...]:
        """This as what `BatchReader.read` writes to."""
        return self.room if self._is is None else (self.room, *descriptions(self._is))

    @property
    def plain(self) -> bool:
        """Return whether it takes any bytes that fit, whatever dtype and shape the value has."""
        return self._is is None

    def check(self, kind: int, meta: bytes, size_bytes: int) -> None:
        """Whether a value of `size_bytes`, as `kind` and `meta` describe it, may go there.

        Raises `UsageError` when not, `ValueError` when there is no telling: `meta` is damaged.
        """
        if self._is is None:
            self.check_room(size_bytes)
            return
        value = described(meta) if meta and kind != Kind.BYTES else None
        if value is None:
            if self.room.nbytes != size_bytes:
                raise UsageError(
                    "out", str(self._is), f"must have the value's {size_bytes} bytes, no dtype"
                )
        elif value != self._is:
            raise UsageError(
                "out",
                str(self._is),
                f"the value is {value}: give such an array or tensor, or a plain byte buffer",
            )
        elif self.room.nbytes != size_bytes:
            raise ValueError(f"{value} is not {size_bytes} bytes")

    def check_room(self, size_bytes: int) -> None:
        """Raise `UsageError` when a value of `size_bytes` does not fit."""
        if self.room.nbytes < size_bytes:
            raise UsageError(
                "out", f"{self.room.nbytes} bytes", f"must have at least {size_bytes} bytes"
            )

    def answer(self, size_bytes: int) -> Value:
        """Return what a get gives back when it wrote `size_bytes`: the array or tensor, or the part
        of it that was written; of a buffer always a view."""
        if not self._array:
            return self.room[:size_bytes]
        return self._out if self._is is not None else self._out[:size_bytes]


def _is_plain(view: memoryview) -> bool:
    try:
        return view.format == "B" and view.ndim == 1 and view.nbytes > 0
    except ValueError as e:
        raise UsageError("out", "memoryview", "must not be released") from e


def _writable(view: memoryview, given: str = "memoryview") -> memoryview:
    if view.readonly or not view.c_contiguous:
        raise UsageError("out", given, "must be writable and contiguous")
    return view


def _array_bytes(numpy: ModuleType, array: Value) -> memoryview:
    if isinstance(array, numpy.ma.MaskedArray):
        raise UsageError("out", "a masked array", "give its `data`: a mask is not kept")
    if not array.flags.writeable or not array.flags.c_contiguous or array.dtype.hasobject:
        must = "must be writable, contiguous and of plain numbers"
        raise UsageError("out", f"{array.dtype} array", must)
    if not array.nbytes:
        return memoryview(bytearray())
    # Not memoryview(array): bfloat16 and dates have no letter in the buffer protocol.
    return memoryview(array.reshape(-1).view(numpy.uint8))
