"""Pipe: every tensor once, in order, bit for bit; bounded, and no wait without an end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from connector_parts import PATIENCE_S
from each_input import each
from fake_values import FakeValues
from hypothesis import given
from hypothesis import strategies as st
from stores import MIB, NodeProcess, node_stats

from connector.limits import (
    TENSOR_MESSAGE_BYTES_MAX,
    TENSOR_MESSAGE_PART_BYTES,
    TENSOR_MESSAGE_PART_BYTES_MIN,
)
from connector.transfer import tensor_messages
from connector.transfer.pipe import Pipe, PipeClosedError
from kvstore import Client, DeadlineError, UsageError
from kvstore.limits import VALUE_BYTES_MAX

if TYPE_CHECKING:
    from redis_servers import RedisServer

torch = pytest.importorskip("torch")

DTYPES = [
    *("uint8", "int8", "int16", "int32", "int64", "bool"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2"),
]
SOON_S = 0.05


def pair(store: Any = None, **options: Any) -> tuple[Pipe, Pipe]:
    store = store or FakeValues()
    options = {"timeout_s": PATIENCE_S, **options}
    return (
        Pipe(store, "p", producer=True, **options),
        Pipe(store, "p", producer=False, **options),
    )


def tensor_of(dtype: str, *shape: int) -> Any:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(len(shape))
    raw = torch.randint(0, 2, (*shape, kind.itemsize), generator=generator, dtype=torch.uint8)
    return (raw if dtype == "bool" else raw * 77).view(kind).reshape(shape)


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def test_a_conjugated_view_arrives_as_what_it_shows() -> None:
    sender, receiver = pair()
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    sender.send_tensor(value)
    assert same(receiver.recv_tensor(), value.resolve_conj())


@pytest.mark.parametrize("odd", ["sparse", "meta", "quantised"])
def test_a_tensor_without_plain_bytes_is_refused(odd: str) -> None:
    value = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.empty(3, device="meta"),
        "quantised": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
    }[odd]()
    sender, _ = pair()
    with pytest.raises(UsageError, match=r"^tensor="):
        sender.send_tensor(value)


def test_a_part_shorter_than_it_should_be_is_no_message() -> None:
    store = FakeValues()
    sender, receiver = pair(store)
    sender.send_tensor(torch.arange(10))
    (part,) = [key for key in store.values if key.endswith("/0.0")]
    store.values[part] = store.values[part][:-1]
    with pytest.raises(DeadlineError):
        receiver.recv_tensor(timeout_s=SOON_S)


@each("dtype", DTYPES)
def test_tensor_of_every_dtype_arrives_bit_for_bit(dtype: str) -> None:
    sender, receiver = pair()
    for shape in [(), (0,), (3,), (2, 0, 5), (2, 3, 4)]:
        sent = tensor_of(dtype, *shape)
        sender.send_tensor(sent)
        assert same(receiver.recv_tensor(), sent)


def test_strided_tensor_arrives_with_its_values() -> None:
    sender, receiver = pair()
    sent = torch.arange(24).view(4, 6).t()[::2]
    sender.send_tensor(sent)
    assert torch.equal(receiver.recv_tensor(), sent)


def test_tensor_is_one_value_of_the_store_and_is_not_copied_before() -> None:
    put: list[Any] = []

    class Store(FakeValues):
        def put_many(self, items: Any, *, replace: bool = False) -> list[Any]:
            items = list(items)
            put.extend(items)
            return super().put_many(items, replace=replace)

    sender, receiver = pair(Store())
    sent = torch.randint(0, 256, (5 * TENSOR_MESSAGE_PART_BYTES_MIN + 17,), dtype=torch.uint8)
    sender.send_tensor(sent)
    assert [key for key, _ in put] == ["pipe/p/p/0/0.0", "pipe/p/p/0"]
    assert put[0][1].data_ptr() == sent.data_ptr()
    assert torch.equal(receiver.recv_tensor(), sent)


def test_parts_are_as_large_as_the_store_takes() -> None:
    assert TENSOR_MESSAGE_PART_BYTES == VALUE_BYTES_MAX


@each("size", [1, 64, 65, 284, 4000, 4001, 5000])
@each("value_bytes_max", [64, 65, 100, 3999, 5000])
def test_tensor_that_the_store_takes_in_parts_only_is_cut_and_joined(
    size: int, value_bytes_max: int
) -> None:
    store = FakeValues()
    store.value_bytes_max = value_bytes_max
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_messages, "TENSOR_MESSAGE_PART_BYTES", 4000)
        patch.setattr(tensor_messages, "TENSOR_MESSAGE_PART_BYTES_MIN", 50)
        sender, receiver = pair(store, timeout_s=1.0)
        sent = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        sender.send_tensor(sent)
        if size <= min(value_bytes_max, 4000):
            assert len(store.values) == 1 + 1
        assert set(store.pins) == set(store.values), "no part is in the store twice"
        assert sum(len(v) for k, v in store.values.items() if "." in k) == size
        assert torch.equal(receiver.recv_tensor(), sent)
        sender.send_tensor(None)
        assert not [key for key in store.values if key.startswith("pipe/p/p/0/0")]


def test_part_as_small_as_it_may_be_that_is_declined_ends_at_the_deadline() -> None:
    store = FakeValues()
    store.value_bytes_max = TENSOR_MESSAGE_PART_BYTES_MIN // 4
    sender, _ = pair(store)
    with pytest.raises(DeadlineError, match=f"must be 1 to {store.value_bytes_max}"):
        sender.send_tensor(torch.zeros(3 << 20, dtype=torch.uint8), timeout_s=SOON_S)
    assert not store.pins


@given(st.lists(st.one_of(st.none(), st.integers(0, 99)), max_size=20), st.integers(1, 4))
def test_messages_come_in_order_and_none_is_lost_or_doubled(
    messages: list[int | None], ahead: int
) -> None:
    sender, receiver = pair()
    got: list[int | None] = []

    def receive() -> None:
        tensor = receiver.recv_tensor()
        got.append(None if tensor is None else int(tensor))

    for i, message in enumerate(messages):
        sender.send_tensor(None if message is None else torch.tensor(message))
        if i >= ahead:
            receive()
    while len(got) < len(messages):
        receive()
    assert got == messages


def test_both_ends_can_send() -> None:
    one, other = pair()
    one.send_tensor(torch.tensor(1))
    other.send_tensor(torch.tensor(2))
    assert (int(other.recv_tensor()), int(one.recv_tensor())) == (1, 2)


def test_nothing_to_receive_ends_at_the_deadline() -> None:
    _, receiver = pair()
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="timed out waiting for message 0"):
        receiver.recv_tensor(timeout_s=SOON_S)
    assert SOON_S <= time.monotonic() - started < PATIENCE_S


def test_sender_waits_for_the_receiver_and_goes_on_when_it_receives() -> None:
    sender, receiver = pair(messages_max=2)
    for i in range(2):
        sender.send_tensor(torch.tensor(i))
    with pytest.raises(DeadlineError, match="no room"):
        sender.send_tensor(torch.tensor(2), timeout_s=SOON_S)
    thread = threading.Thread(target=sender.send_tensor, args=(torch.tensor(2),))
    thread.start()
    assert [int(receiver.recv_tensor()) for _ in range(3)] == [0, 1, 2]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_bytes_under_way_are_bounded_but_one_message_always_fits() -> None:
    sender, receiver = pair(bytes_max=100)
    sender.send_tensor(torch.zeros(60, dtype=torch.uint8))
    with pytest.raises(DeadlineError):
        sender.send_tensor(torch.zeros(60, dtype=torch.uint8), timeout_s=SOON_S)
    receiver.recv_tensor()
    sender.send_tensor(torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(UsageError, match="at most 100"):
        sender.send_tensor(torch.zeros(101, dtype=torch.uint8))


def test_message_is_kept_until_it_is_received_and_dropped_then() -> None:
    store = FakeValues(capacity=8)
    sender, receiver = pair(store)
    sender.send_tensor(torch.tensor(7))
    for i in range(100):
        store.put_many([(f"noise {i}", b"x")])
    assert int(receiver.recv_tensor()) == 7
    sender.send_tensor(None)
    assert not [key for key in store.values if key.startswith("pipe/p/p/0/0")]


def test_store_holds_little_however_much_was_sent() -> None:
    store = FakeValues()
    sender, receiver = pair(store)
    for i in range(50):
        sender.send_tensor(torch.tensor(i))
        receiver.recv_tensor()
    assert len(store.values) <= 5
    assert len(store.pins) <= 5


def test_value_evicted_before_it_was_pinned_is_put_again() -> None:
    store = FakeValues()
    sender, receiver = pair(store)
    store.lose_next_put = 3
    sender.send_tensor(torch.tensor(5))
    assert int(receiver.recv_tensor()) == 5


def test_store_that_declines_is_tried_until_the_deadline_and_nothing_stays_pinned() -> None:
    store = FakeValues(capacity=1)
    held = tensor_messages.hold(store, "other", b"x")
    sender, receiver = pair(store)
    with pytest.raises(DeadlineError, match="all is pinned"):
        sender.send_tensor(torch.tensor(5), timeout_s=SOON_S)
    assert list(store.pins) == ["other"]
    assert held is not None
    tensor_messages.release(store, held)
    store.capacity = 10
    sender.send_tensor(torch.tensor(6))
    assert int(receiver.recv_tensor()) == 6


def test_word_of_the_receiver_that_the_store_declined_is_said_later() -> None:
    store = FakeValues(capacity=2)
    sender, receiver = pair(store, messages_max=1)
    sender.send_tensor(torch.tensor(1))
    assert int(receiver.recv_tensor()) == 1
    assert list(store.values) == ["pipe/p/p/0/0.0", "pipe/p/p/0"]
    store.capacity = 10
    with pytest.raises(DeadlineError):
        receiver.recv_tensor(timeout_s=0)
    sender.send_tensor(torch.tensor(2), timeout_s=SOON_S)
    assert int(receiver.recv_tensor()) == 2


def test_node_that_is_gone_is_a_deadline_not_a_hang() -> None:
    store = FakeValues()
    sender, receiver = pair(store)
    store.gone = True
    with pytest.raises(DeadlineError, match="node gone"):
        sender.send_tensor(torch.tensor(1), timeout_s=SOON_S)
    with pytest.raises(DeadlineError):
        receiver.recv_tensor(timeout_s=SOON_S)
    sender.close(timeout_s=SOON_S)
    receiver.close(timeout_s=SOON_S)


def test_receiver_gets_all_that_was_sent_and_then_hears_of_the_close() -> None:
    sender, receiver = pair()
    sender.send_tensor(torch.tensor(1))
    thread = threading.Thread(target=sender.close)
    thread.start()
    assert int(receiver.recv_tensor()) == 1
    for _ in range(2):
        with pytest.raises(PipeClosedError):
            receiver.recv_tensor()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_sender_hears_that_the_receiver_is_closed_and_holds_nothing_more() -> None:
    store = FakeValues()
    sender, receiver = pair(store)
    sender.send_tensor(torch.tensor(1))
    receiver.close(timeout_s=0)
    with pytest.raises(PipeClosedError):
        sender.send_tensor(torch.tensor(2))
    started = time.monotonic()
    sender.close()
    assert time.monotonic() - started < PATIENCE_S / 2
    assert not store.pins


def test_close_without_a_receiver_ends_at_its_deadline_and_holds_nothing() -> None:
    store = FakeValues()
    sender, _ = pair(store)
    sender.send_tensor(torch.tensor(1))
    sender.close(timeout_s=SOON_S)
    sender.close()
    assert not store.pins
    for use in (lambda: sender.send_tensor(None), sender.recv_tensor):
        with pytest.raises(UsageError, match="is closed"):
            use()


def test_name_that_was_used_before_is_refused() -> None:
    store = FakeValues()
    first, _ = pair(store)
    first.send_tensor(torch.tensor(1))
    second, _ = pair(store)
    with pytest.raises(UsageError, match="was used before"):
        second.send_tensor(torch.tensor(2))
    assert int(pair(store)[1].recv_tensor()) == 1


@each(
    ("name", "options", "field"),
    [
        ("", {}, "name"),
        ("x" * 257, {}, "name"),
        ("p", {"messages_max": 0}, "messages_max"),
        ("p", {"messages_max": 65}, "messages_max"),
        ("p", {"bytes_max": 0}, "bytes_max"),
        ("p", {"bytes_max": TENSOR_MESSAGE_BYTES_MAX + 1}, "bytes_max"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, options: Any, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        Pipe(FakeValues(), name, producer=True, **options)
    assert caught.value.field == field


def test_only_tensors_and_none_can_be_sent() -> None:
    with pytest.raises(UsageError, match="must be a torch tensor or None"):
        pair()[0].send_tensor([1, 2])


SENDER = """
import sys, pathlib, torch
from connector.transfer.pipe import Pipe
from kvstore import Client, Limits
url, run_dir, prefix = sys.argv[1:4]
patient = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)
with Client(url, run_dir=pathlib.Path(run_dir), key_prefix=prefix, limits=patient) as client:
    pipe = Pipe(client, "between processes", producer=True, timeout_s=60)
    for i, name in enumerate(["bfloat16", "float8_e4m3fn", "int64"]):
        pipe.send_tensor(torch.arange(i, i + 6).to(getattr(torch, name)).view(2, 3))
    pipe.send_tensor(None)
    pipe.send_tensor(torch.arange(3 << 20, dtype=torch.uint8))
    doubled = pipe.recv_tensor()
    pipe.send_tensor(doubled * 2)
    pipe.close()
