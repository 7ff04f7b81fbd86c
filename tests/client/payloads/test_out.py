"""What may be read into the caller's memory: its own dtype and shape, or plain bytes."""

import array
import ctypes
import itertools

import pytest
from each_input import each

from kvstore import UsageError
from kvstore.client.payloads.dtypes import Described, descriptions, of_numpy, of_torch
from kvstore.client.payloads.out import Out
from kvstore.client.payloads.tensors import encode
from kvstore.segment import batch_read

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

BF16 = torch.arange(12, dtype=torch.float32).reshape(3, 4).to(torch.bfloat16)
F32 = numpy.arange(12, dtype="<f4").reshape(3, 4)

FITTING = {
    "a tensor into a tensor": (BF16, lambda: torch.zeros(3, 4, dtype=torch.bfloat16)),
    "an array into an array": (F32, lambda: numpy.zeros((3, 4), "<f4")),
    "an array into a tensor": (F32, lambda: torch.zeros(3, 4)),
    "a tensor into an array": (torch.from_numpy(F32), lambda: numpy.zeros((3, 4), "<f4")),
    "bfloat16 across libraries": (BF16, lambda: numpy.zeros((3, 4), ml_dtypes.bfloat16)),
    "dates": (numpy.array(["2020-01-01"], "<M8[D]"), lambda: numpy.zeros(1, "<M8[D]")),
    "a scalar": (numpy.float64(2.5), lambda: numpy.zeros((), "<f8")),
    "a row into array.array": (F32.reshape(-1), lambda: array.array("f", [0.0] * 12)),
    "a row into a ctypes array": (F32.reshape(-1), lambda: (ctypes.c_float * 12)()),
    "raw bytes of its size": (F32.tobytes(), lambda: numpy.zeros((3, 4), "<f4")),
}
OTHERS = {
    "another dtype of another size": (BF16, lambda: torch.zeros(3, 4)),
    "another dtype of the same size": (BF16, lambda: torch.zeros(3, 4, dtype=torch.float16)),
    "another shape of the same size": (BF16, lambda: torch.zeros(4, 3, dtype=torch.bfloat16)),
    "a larger tensor": (BF16, lambda: torch.zeros(4, 4, dtype=torch.bfloat16)),
    "another byte order": (F32, lambda: numpy.zeros((3, 4), ">f4")),
    "integers for floats": (F32, lambda: numpy.zeros((3, 4), "<i4")),
    "a flat array": (F32, lambda: numpy.zeros(12, "<f4")),
    "a typed memoryview": (F32, lambda: memoryview(bytearray(48)).cast("i")),
    "two-dimensional bytes": (F32, lambda: numpy.zeros((6, 8), "u1")),
    "more than raw bytes": (F32.tobytes(), lambda: numpy.zeros((4, 4), "<f4")),
    "fewer than raw bytes": (F32.tobytes(), lambda: numpy.zeros((2, 4), "<f4")),
}
PLAIN = {
    "a bytearray": bytearray,
    "a memoryview": lambda n: memoryview(bytearray(n)),
    "a ctypes array": lambda n: (ctypes.c_ubyte * n)(),
    "an array of uint8": lambda n: numpy.zeros(n, "u1"),
    "a tensor of uint8": lambda n: torch.zeros(n, dtype=torch.uint8),
}


def raw(value):
    return bytes(Out(value).room) if not isinstance(value, bytes) else value


def calls(writer, reader, value, out):
    """Every call that takes an `out`, after the put that goes with it."""
    yield "get", lambda: writer.put("k", value), lambda: reader.get("k", out=out())
    yield "get_many", lambda: None, lambda: reader.get_many(["k"], out=[out()])[0]
    block = [value, b"next"]
    tokens = range(512)
    yield (
        "get_blocks",
        lambda: writer.put_blocks(tokens, block),
        lambda: reader.get_blocks(tokens, [out()]),
    )


class Counting:
    """This reader of batches, and how many values it has read."""

    suits_one = True

    def __init__(self, reader):
        self._reader, self.name, self.read_by_it = reader, reader.name, 0

    def read(self, *arguments):
        values = self._reader.read(*arguments)
        self.read_by_it += len(values[0]) - values[0].count(None)
        return values

    def copy_each(self, *arguments):
        self._reader.copy_each(*arguments)


@pytest.fixture
def batches(monkeypatch):
    batches = Counting(batch_read.READER)
    monkeypatch.setattr(batch_read, "READER", batches)
    return batches


def same_bytes(value, got):
    one = numpy.asarray(value) if value.__class__.__module__ == "numpy" else value
    return raw(got) == (one.tobytes() if isinstance(one, numpy.ndarray) else raw(one))


@pytest.mark.parametrize("case", FITTING)
def test_a_value_goes_into_what_has_its_dtype_and_shape(client, case, batches):
    value, make = FITTING[case]
    outs = []

    def remember():
        outs.append(make())
        return outs[-1]

    for number, (_, put, get) in enumerate(calls(client, client, value, remember), 1):
        put()
        got = get()
        assert got == 1 if isinstance(got, int) else same_bytes(value, got)
        assert same_bytes(value, outs[-1])
        assert batches.read_by_it == number, "in one call for all of a batch"
    out = make()
    got = client.get("k", out=out)
    assert got is out or isinstance(got, memoryview)


