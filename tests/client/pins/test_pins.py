"""A pin lasts as long as anything made of its memory, and not longer."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings

import pytest
from redis_servers import wait_until
from stores import node_stats

from kvstore import Client, UsageError

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

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
    return node_stats(client)["pinned"]


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
        assert node_stats(client)["reserved"] == 1
    wait_until(lambda: node_stats(client)["reserved"] == 0, "it is given back")
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