"""


def test_pipe_joins_two_processes_through_the_store(node: NodeProcess, client: Client) -> None:
    options = [node.redis.url, str(node.run_dir), node.key_prefix]
    process = subprocess.Popen([sys.executable, "-c", SENDER, *options])
    pipe = Pipe(client, "between processes", producer=False, timeout_s=60)
    try:
        for i, name in enumerate(["bfloat16", "float8_e4m3fn", "int64"]):
            expected = torch.arange(i, i + 6).to(getattr(torch, name)).view(2, 3)
            assert same(pipe.recv_tensor(), expected)
        assert pipe.recv_tensor() is None
        assert torch.equal(pipe.recv_tensor(), torch.arange(3 << 20, dtype=torch.uint8))
        pipe.send_tensor(torch.tensor([1.5]))
        assert pipe.recv_tensor().tolist() == [3.0]
        with pytest.raises(PipeClosedError):
            pipe.recv_tensor()
        pipe.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(10)
    stats = node_stats(client)
    assert stats["pinned"] == 0


def test_message_survives_a_store_that_must_evict(client: Client) -> None:
    sender, receiver = pair(client)
    sent = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)
    sender.send_tensor(sent)
    for i in range(40):
        client.put(f"noise {i}", bytes(3 << 20))
    assert client.get("noise 0") is None, "something was evicted"
    assert torch.equal(receiver.recv_tensor(), sent)


def test_tensor_larger_than_any_room_of_the_node_in_one_piece_comes_in_parts(
    redis_server: RedisServer,
) -> None:
    """Values pinned here and there leave holes of a few MiB."""
    with (
        NodeProcess(redis_server, size=64 * MIB) as node,
        Client(**node.client_options) as client,
    ):
        pins = []
        for i in range(40):
            client.put(f"noise {i}", bytes(1 << 20))
            if i % 4 == 0:
                pins.append(client.pin(f"noise {i}"))
        sender, receiver = pair(client)
        sent = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8)
        sender.send_tensor(sent)
        assert torch.equal(receiver.recv_tensor(), sent)
        for pin in pins:
            if pin is not None:
                pin.close()
