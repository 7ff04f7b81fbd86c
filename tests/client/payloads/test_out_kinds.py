"""What an `out` takes and answers, without a store."""

from __future__ import annotations

import array
import sys
from typing import Any

import pytest

from kvstore import UsageError
from kvstore.client.payloads import tensors
from kvstore.client.payloads.out import Out
from kvstore.types import Kind

numpy = pytest.importorskip("numpy")

ROW = numpy.arange(6, dtype="<f4")


def meta(value: Any) -> bytes:
    return tensors.encode(value).meta


PLAIN = {
    "a bytearray": bytearray(6),
    "a memoryview": memoryview(bytearray(6)),
    "signed bytes": memoryview(bytearray(6)).cast("b"),
    "characters": memoryview(bytearray(6)).cast("c"),
    "a row of uint8": numpy.zeros(6, "u1"),
}
TYPED = {
    "two-dimensional bytes": memoryview(bytearray(6)).cast("B", (2, 3)),
    "numbers": array.array("h", [0] * 3),
    "a table of uint8": numpy.zeros((2, 3), "u1"),
    "a row of int8": numpy.zeros(6, "i1"),
    "one number": numpy.zeros((), "S6"),
}


@pytest.mark.parametrize("case", PLAIN)
def test_plain_bytes_take_whatever_fits_and_answer_the_part_written(case: str) -> None:
    out = Out(PLAIN[case])
    assert out.plain
    assert (out.room.nbytes, out.room.format, out.room.readonly) == (6, "B", False)
    for size_bytes in (0, 5, 6):
        out.check(Kind.NUMPY, meta(ROW), size_bytes)
        got = out.answer(size_bytes)
        assert memoryview(got).nbytes == size_bytes
        assert isinstance(got, type(PLAIN[case]) if "row" in case else memoryview)
    with pytest.raises(UsageError, match="at least 7 bytes"):
        out.check(Kind.BYTES, b"", 7)
    with pytest.raises(UsageError, match="at least 7 bytes"):
        out.check_room(7)


@pytest.mark.parametrize("case", TYPED)
def test_anything_else_has_a_dtype_and_a_shape(case: str) -> None:
    value = TYPED[case]
    out = Out(value)
    assert not out.plain
    assert (out.room.nbytes, out.room.format) == (6, "B")
    out.check(Kind.BLOCK, b"", 6)
    out.check(Kind.BYTES, b"", 6)
    for size_bytes in (5, 7):
        with pytest.raises(UsageError, match=f"the value's {size_bytes} bytes"):
            out.check(Kind.BYTES, b"", size_bytes)
    with pytest.raises(UsageError, match="give such an array"):
        out.check(Kind.NUMPY, meta(ROW), 24)
    got = out.answer(6)
    assert got is value or isinstance(got, memoryview)
    assert isinstance(got, memoryview) is not isinstance(value, numpy.ndarray)


def test_the_same_dtype_and_shape_fits_whole() -> None:
    Out(array.array("f", [0.0] * 6)).check(Kind.NUMPY, meta(ROW), 24)
    out = Out(numpy.zeros(6, "<f4"))
    out.check(Kind.NUMPY, meta(ROW), 24)
    out.check(Kind.TORCH, meta(ROW), 24)
    with pytest.raises(ValueError, match="is not 23 bytes"):
        out.check(Kind.NUMPY, meta(ROW), 23)
    with pytest.raises(ValueError, match="no description"):
        out.check(Kind.NUMPY, b"\xc1", 24)


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_nothing_goes_into_what_has_room_for_nothing(shape: tuple[int, ...]) -> None:
    out = Out(numpy.zeros(shape, "<f4"))
    assert (out.room.nbytes, out.room.readonly) == (0, False)
    out.check(Kind.BYTES, tensors.EMPTY, 0)
    out.check(Kind.NUMPY, meta(numpy.zeros(shape, "<f4")), 0)
    assert Out(bytearray()).answer(0) == b""
    assert not Out(bytearray()).room.readonly
    assert Out(memoryview(bytearray()).cast("h")).room.nbytes == 0


def frozen(value: Any) -> Any:
    value.flags.writeable = False
    return value


@pytest.mark.parametrize(
    "out",
    [
        "text",
        5,
        b"bytes",
        memoryview(b"bytes"),
        memoryview(bytearray(6))[::2],
        frozen(numpy.zeros(6, "u1")),
        numpy.zeros(6, "u1")[::2],
        numpy.zeros((2, 3), "<f4").T,
        numpy.array([None]),
        numpy.ma.masked_array([1.0], [0]),
    ],
    ids=lambda out: type(out).__name__,
)
def test_what_cannot_be_written_in_place_is_refused(out: Any) -> None:
    with pytest.raises(UsageError, match=r"^out="):
        Out(out)


@pytest.mark.parametrize("missing", ["torch", "numpy"])
def test_a_process_without_that_library_gives_buffers(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, missing, raising=False)
    assert Out(bytearray(6)).answer(6) == bytes(6)
    assert Out(array.array("h", [0] * 3)).room.nbytes == 6


class Tensors:
    """Stands for torch where only its dtypes and shapes matter: to import it takes seconds."""

    uint8 = "torch.uint8"

    class Tensor:
        def __init__(self, dtype: str, *shape: int) -> None:
            self.dtype = dtype
            self.shape = shape

        def dim(self) -> int:
            return len(self.shape)

        def __getitem__(self, part: slice) -> Any:
            return ("part", part)


@pytest.mark.parametrize(
    ("dtype", "shape", "plain"),
    [
        ("torch.uint8", (6,), True),
        ("torch.uint8", (2, 3), False),
        ("torch.uint8", (), False),
        ("torch.int8", (6,), False),
        ("torch.int8", (2, 3), False),
    ],
)
def test_a_tensor_is_plain_bytes_when_it_is_a_row_of_uint8(
    dtype: str, shape: tuple[int, ...], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, bool]] = []

    def tensor_bytes(field: str, tensor: Any, *, own: bool = False) -> memoryview:
        asked.append((tensor, own))
        return memoryview(bytearray(6))

    monkeypatch.setitem(sys.modules, "torch", Tensors)  # type: ignore[arg-type]
    monkeypatch.setattr("kvstore.client.payloads.out.tensor_bytes", tensor_bytes)
    tensor = Tensors.Tensor(dtype, *shape)
    out = Out(tensor)
    assert out.plain is plain
    assert asked == [(tensor, True)], "it is written in place"
    assert out.answer(5) == (("part", slice(None, 5)) if plain else tensor)
    assert Out(numpy.zeros(6, "u1")).plain, "an array is none"


def test_a_view_of_bytes_is_written_in_place_and_only_if_it_may_be():
    memory = bytearray(8)
    out = Out(memoryview(memory)[2:6])
    assert out.plain
    out.room[:2] = b"ab"
    assert bytes(out.answer(2)) == b"ab"
    assert memory == b"\0\0ab\0\0\0\0"
    for view in (memoryview(b"abc"), memoryview(memory)[::2]):
        with pytest.raises(UsageError, match="must be writable and contiguous"):
            Out(view)
