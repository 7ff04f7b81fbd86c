"""Defines what `Client.match_prefix` and `Client.pin` return."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

from kvstore.client.arguments import Uncopied
from kvstore.client.base import BlockRef
from kvstore.client.payloads.dtypes import Described, described
from kvstore.client.payloads.tensors import numpy_dtype, torch_dtype
from kvstore.client.pins import HeldPin, Memory
from kvstore.client.reader import Place
from kvstore.errors import UsageError
from kvstore.segment.attached import private_pages
from kvstore.system.memory_files import address_of
from kvstore.types import Kind


class TokenMatch(NamedTuple):
    """The longest leading run of blocks of a token sequence that is in the store."""

    tokens: int
    """Tokens covered, a multiple of block_tokens."""
    blocks: int
    found: list[BlockRef]


class NotPinned:
    """What `pin` returns for a miss: it is false, and its `with` gives None."""

    def __bool__(self) -> Literal[False]:
        return False

    def close(self) -> None:
        """Do nothing: there is nothing to let go."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


class Pinned(Uncopied):
    """A value in place, read-only: it is not evicted, nor its memory used for another.

    The pin ends with `close`, the `with` or this object, and with everything made of it:
    every `memoryview`, slice, array and tensor of its memory keeps it until that is
    dropped too, also beyond `Client.close`. It is no pin in a forked child.
    """

    def __init__(self, place: Place, pin: HeldPin) -> None:
        self._pins = pin.pins
        self._memory: Memory | None = pin.pins.hold(pin, place.buffer)
        self._attached = place.attached
        self._waits = True
        self._kind = place.kind
        self._size_bytes = len(place.data)

    def __bool__(self) -> Literal[True]:
        return True

    @property
    def buffer(self) -> memoryview:
        """The value's bytes, read-only, format 'B', no copy."""
        return self._view()

    def numpy(self) -> Any:
        """Return the value as a read-only numpy array of its dtype and shape, no copy.

        What was put as bytes is a row of uint8. Raises `UsageError` when numpy, or
        ml_dtypes for bfloat16 and its like, is missing.
        """
        view, numbers = self._view(), self._numbers()
        dtype = numpy_dtype(numbers.dtype)
        import numpy

        if not self._size_bytes:
            return numpy.ndarray(numbers.shape, dtype, buffer=view)
        # Not ndarray(buffer=view): it goes by the memory behind the view, which it takes for
        # writable, and lets its user make it so. Who then writes ends his process.
        raw = numpy.frombuffer(view, numpy.uint8)
        return raw.view(dtype).reshape(numbers.shape)

    def tensor(self) -> Any:
        """Return the value as a torch tensor in CPU memory, of its dtype and shape, no copy.

        What was put as bytes is a row of uint8. It is for reading: an inference tensor, to
        which torch lets nobody write outside `torch.inference_mode()`, and what is
        written all the same is seen in this tensor alone, never in the store; `clone()`
        it to change it. Raises `UsageError` when torch is missing or has no such dtype.
        """
        numbers = self._numbers()
        dtype = torch_dtype(numbers.dtype)
        import torch as untyped_torch

        torch: Any = untyped_torch
        with torch.inference_mode():
            if not self._size_bytes:
                return torch.empty(numbers.shape, dtype=dtype)
            raw = torch.frombuffer(self._own_pages(), dtype=torch.uint8)
            return raw.view(dtype).reshape(numbers.shape)

    def _own_pages(self) -> Any:
        """Return the value's bytes as a buffer that may be written to: torch has no read-only
        tensors, and who writes to pages that are mapped read-only ends his process."""
        view = self._view()
        attached = self._attached
        try:
            offset = address_of(view) - address_of(attached.shm.payload)
            pages = private_pages(attached.announcement.data_path, offset, view.nbytes)
        except (OSError, ValueError):
            return bytearray(view)
        if not attached.directory.lives_as(attached.announcement):
            return bytearray(view)  # that path may be of another start by now
        pages.pin = self._memory  # type: ignore[attr-defined]  # it keeps the pin as long
        return pages

    def _whole(self) -> memoryview:
        if self._memory is None:
            raise UsageError("pin", "(closed)", "take what you need of it before it is closed")
        return memoryview(self._memory).cast("B").toreadonly()

    def _view(self) -> memoryview:
        return self._whole()[: self._size_bytes]

    def _numbers(self) -> Described:
        meta = bytes(self._whole()[self._size_bytes :])
        if self._kind == Kind.BYTES or not meta:
            return Described("uint8", (self._size_bytes,))
        try:
            return described(meta)
        except ValueError as e:
            raise UsageError("pin", "(damaged)", f"has no dtype and shape: {e}") from e

    def closed_later(self) -> Self:
        """This, whose `close` waits for nobody: the node is told by another thread."""
        self._waits = False
        return self

    def close(self) -> None:
        """Let the value go, unless something else still holds its memory. Safe to call twice."""
        if not self._waits:
            self._memory = None
            return
        with self._pins.closing():
            self._memory = None
        self._pins.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
