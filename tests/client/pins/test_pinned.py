"""A pin as an array or a tensor: its dtype and shape, no copy, and nobody else's to write."""

import warnings
from pathlib import Path

import pytest

from kvstore import UsageError

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

MIB = 1 << 20
VALUE = numpy.arange(MIB // 4, dtype="<i4")

ARRAYS = {
    "float32": numpy.arange(12, dtype="<f4").reshape(3, 4),
    "big-endian": numpy.arange(12, dtype=">f8").reshape(3, 4),
    "bfloat16": numpy.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16),
    "bool": numpy.array([[True, False]]),
    "a scalar": numpy.array(2.5),
    "nothing": numpy.zeros((0, 3), "<f4"),
    "dates": numpy.array(["2020-01-01"], "<M8[D]"),
    "text": numpy.array(["ab", "c"]),
    "long doubles": numpy.array([1.5, 2.5], numpy.longdouble),
    "complex numbers of long doubles": numpy.array([1 + 2j], numpy.clongdouble),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_numpy_has_the_dtype_and_shape_of_the_array_and_cannot_be_written(client, case):
    value = ARRAYS[case]
    client.put("k", value)
    with client.pin("k") as pin:
        array = pin.numpy()
        assert (array.dtype, array.shape) == (value.dtype, value.shape)
        assert array.tobytes() == value.tobytes()
        assert not array.flags.writeable
        if value.size:
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
            assert numpy.shares_memory(array, numpy.asarray(pin.buffer))


TENSORS = {
    name: torch.arange(12).reshape(3, 4).to(getattr(torch, name))
    for name in ("float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64", "uint8")
}
TENSORS["a scalar"] = torch.tensor(2.5)
TENSORS["nothing"] = torch.zeros(0, 3)


@pytest.mark.parametrize("case", TENSORS)
def test_tensor_has_the_dtype_and_shape_of_the_tensor_without_a_warning(client, case):
    value = TENSORS[case]
    client.put("k", value)
    with client.pin("k") as pin, warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = pin.tensor()
        assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape)
        assert tensor.numel() == 0 or torch.equal(
            tensor.clone().reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        )
        if value.numel():
            assert tensor.is_inference()


def mapped(path):
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_tensor_is_no_copy(node, client):
    client.put("k", VALUE)
    data = node.segment_files()[0]
    with client.pin("k") as pin:
        before = mapped(data)
        tensor = pin.tensor()
        assert mapped(data) == before + 1
        assert torch.equal(tensor.clone(), torch.from_numpy(VALUE))
        del tensor
        assert mapped(data) == before


def test_a_tensor_of_a_node_that_is_gone_is_right(node, client):
    client.put("k", VALUE)
    with client.pin("k") as pin:
        node.kill()
        assert torch.equal(pin.tensor().clone(), torch.from_numpy(VALUE))
        node.forget()
        assert torch.equal(pin.tensor().clone(), torch.from_numpy(VALUE))


def test_what_is_written_to_a_tensor_all_the_same_is_seen_nowhere_else(client):
    client.put("k", torch.arange(12.0))
    with client.pin("k") as pin:
        tensor, other = pin.tensor(), pin.tensor()
        with torch.inference_mode():
            tensor.fill_(7)
        tensor.numpy()[0] = 8
        assert client.get("k", out=torch.zeros(12)).tolist() == list(range(12))
        assert pin.numpy().tolist() == other.tolist() == list(range(12))
        assert pin.tensor().tolist() == list(range(12))


def test_a_tensor_cannot_be_written(client):
    client.put("k", torch.arange(12.0))
    with client.pin("k") as pin:
        tensor = pin.tensor()
        for write in (
            lambda: tensor.add_(1),
            lambda: tensor.__setitem__(0, 1.0),
            lambda: tensor[3:].view(3, 3).zero_(),
            lambda: torch.add(tensor, 1, out=tensor),
        ):
            with pytest.raises(RuntimeError, match="inference tensor"):
                write()
    assert torch.equal(client.get("k"), torch.arange(12.0))


def test_values_cross_between_numpy_and_torch_where_both_have_the_dtype(client):
    client.put("array", ARRAYS["float32"])
    client.put("tensor", TENSORS["bfloat16"])
    client.put("big", ARRAYS["big-endian"])
    client.put("bytes", b"abc")
    client.put("empty", b"")
    with client.pin("array") as pin:
        assert torch.equal(pin.tensor().clone(), torch.from_numpy(ARRAYS["float32"]))
    with client.pin("tensor") as pin:
        assert (pin.numpy() == ARRAYS["bfloat16"]).all()
    with client.pin("big") as pin, pytest.raises(UsageError, match=r">f8"):
        pin.tensor()
    with client.pin("bytes") as pin:
        assert pin.numpy().tolist() == pin.tensor().tolist() == [97, 98, 99]
        assert pin.buffer == b"abc"
    with client.pin("empty") as pin:
        assert (pin.numpy().size, pin.tensor().numel(), pin.buffer) == (0, 0, b"")


def test_a_pin_of_a_block_has_its_dtype_and_shape(client):
    client.put_blocks(range(256), [TENSORS["bfloat16"]])
    (key,) = client.namespace.block_keys(range(256), 256)
    (place,) = client.session.reader.search([key])
    assert place.meta_length > 0