@pytest.mark.parametrize("case", OTHERS)
def test_an_out_of_another_dtype_or_shape_is_refused_and_unchanged(client, case):
    value, make = OTHERS[case]
    outs = []

    def remember():
        outs.append(make())
        return outs[-1]

    for name, put, get in calls(client, client, value, remember):
        put()
        with pytest.raises(UsageError, match=r"^out=") as caught:
            get()
        assert raw(outs[-1]) == bytes(Out(outs[-1]).room.nbytes), name
        if not isinstance(value, bytes):
            dtype = str(value.dtype).removeprefix("torch.")
            assert dtype in str(caught.value)
            assert str(list(value.shape)) in str(caught.value)


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize("more", [0, 10])
def test_plain_bytes_take_every_value_that_fits(client, case, more, batches):
    client.put("k", BF16)
    out = PLAIN[case](24 + more)
    got = client.get("k", out=out)
    assert batches.read_by_it == 1
    assert raw(got) == raw(BF16)
    assert raw(out) == raw(BF16) + bytes(more)
    assert type(got) in (memoryview, type(out))
    with pytest.raises(UsageError, match="23 bytes"):
        client.get("k", out=PLAIN[case](23))


def test_an_array_or_tensor_out_is_the_answer(client):
    client.put("k", F32)
    for out in (numpy.zeros((3, 4), "<f4"), torch.zeros(3, 4)):
        assert client.get("k", out=out) is out


@pytest.mark.parametrize(
    "out",
    [
        numpy.ma.masked_array([1.0, 2.0], [0, 1]),
        numpy.zeros((4, 3), "<f4").T,
        numpy.frombuffer(bytes(48), "<f4"),
        numpy.array([None]),
        torch.zeros(4, 3).t(),
        torch.zeros(3, 4).to_sparse(),
        torch.empty(3, 4, device="meta"),
        torch.zeros(3, dtype=torch.complex64).conj(),
    ],
    ids=lambda out: f"{type(out).__name__}-{getattr(out, 'dtype', '')}",
)
def test_an_out_whose_numbers_are_not_its_own_bytes_is_refused(client, out):
    client.put("k", F32)
    with pytest.raises(UsageError, match=r"^out="):
        client.get("k", out=out)


@pytest.mark.parametrize("case", OTHERS)
def test_another_hosts_value_is_compared_before_a_byte_is_written(writer, reader, case):
    value, make = OTHERS[case]
    out = make()
    for name, put, get in calls(writer, reader, value, lambda: out):
        put()
        with pytest.raises(UsageError, match=r"^out="):
            get()
        assert raw(out) == bytes(Out(out).room.nbytes), name


@pytest.mark.parametrize("case", FITTING)
def test_another_hosts_value_goes_into_what_has_its_dtype_and_shape(writer, reader, case):
    value, make = FITTING[case]
    writer.put("k", value)
    out = make()
    got = reader.get("k", out=out)
    assert same_bytes(value, got)
    assert got is out or isinstance(got, memoryview)


def test_every_pair_of_dtypes_of_one_size_is_told_apart():
    from kvstore.client.payloads import tensors

    dtypes = [torch.float16, torch.bfloat16, torch.int16, torch.uint16]
    for one, other in itertools.product(dtypes, dtypes):
        payload = tensors.encode(torch.zeros(4, dtype=one))
        out = Out(torch.zeros(4, dtype=other))
        if one is other:
            out.check(payload.kind, payload.meta, 8)
        else:
            with pytest.raises(UsageError):
                out.check(payload.kind, payload.meta, 8)


NUMPY_DTYPES = [*"?bBhHiIlLqQefdgFDG", ">f4", ">i8", "<M8[s]", "<U3", "S5"]
ML_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"]
TORCH_DTYPES = sorted(
    name for name, one in vars(torch).items() if isinstance(one, torch.dtype) and "q" not in name
)


@each("name", [*NUMPY_DTYPES, *ML_DTYPES])
def test_an_arrays_description_is_among_those_of_its_dtype_and_shape(name):
    dtype = numpy.dtype(getattr(ml_dtypes, name) if name in ML_DTYPES else name)
    wanted = descriptions(Described(of_numpy(dtype), (2, 3)))
    assert encode(numpy.zeros((2, 3), dtype)).meta in wanted
    assert b"" in wanted
    assert len(set(map(len, wanted))) == len(wanted), "one of a length is looked at"


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@each("name", TORCH_DTYPES)
def test_a_tensors_description_is_among_those_of_its_dtype_and_shape(name):
    dtype = getattr(torch, name)
    payload = encode(torch.empty((2, 3), dtype=dtype))
    assert payload.meta in descriptions(Described(of_torch(dtype), (2, 3)))
