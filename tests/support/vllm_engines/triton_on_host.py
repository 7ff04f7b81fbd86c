"""Runs a Triton kernel's own text on the host, one program after another.

Where vLLM finds no Triton driver its kernels are plain functions. `HostKernel` calls one of them
with a `tl` whose pointers are tensors and offsets: as much of the language as the kernels need that
say where a token's KV goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch


class Pointer:
    """Points at elements of a tensor that lies in one piece."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        assert tensor.is_contiguous()
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    flat, at = pointer.tensor.view(-1), torch.as_tensor(pointer.offset)
    if mask is None:
        return flat[at]
    mask = torch.as_tensor(mask).expand(at.shape)
    out = torch.full(at.shape, other, dtype=flat.dtype)
    out[mask] = flat[at[mask]]
    return out


def _store(pointer: Pointer, value: Any, mask: Any) -> None:
    at = torch.as_tensor(pointer.offset)
    mask = torch.as_tensor(mask).expand(at.shape)
    flat = pointer.tensor.view(-1)
    flat[at[mask]] = torch.as_tensor(value, dtype=flat.dtype).expand(at.shape)[mask]


class HostKernel:
    """`kernel[grid](...)` as Triton has it; tensors among the arguments become pointers."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function: Any = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            args = tuple(Pointer(a) if isinstance(a, torch.Tensor) else a for a in args)
            for place in itertools.product(*(range(size) for size in grid)):
                self._at(place, grid)(*args, **kwargs)

        return run

    def _at(self, place: tuple[int, ...], grid: tuple[int, ...]) -> Callable[..., None]:
        language = SimpleNamespace(
            program_id=lambda axis: place[axis],
            num_programs=lambda axis: grid[axis],
            arange=torch.arange,
            load=_load,
            store=_store,
            where=lambda which, one, other: torch.where(torch.as_tensor(which), one, other),
            int32=torch.int32,
            int64=torch.int64,
        )
        # Addresses in memory lead to the tensors that `TENSORS` has of them.
        names = {
            **self._function.__globals__,
            "tl": language,
            "_load_ptr": lambda pointer, _: Pointer(TENSORS[int(_load(pointer))]),
        }
        code = self._function.__code__
        return FunctionType(code, names, None, self._function.__defaults__)


TENSORS: dict[int, torch.Tensor] = {}
"""By address: what kernels find behind a pointer that they load."""
