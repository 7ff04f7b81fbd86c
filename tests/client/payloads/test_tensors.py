"""Arrays and tensors come back as they were put."""

import pytest
from each_input import each

from kvstore import UsageError
from kvstore.client.payloads import tensors

numpy = pytest.importorskip("numpy")

TORCH_DTYPES = [
    "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int64", "bool",
    "float8_e4m3fn", "float8_e5m2", "complex64",
]  # fmt: skip


def round_trip(value):
    payload = tensors.encode(value)
    raw = payload.data.tobytes() + payload.meta
    size = len(raw) - len(payload.meta)
    made, target = tensors.make(payload.kind, raw[size:], size)
    target[:] = raw[:size]
    return made


@each("dtype", ["<f4", ">f8", "<i2", "|u1", "|b1", "<c16", "<M8[ns]"])
@each("shape", [(), (0,), (3,), (2, 3, 4), (1, 0, 5)])
def test_a_numpy_array_keeps_dtype_and_shape(dtype, shape):
    value = numpy.zeros(shape, dtype)
    back = round_trip(value)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert (back == value).all()


def test_a_strided_array_comes_back_equal():
    value = numpy.arange(24).reshape(4, 6)[::2, 1::2]
    assert (round_trip(value) == value).all()


@pytest.mark.parametrize("value", [numpy.array([object()]), numpy.zeros(3, "i4,f8")])
def test_arrays_that_are_no_plain_numbers_are_refused(value):
    with pytest.raises(UsageError, match=r"^value\.dtype="):
        tensors.encode(value)


@each("dtype", TORCH_DTYPES)
@each("shape", [(), (0,), (7,), (2, 3, 4)])
def test_a_torch_tensor_keeps_dtype_and_shape(dtype, shape):
    torch = pytest.importorskip("torch")
    value = (torch.rand(shape) * 10).to(getattr(torch, dtype))
    back = round_trip(value)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    as_bytes = [
        t.contiguous().view(-1).view(torch.uint8) if t.numel() else t for t in (back, value)
    ]
    assert torch.equal(*as_bytes)


def test_a_transposed_or_grad_tensor_is_a_value():
    torch = pytest.importorskip("torch")
    value = torch.rand(4, 6, requires_grad=True).t()
    assert torch.equal(round_trip(value), value.detach())


def test_a_tensor_out_is_filled_in_place(client):
    torch = pytest.importorskip("torch")
    value = torch.rand(100, 100).to(torch.bfloat16)
    client.put("k", value)
    out = torch.zeros(100, 100, dtype=torch.bfloat16)
    assert client.get("k", out=out) is out
    assert torch.equal(out, value)
    with pytest.raises(UsageError, match=r"^out="):
        client.get("k", out=torch.zeros(10, dtype=torch.bfloat16))


def test_an_array_out_is_filled_in_place(client):
    value = numpy.arange(1000.0)
    client.put("k", value)
    out = numpy.zeros(1000)
    client.get("k", out=out)
    assert (out == value).all()


def test_an_array_comes_back_through_the_store(client):
    value = numpy.arange(60, dtype="<f4").reshape(3, 4, 5)
    client.put("k", value)
    back = client.get("k")
    assert back.dtype == value.dtype
    assert (back == value).all()
    back[0] = 7  # it is the caller's own memory


@pytest.mark.parametrize(
    "meta", [["|O", [1]], ["<f4", [1 << 40]], ["finfo", [1]], ["<f4", [-1, -2]], [1, 2], ["", []]]
)
def test_a_damaged_description_is_a_miss(client, meta):
    value = numpy.arange(2, dtype="<f4")
    payload = tensors.encode(value)._replace(meta=tensors.msgpack.packb(meta))
    key = client.namespace.value_key("k")
    assert client._saver.save([key], [payload]) == [("stored", "")]
    assert client.get("k") is None
    assert client.stats()["missed"]["load-failed"] > 0


def test_an_array_of_raw_bytes_is_refused():
    with pytest.raises(UsageError, match=r"^value\.dtype="):
        tensors.encode(numpy.zeros(3, "V8"))


def test_a_conjugated_or_negated_view_is_what_it_shows():
    torch = pytest.importorskip("torch")
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(round_trip(value.conj()), value.conj().resolve_conj())
    assert torch.equal(round_trip(value.conj().imag), torch.tensor([-2.0, 4.0]))


def _no_plain_tensors():
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    yield torch.eye(3).to_sparse()
    yield torch.eye(3).to_sparse_csr()
    yield torch.empty(3, device="meta")
    yield torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    yield torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with FakeTensorMode():
        yield torch.zeros(3)


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_whose_numbers_are_not_its_bytes_is_refused():
    for value in _no_plain_tensors():
        with pytest.raises(UsageError, match=r"^value="):
            tensors.encode(value)


def test_a_masked_array_is_refused_rather_than_put_without_its_mask():
    with pytest.raises(UsageError, match=r"^value=.*mask"):
        tensors.encode(numpy.ma.masked_array([1, 2], [True, False]))


def test_an_array_of_references_is_refused():
    with pytest.raises(UsageError, match=r"^value\.dtype="):
        tensors.encode(numpy.array(["a", "b" * 100], numpy.dtypes.StringDType()))


def test_a_released_view_is_refused():
    value = memoryview(b"abc")
    value.release()
    with pytest.raises(UsageError, match=r"^value="):
        tensors.encode(value)


@pytest.mark.parametrize("error", [TypeError, AttributeError, RuntimeError, MemoryError])
def test_a_bug_in_making_a_value_is_no_miss(writer, reader, monkeypatch, error):
    """Neither here nor for what comes from another host."""

    def broken(*_):
        raise error("a bug")

    writer.put("k", numpy.arange(10))
    monkeypatch.setattr(tensors, "make", broken)
    for client in (writer, reader):
        with pytest.raises(error, match="a bug"):
            client.get("k")
