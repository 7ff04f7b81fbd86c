"""Connections to a node's control socket have their turns, however much one of them has sent."""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from redis_servers import RedisServer, wait_until
from stores import NodeThread, in_loop

from kvstore.client.nodes.control import ControlChannel
from kvstore.core.events import Explain, Listing, Reserve, SessionDead, Stat
from kvstore.errors import NodeUnavailableError
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.node.control.turns import MESSAGE_ITEMS, TURN_ITEMS, Turns
from kvstore.nodedir import NodeDir
from kvstore.protocol import control_events
from kvstore.protocol.control import Op, packed
from kvstore.protocol.control import unpacker as unpacker_of_answers
from kvstore.types import KEY_BYTES

LONG_MS = 20_000
SENT = 1000
REQUEST = 1000
"""Number of the first of them, beyond those of the channel itself."""
GREEDY = 16
KEYS = os.urandom(BATCH_KEYS_MAX * KEY_BYTES)


def socket_of(channel: ControlChannel) -> socket.socket:
    """Return its connection, to say over it what no client says."""
    connection = channel._socket
    assert connection is not None
    return connection


@pytest.fixture
def node() -> Iterator[NodeThread]:
    with RedisServer() as redis, NodeThread(redis) as node:
        yield node


Claim = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]
"""Slots that a client says to have reserved and pinned."""


def channel(node: NodeThread, held: Callable[[], Claim] = lambda: ((), ())) -> ControlChannel:
    directory = NodeDir(node.run_dir, "node")
    word = directory.announcement()
    assert word is not None
    channel = ControlChannel(directory, (word.node_id, word.epoch), 10.0, held)
    channel.request(Op.STAT)
    return channel


