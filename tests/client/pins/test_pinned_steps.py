"""A pin over a file of the test's own: whose pages a tensor has, and who tells of its end."""

import mmap
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest

from kvstore.client.pinned import Pinned
from kvstore.client.pins import HeldPin, Pins
from kvstore.record import pack_place
from kvstore.types import Kind

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

PIN = (7, 1)
"""(slot, generation)."""
AT = 2 * mmap.PAGESIZE + 64


class Host:
    """In the place of the host's writer and of a node's mapped directory."""

    def __init__(self, path):
        self.ended = []
        self.held = set()
        self.pins = Pins(self.unpin, lambda: [self.held])
        self.lives = True
        self.path = path

    def unpin(self, refs):
        self.ended += [ref.handle for ref in refs if ref in self.held]
        self.held.difference_update(refs)

    def lives_as(self, announcement):
        return self.lives


@pytest.fixture
def pinned(tmp_path, monkeypatch):
    """Makes a pin of a value and the description behind it, in a file."""

    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refused)
    path = tmp_path / "segment"

    def make(value, meta=b"", kind=Kind.NUMPY):
        path.write_bytes(bytes(AT) + value + meta + bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            payload = memoryview(mmap.mmap(file.fileno(), 0))
        host = Host(path)
        attached = SimpleNamespace(
            shm=SimpleNamespace(payload=payload),
            announcement=SimpleNamespace(data_path=str(path)),
            directory=host,
        )
        buffer = payload[AT : AT + len(value) + len(meta)]
        place = SimpleNamespace(buffer=buffer, attached=attached, kind=kind, data=value)
        pin = HeldPin(pack_place(bytes(32), 1, 1, 0, *PIN, 0, 1, 0), host.pins)
        host.held.add(pin.ref)
        return Pinned(place, pin), host

    return make


def mapped(host):
    return Path("/proc/self/maps").read_text().count(str(host.path))


VALUE = numpy.arange(6, dtype="<i4").reshape(2, 3)
META = msgpack.packb(("int32", [2, 3]))


def test_a_tensor_has_pages_of_its_own_of_the_nodes_file(pinned):
    pin, host = pinned(VALUE.tobytes(), META)
    before = mapped(host)
    tensor = pin.tensor()
    assert mapped(host) == before + 1
    assert tensor.tolist() == VALUE.tolist()


def test_a_tensor_is_a_copy_when_the_path_may_be_of_another_start(pinned):
    pin, host = pinned(VALUE.tobytes(), META)
    host.lives = False
    other = host.path.with_name("other")
    other.write_bytes(b"\xff" * host.path.stat().st_size)
    other.replace(host.path)
    assert pin.tensor().tolist() == VALUE.tolist()


@pytest.mark.parametrize("kind", [Kind.BYTES, Kind.BLOCK])
def test_what_is_bytes_or_undescribed_is_a_row_of_them(pinned, kind):
    pin, _ = pinned(b"abc", META if kind == Kind.BYTES else b"", kind)
    for made in (pin.numpy(), pin.tensor()):
        assert made.tolist() == [97, 98, 99]


def test_nothing_is_a_tensor_of_its_shape(pinned):
    pin, _ = pinned(b"", msgpack.packb(("float32", [0, 3])))
    assert pin.tensor().shape == (0, 3)


def test_who_closes_a_pin_has_told_the_node_when_the_with_is_left(pinned):
    pin, host = pinned(VALUE.tobytes(), META)
    with pin:
        assert host.ended == []
    assert host.ended == [PIN]
    assert host.pins._wake.qsize() == 0
    pin.close()
    assert host.ended == [PIN]


def test_who_may_not_wait_leaves_it_to_the_thread(pinned):
    pin, host = pinned(VALUE.tobytes(), META)
    with pin.closed_later() as same:
        assert same is pin
    assert (host.ended, host.pins._wake.qsize()) == ([], 1)
    host.pins.settle()
    assert host.ended == [PIN]
