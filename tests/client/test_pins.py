"""A pin lasts as long as anything made of its memory, and not longer."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from redis_servers import wait_until

from kvstore import Client, UsageError
from kvstore.client.local.control import ControlChannel
from kvstore.client.pins import Pins

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

MIB = 1 << 20
OTHER = b"\xff" * MIB
VALUE = numpy.arange(MIB // 4, dtype="<i4")


def no_warning(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


VIEWS = {
    "the buffer": lambda p: p.buffer,
    "a slice": lambda p: p.buffer[4096:8192],
    "a cast": lambda p: p.buffer.cast("i"),
    "a memoryview": lambda p: memoryview(p.buffer),
    "a PickleBuffer": lambda p: pickle.PickleBuffer(p.buffer),
    "numpy.frombuffer": lambda p: numpy.frombuffer(p.buffer, "<i4"),
    "numpy.asarray": lambda p: numpy.asarray(p.buffer),
    "a slice of an array": lambda p: numpy.frombuffer(p.buffer, "<i4")[5:50:3],
    "torch.frombuffer": lambda p: no_warning(lambda: torch.frombuffer(p.buffer, dtype=torch.int32)),
    "a slice of a tensor": lambda p: p.tensor()[7:9],
    "numpy()": lambda p: p.numpy(),
    "tensor()": lambda p: p.tensor(),
    "numpy() as a tensor": lambda p: no_warning(lambda: torch.from_numpy(p.numpy())),
    "tensor() as an array": lambda p: p.tensor().numpy(),
}


def evict_everything(client):
    """Put twice as much as the node has room for."""
    client.put_many((f"x{os.urandom(4).hex()}", OTHER) for _ in range(128))


def pinned(client):
    return client.stats()["node"]["pinned"]


def ends(client):
    wait_until(lambda: pinned(client) == 0, "the pin ends")


@pytest.mark.parametrize("case", VIEWS)
def test_whatever_is_made_of_a_pin_keeps_its_bytes_until_it_is_dropped(client, case):
    client.put("k", VALUE)
    with client.pin("k") as pin:
        view = VIEWS[case](pin)
        seen = bytes(view) if not isinstance(view, torch.Tensor) else bytes(view.numpy())
    del pin
    evict_everything(client)
    assert pinned(client) == 1
    now = bytes(view) if not isinstance(view, torch.Tensor) else bytes(view.numpy())
    assert now == seen
    assert seen in VALUE.tobytes() or case == "a slice of an array"
    del view
    ends(client)


def test_a_pin_without_other_views_has_ended_when_its_with_is_left(client):
    client.put("k", VALUE)
    with client.pin("k") as pin:
        assert bytes(pin.buffer) == VALUE.tobytes()
        assert pinned(client) == 1
    assert pinned(client) == 0
    pin.close()
    for use in (lambda: pin.buffer, pin.numpy, pin.tensor):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_a_pin_that_is_dropped_without_a_close_ends(client):
    client.put("k", VALUE)
    client.pin("k")
    ends(client)


def test_a_pin_ends_although_the_start_of_the_thread_that_ends_pins_was_interrupted(
    client, monkeypatch
):
    client.put("k", VALUE)
    start = threading.Thread.start

    def interrupted(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.pin("k")
    view = client.pin("k").buffer
    assert pinned(client) == 1
    del view
    wait_until(lambda: pinned(client) == 0, "the pin ends")


def test_two_pins_of_one_value_end_one_by_one(client):
    client.put("k", VALUE)
    one, two = client.pin("k"), client.pin("k")
    one.close()
    evict_everything(client)
    assert (two.numpy() == VALUE).all()
    two.close()
    assert pinned(client) == 0


def test_a_pin_that_ends_over_a_new_connection_takes_no_other_pin_with_it(client):
    """The HELLO of that connection says how many there are, the request how many end."""
    client.put("k", VALUE)
    first, second = client.pin("k"), client.pin("k")
    (link,) = client.session.writer.links()
    link.control._out_of_step = True
    first.close()
    assert pinned(client) == 1
    second.close()
    assert pinned(client) == 0


@pytest.mark.parametrize("case", VIEWS)
def test_a_closed_client_keeps_the_memory_of_its_views_and_their_pins(node, client, case):
    with Client(**node.client_options) as other:
        other.put("k", VALUE)
        other.session.pin([other.namespace.value_key("k")])  # of nobody's view: ends with it
        view = VIEWS[case](other.pin("k"))
        seen = bytes(view) if not isinstance(view, torch.Tensor) else bytes(view.numpy())
    other.close()
    evict_everything(client)
    assert pinned(client) == 1
    now = bytes(view) if not isinstance(view, torch.Tensor) else bytes(view.numpy())
    assert now == seen
    assert len(list(node.directory.leases.iterdir())) == 2
    del view
    ends(client)
    wait_until(lambda: len(list(node.directory.leases.iterdir())) == 1, "the lease ends")


def test_a_client_that_is_dropped_unclosed_keeps_its_views_too(node, client):
    view = (lambda c: (c.put("k", VALUE), c.pin("k").numpy())[1])(Client(**node.client_options))
    gc.collect()
    evict_everything(client)
    assert (view == VALUE).all()
    del view
    ends(client)


def test_a_reservation_does_not_outlive_a_close_because_of_a_view(node, client):
    with Client(**node.client_options) as other:
        other.put("k", VALUE)
        view = other.pin("k").numpy()
        other.session.reserve([b"r" * 32], MIB, 1)
        assert client.stats()["node"]["reserved"] == 1
    wait_until(lambda: client.stats()["node"]["reserved"] == 0, "it is given back")
    assert pinned(client) == 1
    del view


def test_views_of_a_closed_client_stay_right_when_the_node_is_killed_and_comes_back(node, client):
    with Client(**node.client_options) as other:
        other.put("k", VALUE)
        view = other.pin("k").numpy()
    node.kill()
    node.start()
    with Client(**node.client_options) as third:
        evict_everything(third)
        assert (view == VALUE).all()
        del view
        evict_everything(third)


def test_views_dropped_by_many_threads_at_once_all_end(client):
    client.put_many((f"k{i}", VALUE[: 1000 + i]) for i in range(50))
    pins = [client.pin(f"k{i}") for i in range(50)]
    views = [[pin.numpy()[j:] for pin in pins] for j in range(4)]
    threads = [threading.Thread(target=v.clear) for v in views]
    del pins
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends(client)


def test_views_in_a_cycle_end_when_it_is_collected_inside_calls_of_ours(client):
    """The collector runs wherever memory is taken: also where our locks are held."""
    client.put("k", VALUE)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(200):
            cycle = [client.pin("k").numpy()]
            cycle.append(cycle)
            del cycle
            client.exists("k")
    finally:
        gc.set_threshold(*before)
    gc.collect()
    ends(client)


def test_a_forked_child_ends_no_pin_of_its_parent(client):
    client.put("k", VALUE)
    pin = client.pin("k")
    view = pin.numpy()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            del view
            pin.close()
            del pin
            gc.collect()
            client.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    evict_everything(client)
    assert pinned(client) == 1
    assert (view == VALUE).all()


def test_a_process_ends_in_order_with_pins_in_its_hands(node, client):
    client.put("k", VALUE)
    script = (
        "import sys, numpy\n"
        "from pathlib import Path\n"
        "from kvstore import Client, Limits\n"
        "limits = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)\n"
        "run_dir, prefix = Path(sys.argv[2]), sys.argv[3]\n"
        "c = Client(sys.argv[1], run_dir=run_dir, key_prefix=prefix, limits=limits)\n"
        "pin = c.pin('k'); a = pin.numpy(); keep = [a, pin]; keep.append(keep)\n"
        "sys.modules['keep'] = keep\n"
        "assert a[5] == 5\n"
    )
    arguments = [node.redis.url, str(node.run_dir), node.key_prefix]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    ends(client)


ARRAYS = {
    "float32": numpy.arange(12, dtype="<f4").reshape(3, 4),
    "big-endian": numpy.arange(12, dtype=">f8").reshape(3, 4),
    "bfloat16": numpy.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16),
    "bool": numpy.array([[True, False]]),
    "a scalar": numpy.array(2.5),
    "nothing": numpy.zeros((0, 3), "<f4"),
    "dates": numpy.array(["2020-01-01"], "<M8[D]"),
    "text": numpy.array(["ab", "c"]),
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
        assert client.get("k", torch.zeros(12)).tolist() == list(range(12))
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


@pytest.mark.parametrize("many", [False, True])
def test_a_pin_that_is_interrupted_when_it_was_granted_is_not_kept(client, monkeypatch, many):
    client.put("k", VALUE)
    client.exists("k")
    key = client.namespace.value_key("k")
    collect = ControlChannel.collect

    def interrupted(self, ticket):
        answer = collect(self, ticket)
        if answer and isinstance(answer[0], bytes):
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(ControlChannel, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.session.pin([key]) if many else client.pin("k")
    assert pinned(client) == 0


def test_who_is_interrupted_while_it_lets_pins_go_lets_the_others_go_later():
    let_go = []

    def interrupted(ended):
        let_go.append(next(iter(ended)))
        raise KeyboardInterrupt

    pins = Pins(interrupted)
    wanted = [(bytes([i]) * 32, b"") for i in range(3)]
    for pin in wanted:
        pins._end(pin)
    for _ in wanted:
        with pytest.raises(KeyboardInterrupt):
            pins.settle()
    pins.settle()
    assert let_go == wanted
