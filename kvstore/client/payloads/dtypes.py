"""Names a value's dtype in words that numpy, torch and the buffer protocol share."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from kvstore.limits import TENSOR_DIMS_MAX

if TYPE_CHECKING:
    import numpy as np

_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
_FORMATS = {
    **dict.fromkeys("bhilqn", "int"),
    **dict.fromkeys("BHILQN", "uint"),
    **dict.fromkeys("efd", "float"),
}
_NATIVE = "<"
_NUMPY_NAMES = (
    *("|b1", "|i1", "|u1"),
    *(
        f"{_NATIVE}{name}"
        for name in ["i2", "i4", "i8", "u2", "u4", "u8", "f1", "f2", "f4", "f8", "c8", "c16"]
    ),
)
"""Of numpy's names those that stand for a dtype that has another one."""


class Described(NamedTuple):
    """Dtype and shape of a value: equal for all that have the same numbers in the same shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def described(meta: bytes) -> Described:
    """Return what a value's description says. Raises `ValueError` when it is none."""
    name, shape = read_meta(meta)
    return Described(_common(name), tuple(shape))


@functools.lru_cache(maxsize=256)
def descriptions(value: Described) -> tuple[bytes, ...]:
    """Every description that a value of that dtype and shape is saved with: by numpy's name, by
    torch's, and b"" for one that was put as plain bytes."""
    dtype, shape = value
    names = [dtype, *(name for name in _NUMPY_NAMES if _common(name) == dtype)]
    packed = [msgpack.packb([name, list(shape)]) for name in names]
    return (*dict.fromkeys(packed), b"")


def read_meta(meta: bytes) -> tuple[str, list[int]]:
    """Decode a value's description, and check it: it may be damaged, or somebody else's."""
    try:
        dtype, shape = msgpack.unpackb(meta)
    except (ValueError, TypeError, msgpack.UnpackException) as e:
        raise ValueError(f"no description: {meta!r}") from e
    right = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= TENSOR_DIMS_MAX
    if not right or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
        raise ValueError(f"no description: {meta!r}")
    return dtype, shape


def of_torch(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def of_numpy(dtype: np.dtype[Any]) -> str:
    return _common(numpy_name(dtype))


def numpy_name(dtype: np.dtype[Any]) -> str:
    # ml_dtypes (bfloat16, fp8) all call themselves '|V1' or '<V2'; their names tell them apart.
    return str(dtype.name if dtype.kind == "V" else dtype.str)


def of_format(code: str, itemsize: int) -> str:
    """Return the dtype of a `memoryview.format`."""
    letter = code.lstrip("@=" + _NATIVE)
    if letter == "?":
        return "bool"
    name = _FORMATS.get(letter)
    return code if name is None else f"{name}{itemsize * 8}"


def _common(name: str) -> str:
    """torch's and `ml_dtypes`' names as they are; numpy's '<f4' is float32, '>f4' stays."""
    if name[:1] not in (_NATIVE, "|") or not name[2:].isdigit():
        return name
    if name[1] == "b":
        return "bool"
    kind, bits = _KINDS.get(name[1]), int(name[2:]) * 8
    # A long double of 16 bytes has 80 bits of its own, not IEEE's 128; two of them are a complex.
    own = bits > {"float": 64, "complex": 128}.get(kind or "", bits)
    return name if kind is None or own else f"{kind}{bits}"
