"""Compiles the paged-copy kernel by NVRTC, once for each kind of device, when first needed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kvstore import KVStoreError

SOURCE = Path(__file__).with_name("paged_copy.cu")
OPTIONS = (b"--std=c++17",)


class NoKernelError(KVStoreError):
    """Says that the kernel cannot be compiled or loaded here; the message says why."""


@cache
def compiled(capability: tuple[int, int]) -> bytes:
    """Return machine code for a device of that compute capability, which need not be here.

    For one that this NVRTC does not know it is PTX, which the driver translates. Raises
    `NoKernelError`.
    """
    try:
        from cuda.bindings import nvrtc

        known = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    except (ImportError, RuntimeError) as e:  # a missing library is a RuntimeError of theirs
        raise NoKernelError(f"NVRTC cannot be loaded: {e}") from e
    arch = capability[0] * 10 + capability[1]
    exact = arch in known
    target = (
        f"sm_{arch}" if exact else f"compute_{max((n for n in known if n <= arch), default=arch)}"
    )
    program = _checked(
        nvrtc, nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], [])
    )
    try:
        options = [f"--gpu-architecture={target}".encode(), *OPTIONS]
        result = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if int(result):
            log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise NoKernelError(f"{SOURCE.name} for {target}: {log.decode(errors='replace')}")
        size, get = (
            (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
            if exact
            else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        )
        code = bytearray(_checked(nvrtc, size(program)))
        _checked(nvrtc, get(program, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(nvrtc: ModuleType, answer: tuple[Any, ...]) -> Any:
    """Return the value behind the result code."""
    result, *values = answer
    if int(result):
        raise NoKernelError(str(nvrtc.nvrtcGetErrorString(result)[1]))
    if len(values) == 2:  # a count and its list
        return values[1]
    return values[0] if values else None
