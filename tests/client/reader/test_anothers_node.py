"""Root at another user's node: the same answers as at its own, and nothing of it is mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import MIB, PATIENT

from kvstore import Client, NodeUnavailableError, UsageError
from kvstore.client.reader import UnmappedPlace
from kvstore.index.open import open_guarded
from kvstore.node.daemon import Node, NodeConfig
from kvstore.nodedir import Announcement, NodeDir
from kvstore.segment.trusted_files import SegmentFiles, files_of
from kvstore.types import PutStatus

numpy = pytest.importorskip("numpy")
SIZES = [1, 5000, 70_000, 3 * MIB]


def _of_another_user(directory: NodeDir, announcement: Announcement) -> SegmentFiles:
    return files_of(directory, announcement)._replace(mapped=False)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Node]]:
    run_dir = tmp_path_factory.mktemp("run")
    opened = open_guarded(None, key_prefix="kv:t", run_dir=run_dir, limits=PATIENT)
    config = NodeConfig(run_dir=run_dir, size_bytes=64 * MIB, key_prefix="kv:t")
    with Node(config, opened.index) as node:
        yield opened.url, node
    opened.close()


def client_at(node: tuple[str, Node], verify: str) -> Client:
    url, its = node
    run_dir = its.config.run_dir
    return Client(url, key_prefix="kv:t", run_dir=run_dir, limits=PATIENT, verify=verify)  # type: ignore[arg-type]


@pytest.fixture(params=["never", "always"])
def root(
    request: pytest.FixtureRequest, node: tuple[str, Node], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    for module in ("kvstore.client.local.nodes", "kvstore.client.local.link"):
        monkeypatch.setattr(f"{module}.files_of", _of_another_user)
    with client_at(node, request.param) as client:
        client.clear()
        yield client
        assert client.session.mappings() == []


def bytes_of(size: int) -> bytes:
    return os.urandom(min(size, 1000)) * (size // 1000 + 1)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_is_got_in_every_way(root: Client, size: int) -> None:
    value = bytes_of(size)[:size]
    assert root.put("k", value)
    assert root.get("k") == value
    assert root.get("k") == value, "from where it is remembered"
    out = bytearray(size + 5)
    got = root.get("k", out=out)
    assert (bytes(got), bytes(out[size:])) == (value, bytes(5))
    assert root.get_many(["k", "no"], out=[bytearray(size), None])[0] == value
    assert root.put("k", value).status is PutStatus.EXISTS
    assert root.put("k", value[:-1] + bytes([value[-1] ^ 1])).status is PutStatus.DIFFERS
    assert root.stats()["transports"]["shm_hits"] == 4
    assert isinstance(root.session.reader.search([root.namespace.value_key("k")])[0], UnmappedPlace)


def test_arrays_have_their_shape_and_an_out_is_checked_first(root: Client) -> None:
    value = numpy.arange(50_000, dtype="<f4").reshape(100, 500)
    assert root.put("k", value)
    got = root.get("k")
    assert (got.dtype, got.shape, got.tobytes()) == (value.dtype, value.shape, value.tobytes())
    out = numpy.zeros_like(value)
    assert root.get("k", out=out) is out
    assert (out == value).all()
    wrong = numpy.ones((10, 10), dtype="<i8")
    with pytest.raises(UsageError):
        root.get("k", out=wrong)
    assert (wrong == 1).all()


def test_a_pin_is_a_copy_that_stays_right(root: Client, node: tuple[str, Node]) -> None:
    value = numpy.arange(50_000, dtype="<f4")
    assert root.put("k", value)
    word = node[1].announcement
    assert word is not None
    with root.pin("k") as pin:
        view = pin.numpy()
        with open(word.data_path, "r+b") as data:  # noqa: PTH123
            whole = data.read()
            data.seek(0)
            data.write(bytes(len(whole)))
        assert (view == value).all()
        with open(word.data_path, "r+b") as data:  # noqa: PTH123
            data.write(whole)
        torch = pytest.importorskip("torch")
        with torch.inference_mode():
            pin.tensor().zero_()
        assert (pin.numpy() == value).all()
    del view
    with root.pin("k"):  # who closes one lets go of all that have ended
        pass
    assert root.stats()["node"]["pinned"] == 0


def test_what_is_cut_off_is_a_miss_and_a_rejected_save(
    root: Client, node: tuple[str, Node]
) -> None:
    """Also what was found and remembered while it was there."""
    word = node[1].announcement
    assert word is not None
    value = bytes_of(MIB)
    assert root.put_many({f"k{i}": value for i in range(4)})
    assert root.get("k0") == value
    keys = [root.namespace.value_key(f"k{i}") for i in range(4)]
    (slot,) = root.session.reserve([root.namespace.value_key("new")], 100_000, root.namespace.id)
    found = root.session.match(keys)
    payload = Path(word.data_path)
    kept = payload.read_bytes()
    os.truncate(payload, 0)
    try:
        assert root.get("k0") is None
        assert root.get_many(["k1", "k2"], out=[bytearray(len(value)), None]) == [None, None]
        assert list(root.session.views(found, None)) == [None] * 4
        staging = memoryview(bytearray(8 * MIB))
        assert list(root.session.views(found, staging)) == [None] * 4
        assert not root.pin("k3")
        with pytest.raises(NodeUnavailableError):
            root.session.commit([slot])  # type: ignore[list-item]
    finally:
        payload.write_bytes(kept)
    assert root.get("k0") == value
    assert root.stats()["node"]["reserved"] == 0


def test_a_forked_child_writes_to_no_slot_of_its_parent(root: Client) -> None:
    key = root.namespace.value_key("k")
    (slot,) = root.session.reserve([key], 100_000, root.namespace.id)
    assert not isinstance(slot, PutStatus)
    slot.buffer[:] = b"p" * 100_000  # type: ignore[union-attr]
    (writer,) = root.session.writer.writers()
    link = writer.linked
    assert link is not None
    assert link.filled([slot])  # type: ignore[list-item]
    child = os.fork()
    if not child:
        os._exit(link.filled([slot]))  # type: ignore[list-item]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (stored,) = root.session.commit([slot])  # type: ignore[list-item]
    assert stored
    assert root.session.view(root.session.match([key])[0]) is not None


def test_a_value_that_nobody_can_have_saved_takes_no_memory(
    root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header of another user's may promise 4 GiB."""
    assert root.put("k", bytes_of(5000))
    root.session.reader.forget(root.namespace.value_key("k"))
    monkeypatch.setattr("kvstore.client.reader.VALUE_BYTES_MAX", 4999)
    assert root.get("k") is None