class Handled:
    """Notes what the node carries out, in order; the first waits for `go_on`."""

    def __init__(self, node: NodeThread, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[type] = []
        self.items: list[int] = []
        """Blocks that each of them named."""
        self.begun, self.go_on = threading.Event(), threading.Event()
        core = node.node.core
        handle = core.handle

        def noted(event: Any, now: float) -> Any:
            self.kinds.append(type(event))
            named = getattr(event, "keys", None) or getattr(event, "slots", None) or ()
            self.items.append(len(named))
            self.begun.set()
            self.go_on.wait(10)
            return handle(event, now)

        monkeypatch.setattr(core, "handle", noted)


def test_who_asks_and_goes_fills_no_log(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio says of each answer that it was lost."""
    with closing(channel(node)) as gone, closing(channel(node)) as other:
        handled = Handled(node, monkeypatch)
        socket_of(gone).sendall(b"".join(packed([Op.STAT, REQUEST + i]) for i in range(SENT)))
        assert handled.begun.wait(10)
        socket_of(gone).shutdown(socket.SHUT_RDWR)
        socket_of(gone).close()
        handled.go_on.set()
        other.request(Op.STAT)
        assert handled.kinds.count(Stat) > 6, "asyncio says nothing of the first few"
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_who_sends_thousands_of_requests_at_once_leaves_the_others_their_turn(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of the group may ask for lists, and one takes a millisecond."""
    with closing(channel(node)) as greedy, closing(channel(node)) as other:
        handled = Handled(node, monkeypatch)
        lists = [packed([Op.LIST, REQUEST + i, b"", 1]) for i in range(SENT)]
        socket_of(greedy).sendall(b"".join(lists))
        assert handled.begun.wait(10)
        asked = other.post(Op.STAT)
        handled.go_on.set()
        other.collect(asked)
        before = handled.kinds[: handled.kinds.index(Stat)]
        assert before.count(Listing) <= 3 * TURN_ITEMS // MESSAGE_ITEMS


def test_a_small_request_waits_for_one_turn_and_not_for_large_ones(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        greedy = [stack.enter_context(closing(channel(node))) for _ in range(GREEDY)]
        other = stack.enter_context(closing(channel(node)))
        handled = Handled(node, monkeypatch)
        asked = [one.post(Op.EXPLAIN, KEYS) for one in greedy]
        assert handled.begun.wait(10)
        small = other.post(Op.STAT)
        handled.go_on.set()
        other.collect(small)
        place = handled.kinds.index(Stat)
        assert sum(handled.items[:place]) <= 2 * TURN_ITEMS
        for one, ticket in zip(greedy, asked, strict=True):
            fates, _, _ = one.collect(ticket)
            assert len(fates) == BATCH_KEYS_MAX
        assert max(handled.items) <= TURN_ITEMS
        assert sum(handled.items) == GREEDY * BATCH_KEYS_MAX


HELD = 4 * TURN_ITEMS
NAMESPACE = 7


def fill(client: ControlChannel) -> None:
    raw = os.urandom(HELD * KEY_BYTES)
    assert client.request(Op.RESERVE, NAMESPACE, raw, 1, 0, 0, [b"v"] * HELD, 0) == [0] * HELD


@pytest.mark.parametrize(
    ("op", "words"), [(Op.CLEAR, (NAMESPACE,)), (Op.RESET, (1, [NAMESPACE]))], ids=str
)
def test_a_small_request_waits_for_one_turn_of_who_drops_all_that_a_node_has(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch, op: Op, words: tuple[object, ...]
) -> None:
    with closing(channel(node)) as greedy, closing(channel(node)) as other:
        fill(greedy)
        handled = Handled(node, monkeypatch)
        asked = greedy.post(op, *words)
        assert handled.begun.wait(10)
        small = other.post(Op.STAT)
        handled.go_on.set()
        assert other.collect(small)["blocks"] >= HELD - 2 * TURN_ITEMS
        assert max(handled.items) <= TURN_ITEMS
        answer = greedy.collect(asked)
        assert answer == HELD if op is Op.CLEAR else answer[1] == HELD
        assert other.request(Op.STAT)["blocks"] == 0


def reserve(client: ControlChannel, count: int = HELD) -> None:
    raw = os.urandom(count * KEY_BYTES)
    client.request(Op.RESERVE, NAMESPACE, raw, 4096, 0, 0, None, 0)


def came_back(client: ControlChannel) -> dict[str, int]:
    """What the node says after another HELLO."""
    client.doubt()
    answer: dict[str, int] = client.request(Op.STAT)
    return answer


def test_a_small_request_waits_for_one_turn_of_who_comes_back_without_what_it_held(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(channel(node)) as greedy, closing(channel(node)) as other:
        reserve(greedy)
        handled = Handled(node, monkeypatch)
        back: list[dict[str, int]] = []
        returns = threading.Thread(target=lambda: back.append(came_back(greedy)))
        returns.start()
        assert handled.begun.wait(10)
        small = other.post(Op.STAT)
        handled.go_on.set()
        assert other.collect(small)["reserved"] >= HELD - 2 * TURN_ITEMS
        returns.join()
        assert [said["reserved"] for said in back] == [0], "welcomed when all of it is free"
        assert max(handled.items) <= TURN_ITEMS
        assert sum(handled.items) == HELD


def test_a_small_request_waits_for_one_turn_of_who_leaves_with_thousands_of_slots(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(channel(node)) as other:
        greedy = channel(node)
        reserve(greedy)
        handled = Handled(node, monkeypatch)
        greedy.close()
        assert handled.begun.wait(10)
        small = other.post(Op.STAT)
        handled.go_on.set()
        assert other.collect(small)["reserved"] >= HELD - 2 * TURN_ITEMS
        ended = HELD // TURN_ITEMS + 1
        wait_until(lambda: handled.kinds.count(SessionDead) == ended, "it is forgotten")
        assert other.request(Op.STAT)["reserved"] == 0
        assert max(handled.items) <= TURN_ITEMS


def test_who_claims_thousands_of_slots_is_read_in_turns(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    rows = control_events._tuples

    def counted(field: str, raw: list[object], width: int) -> list[object]:
        read.append(len(raw))
        return rows(field, raw, width)

    claims: list[Claim] = [((), ())]
    with closing(channel(node, lambda: claims[-1])) as greedy, closing(channel(node)) as other:
        monkeypatch.setattr(control_events, "_tuples", counted)
        turns: list[int] = []
        next_turn = Turns._next
        monkeypatch.setattr(Turns, "_next", lambda self: (turns.append(len(read)), next_turn(self)))
        claims += [([(slot, 1) for slot in range(HELD)], [(slot, 1, 1) for slot in range(HELD)])]
        assert came_back(greedy)["reserved"] == 0
        assert read == [TURN_ITEMS] * (2 * HELD // TURN_ITEMS)
        assert max(b - a for a, b in itertools.pairwise(turns)) <= 2
        assert other.request(Op.STAT)["reserved"] == 0


def test_a_claim_that_is_refused_in_a_later_turn_ends_its_connection_with_the_reason(
    node: NodeThread,
) -> None:
    with closing(channel(node)) as other:
        claims: list[Claim] = [((), ())]
        client = channel(node, lambda: claims[-1])
        claims += [([(slot, 1) for slot in range(HELD)] + [(1, -1)], ())]
        with pytest.raises(NodeUnavailableError, match="reserved="):
            came_back(client)
        client.close()
        assert other.request(Op.STAT)["reserved"] == 0


def test_who_says_hello_anew_in_the_middle_of_its_own_keeps_what_it_claims_then(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older HELLO frees nothing any more: it did not know of what the later one claims."""
    kept: list[tuple[int, int]] = []
    with closing(channel(node)) as client, closing(channel(node, lambda: (kept, ()))) as newer:
        reserve(client, BATCH_KEYS_MAX)
        granted = [*node.node.core.blocks.by_key.values()][-TURN_ITEMS:]
        kept += [(slot.slot_id, slot.generation) for slot in granted]
        newer._disconnect()
        newer._client_id, newer._numbers = client._client_id, itertools.count(1001)
        handled = Handled(node, monkeypatch)

        def comes_back() -> None:
            with suppress(NodeUnavailableError):
                came_back(client)

        with ThreadPoolExecutor(2) as threads:
            older = threads.submit(comes_back)
            assert handled.begun.wait(10)
            said = threads.submit(newer.request, Op.STAT)
            time.sleep(0.1)  # it is connected, and waits for the node
            handled.go_on.set()
            assert said.result()["reserved"] == TURN_ITEMS
            older.result()
        assert newer.request(Op.STAT)["reserved"] == TURN_ITEMS


def test_what_others_tell_was_reset_is_dropped_in_turns_and_once(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = node.node
    told = [(50, (NAMESPACE,))]
    with closing(channel(node)) as client:
        fill(client)
        handled = Handled(node, monkeypatch)
        handled.go_on.set()
        monkeypatch.setattr(
            inner._resets, "unknown_to", lambda known, words: [] if known.knows(50) else told
        )
        for _ in range(3):  # heartbeats, while it is under way
            in_loop(inner, inner._hear, [])
        wait_until(lambda: inner.core.resets.knows(50), "it is done")
        assert client.request(Op.STAT)["blocks"] == 0
        assert sum(handled.items) == HELD
        assert max(handled.items) <= TURN_ITEMS


def test_large_requests_of_several_clients_go_on_side_by_side(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(channel(node)) as first, closing(channel(node)) as second:
        handled = Handled(node, monkeypatch)
        asked = first.post(Op.EXPLAIN, KEYS)
        assert handled.begun.wait(10)
        dropped = second.post(Op.DROP, KEYS)
        handled.go_on.set()
        first.collect(asked)
        second.collect(dropped)
        explains = [i for i, kind in enumerate(handled.kinds) if kind is Explain]
        between = [b - a - 1 for a, b in itertools.pairwise(explains)]
        assert max(between) == 1
        assert sum(between) >= len(explains) - 2


def test_what_a_client_asked_on_a_connection_that_it_left_is_not_carried_on(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said that it holds nothing; what is granted after that nobody would give back."""
    with closing(channel(node)) as client, closing(channel(node)) as other:
        handled = Handled(node, monkeypatch)
        client.post(Op.RESERVE, 1, KEYS, 4096, 0, 0, None, 0)
        assert handled.begun.wait(10)
        client._disconnect()
        handled.go_on.set()
        client.request(Op.STAT)
        assert 0 < handled.kinds.count(Reserve) < BATCH_KEYS_MAX // TURN_ITEMS
        assert other.request(Op.STAT)["reserved"] == 0


def test_all_that_came_in_one_piece_is_answered_in_its_order(node: NodeThread) -> None:
    with closing(channel(node)) as greedy:
        connection = socket_of(greedy)
        connection.sendall(b"".join(packed([Op.STAT, REQUEST + i]) for i in range(SENT)))
        seen: list[int] = []
        unpacker = unpacker_of_answers()
        while len(seen) < SENT:
            data = connection.recv(1 << 16)
            assert data
            unpacker.feed(data)
            seen += [number for number, _, _ in unpacker]
        assert seen == list(range(REQUEST, REQUEST + SENT))


def test_nothing_more_is_carried_out_for_who_lets_answers_pile_up(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.node.control.control_server.MESSAGE_BYTES_MAX", 1000)
    with closing(channel(node)) as greedy, closing(channel(node)) as other:
        handled = Handled(node, monkeypatch)
        handled.go_on.set()
        connection = socket_of(greedy)
        lists = [packed([Op.STAT, REQUEST + i]) for i in range(10 * SENT)]
        connection.sendall(b"".join(lists))
        hung_up = select.poll()
        hung_up.register(connection, 0)  # POLLHUP is always told, and nothing is to be read
        assert hung_up.poll(LONG_MS)
        other.request(Op.LIST, b"", 1)
        assert handled.kinds.count(Stat) < 5 * SENT


def test_bytes_that_are_no_message_end_a_connection_also_after_its_first_turn(
    node: NodeThread,
) -> None:
    with closing(channel(node)) as greedy:
        socket_of(greedy).sendall(packed([Op.TOUCH, 0, b""]) * SENT + b"\xc1")
        assert socket_of(greedy).recv(1) == b""