def test_many_pins_take_no_more_memory_than_a_client_may(
    root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a copy; one that has ended makes room for the next, also by its last view."""
    values = {f"pin{i}": os.urandom(5000) for i in range(4)}
    assert root.put_many(values)
    monkeypatch.setattr("kvstore.client.copies.ANOTHERS_BYTES_MAX", 2 * 5000)
    one, two = root.pin("pin0"), root.pin("pin1")
    assert one is not None
    assert two is not None
    assert not root.pin("pin2")
    view = one.buffer
    one.close()
    assert not root.pin("pin2"), "somebody has a view of the first"
    assert view == values["pin0"]
    del view
    with root.pin("pin2") as three:
        assert three.buffer == values["pin2"]
        assert not root.pin("pin3")
    two.close()
    assert root.stats()["node"]["pinned"] == 0


def test_many_views_take_no_more_memory_than_a_client_may(
    root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view is a copy, as a pin is, and both count together; in the caller's room it is free."""
    values = {f"view{i}": os.urandom(5000) for i in range(4)}
    assert root.put_many(values)
    keys = [root.namespace.value_key(name) for name in values]
    session = root.session
    found = session.match(keys)
    assert [bytes(view.data) for view in session.views(found, None)] == list(values.values())
    monkeypatch.setattr("kvstore.client.copies.ANOTHERS_BYTES_MAX", 2 * 5000)
    assert [bytes(view.data) for view in session.views(found, None)] == list(values.values()), (
        "one at a time has room"
    )
    held = list(session.views(found, None))
    assert [view is not None for view in held] == [True, True, False, False]
    assert not root.pin("view3")
    part = memoryview(held[0].data)[:1]
    held[:] = [None]
    with root.pin("view3") as pinned:
        assert session.view(found[2]) is None, "somebody has a part of the first"
        assert pinned.buffer == values["view3"]
    del part
    room = memoryview(bytearray(4 * 8192))
    assert all(view is not None for view in session.views(found, room))
    assert session.view(found[2]) is not None


def test_many_values_take_no_more_memory_than_a_call_may(
    root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers of another user's may promise 1 GiB each; with an `out`, it is the caller's room."""
    values = {f"many{i}": os.urandom(5000) for i in range(4)}
    assert root.put_many(values)
    names, all_of_them = list(values), list(values.values())
    assert root.get_many(names) == all_of_them
    monkeypatch.setattr("kvstore.client.values.getting.ANOTHERS_BYTES_MAX", 2 * 5000)
    assert root.get_many(names) == [*all_of_them[:2], None, None]
    outs = [bytearray(5000) for _ in names]
    assert [bytes(got) for got in root.get_many(names, out=outs)] == all_of_them
    assert [root.get(name) for name in names] == all_of_them
