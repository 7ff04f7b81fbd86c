"""How blocks are read of nodes on other hosts: what each is asked, by when, and what is told.

Longer than other files: one class is under test, and all of it needs the ways at its head."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from stores import announcement

from kvstore.circuit_breaker import BreakerState
from kvstore.client.remote import reader as reader_module
from kvstore.client.remote.node_directory import KnownNode
from kvstore.client.remote.reader import (
    REPORT_TIMEOUT_S,
    TOUCH_TIMEOUT_S,
    UNCHECKED_REASON,
    RemoteNodes,
)
from kvstore.errors import NodeUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.nodedir import Announcement
from kvstore.protocol.control import Op
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.transport.cuda_fabric import NAME as FABRIC
from kvstore.transport.cuda_memory import NAME as CUDA_IPC
from kvstore.transport.nixl.transport import NAME as NIXL
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import CHECKSUM_REASON
from kvstore.transport.stream.transport import NAME as STREAM
from kvstore.types import Key, Location

NOW = 1024.0
WORDS = {
    node_id: announcement(node_id=node_id, transports={STREAM: "tcp://there:7400"})
    for node_id in (7, 8)
}
HIT, MISS, FAILED = Outcome(Read.HIT), Outcome(Read.MISS), Outcome(Read.FAILED, "broken")
DAMAGED = Outcome(Read.MISS, CHECKSUM_REASON)


class Clock:
    """Stands still unless somebody moves it."""

    now = NOW

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reader_module, "time", clock)
    return clock


@pytest.fixture
def nodes(clock: Clock) -> Iterator[RemoteNodes]:
    index = MemoryIndex()
    for node_id, word in WORDS.items():
        index.announce(node_id, word.pack(), 600.0)
    made = RemoteNodes(index, (STREAM,), StreamSecurity(), 1.0)
    yield made
    made.close()


Told = list[tuple[int, list[object], float]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What nodes are told beside the reads: by node id, the message, until when."""
    seen: Told = []

    def tell(stream: Any, word: Announcement, message: list[object], deadline: float) -> None:
        seen.append((word.node_id, message, deadline))

    monkeypatch.setattr(reader_module, "tell", tell)
    return seen


class Way:
    """A transport that answers as it was told, and remembers what it was asked by when."""

    def __init__(self, answers: dict[int, Outcome] | None = None) -> None:
        self._answers = answers or {}
        self.asked: list[tuple[list[int], float]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def read(self, word: Any, batch: Sequence[Wanted], deadline: float) -> list[Outcome]:
        self.asked.append(([one.key[0] for one in batch], deadline))
        self.meanwhile()
        return [self._answers.get(one.key[0], HIT) for one in batch]

    def close(self) -> None:
        pass


def wanted(number: int, node_id: int = 7, checksum: int = 1, length: int = 100) -> Wanted:
    location = Location(node_id, 1, 0, 0, 1, 0, length, checksum)
    return Wanted(bytes([number]) * 32, location, (memoryview(bytearray(length)),))


def by(nodes: RemoteNodes, *ways: tuple[str, Way]) -> None:
    nodes._ways = lambda word: list(ways)  # type: ignore[method-assign, list-item, return-value]


def known(nodes: RemoteNodes, node_id: int = 7) -> KnownNode:
    assert nodes.node(node_id, 1, NOW) is not None
    found = nodes.directory.get(node_id)
    assert found is not None
    return found


def keys(*numbers: int) -> bytes:
    return b"".join(bytes([number]) * 32 for number in numbers)


# --- by when ----------------------------------------------------------------


@pytest.mark.parametrize("given", [None, 0.25, 60.0])
def test_the_time_of_a_read_is_that_of_its_bytes_or_less(
    nodes: RemoteNodes, given: float | None
) -> None:
    stream = Way()
    by(nodes, (STREAM, stream))
    deadline = None if given is None else NOW + given
    assert nodes.read([wanted(1), wanted(2)], deadline) == [HIT, HIT]
    of_its_bytes = NOW + nodes.timeout_s(200)
    assert stream.asked == [([1, 2], min(of_its_bytes, deadline or of_its_bytes))]


def test_all_nodes_are_read_at_once_and_each_answer_is_that_of_its_block(
    nodes: RemoteNodes,
) -> None:
    stream = Way({2: MISS, 3: FAILED})
    by(nodes, (STREAM, stream))
    batch = [wanted(1), wanted(2, node_id=8), wanted(3, node_id=8), wanted(4)]
    assert nodes.read(batch, NOW + 60) == [HIT, MISS, FAILED, HIT]
    until = NOW + nodes.timeout_s(200)
    assert sorted(stream.asked) == [([1, 4], until), ([2, 3], until)]


@pytest.mark.parametrize(
    ("left_s", "asked"), [(-1.0, False), (0.0, False), (2.0**-20, True), (0.5, True)]
)
def test_without_time_left_nobody_is_asked(nodes: RemoteNodes, left_s: float, asked: bool) -> None:
    stream = Way()
    by(nodes, (STREAM, stream))
    (outcome,) = nodes.read([wanted(1)], NOW + left_s)
    assert (outcome.read is Read.HIT) is asked
    assert len(stream.asked) == asked
    assert known(nodes).breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("way", [STREAM, NIXL])
def test_a_node_that_is_not_there_fails_and_counts_for_the_way_that_is_allowed(
    nodes: RemoteNodes, way: str
) -> None:
    nodes._allowed = (way,)
    stream = Way()
    by(nodes, (STREAM, stream))
    outcomes = nodes.read([wanted(1, node_id=9), wanted(2, node_id=9)])
    assert [outcome.read for outcome in outcomes] == [Read.FAILED] * 2
    assert stream.asked == []
    assert {name: count for name, count in nodes.counts.items() if count} == {f"{way}_failed": 2}


def test_who_fails_meanwhile_is_not_asked_and_nobodys_try_is_used_up(
    nodes: RemoteNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question whether it is there, and the read."""
    stream = Way()
    by(nodes, (STREAM, stream))
    its = known(nodes)
    its.breaker.failed(NOW, hung=True)
    monkeypatch.setattr(nodes, "node", lambda *_: WORDS[7])
    assert nodes.read([wanted(1)])[0].read is Read.FAILED
    monkeypatch.setattr(nodes, "node", lambda *_: None)
    probe_at = its.breaker.probe_at
    reader_module.time.now = probe_at  # type: ignore[attr-defined]
    assert nodes.read([wanted(1)])[0].read is Read.FAILED
    assert its.breaker.allows(probe_at), "its next try is left for who asks it"
    monkeypatch.setattr(nodes, "node", lambda *_: WORDS[7])
    monkeypatch.setattr(nodes.directory, "get", lambda _: None)
    assert nodes.read([wanted(1)])[0].read is Read.FAILED
    assert stream.asked == []


# --- what becomes of the node -----------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "took_s", "state"),
    [
        (0.25, 0.25, BreakerState.CLOSED),
        (0.25, 0.5, BreakerState.CLOSED),
        (0.25, 0.125, BreakerState.OPEN),
        (0.5, 0.5, BreakerState.OPEN),
        (0.75, 0.75, BreakerState.OPEN),
    ],
)
def test_a_read_that_failed_for_want_of_time_is_not_the_nodes_fault(
    nodes: RemoteNodes, clock: Clock, left_s: float, took_s: float, state: BreakerState
) -> None:
    """A node may take a second; who had less than half of it, and used it up, was hurried."""
    stream = Way({1: FAILED})
    by(nodes, (STREAM, stream))
    its = known(nodes)
    stream.meanwhile = lambda: setattr(clock, "now", NOW + took_s)
    assert nodes.read([wanted(1)], NOW + left_s) == [FAILED]
    assert its.breaker.state is state
    assert its.believed_until == float("-inf")
    assert its.answered_at == 0.0


@pytest.mark.parametrize("answer", [HIT, MISS, DAMAGED])
def test_a_node_that_answers_is_there_whatever_it_has(
    nodes: RemoteNodes, told: Told, caplog: pytest.LogCaptureFixture, answer: Outcome
) -> None:
    by(nodes, (STREAM, Way({1: answer})))
    its = known(nodes)
    its.breaker.failed(NOW, hung=False)
    assert nodes.read([wanted(1)]) == [answer]
    assert its.answered_at > 0
    assert its.breaker.state is BreakerState.CLOSED
    assert "cannot be read" not in caplog.text


def test_a_failure_is_said_with_its_reason(
    nodes: RemoteNodes, caplog: pytest.LogCaptureFixture
) -> None:
    by(nodes, (STREAM, Way({2: FAILED})))
    nodes.read([wanted(1), wanted(2)])
    assert "cannot be read for now: broken" in caplog.text


@pytest.mark.parametrize("left_s", [0.125, 0.75])
def test_a_node_is_told_which_blocks_arrived_damaged_and_no_others(
    nodes: RemoteNodes, told: Told, left_s: float
) -> None:
    by(nodes, (STREAM, Way({1: DAMAGED, 2: MISS, 4: DAMAGED})))
    nodes.read([wanted(number) for number in (1, 2, 3, 4)], NOW + left_s)
    until = NOW + min(left_s, REPORT_TIMEOUT_S)
    assert told == [(7, [Op.SUSPECT, 0, keys(1, 4)], until)]


def test_what_was_read_is_counted_by_its_way(nodes: RemoteNodes, told: Told) -> None:
    by(nodes, (STREAM, Way({2: MISS, 3: DAMAGED, 4: FAILED, 5: FAILED})))
    nodes.read([wanted(number) for number in range(1, 6)] + [wanted(6, length=50)])
    assert nodes.counts == {
        **dict.fromkeys(nodes.counts, 0),
        "stream_hits": 2,
        "stream_bytes": 150,
        "stream_misses": 2,
        "stream_checksum": 1,
        "stream_failed": 2,
    }


# --- by which way -----------------------------------------------------------


@pytest.mark.parametrize(
    ("nixl", "allowed", "ways"),
    [
        (None, (STREAM,), [STREAM]),
        ((False, True), (STREAM, NIXL), [STREAM]),
        ((True, True), (STREAM, NIXL), [NIXL, STREAM]),
        ((True, False), (STREAM, NIXL), [STREAM]),
        ((True, False), (NIXL,), [NIXL]),
        ((True, True), (NIXL,), [NIXL]),
    ],
)
def test_nixl_comes_first_where_it_is_ready_and_alone_where_it_is_all_there_is(
    nodes: RemoteNodes, nixl: Any, allowed: tuple[str, ...], ways: list[str]
) -> None:
    if nixl is not None:
        usable, ready = nixl
        nodes._nixl = SimpleNamespace(  # type: ignore[assignment]
            usable=lambda _: usable, ready=lambda _: ready, close=lambda: None
        )
    nodes._allowed = allowed
    found = nodes._ways(replace(WORDS[7], transports={STREAM: "", NIXL: ""}))
    assert [name for name, _ in found] == ways
    assert [way for name, way in found if name == STREAM] == [nodes.stream] * (STREAM in ways)


@pytest.mark.parametrize("offered", [False, True])
@pytest.mark.parametrize("usable", [False, True])
@pytest.mark.parametrize("nixl", [False, True])
def test_nvlink_comes_before_nixl_where_both_ends_have_it(
    nodes: RemoteNodes, offered: bool, usable: bool, nixl: bool
) -> None:
    def way(usable: bool) -> Any:
        return SimpleNamespace(usable=lambda _: usable, ready=lambda _: True, close=lambda: None)

    nodes._allowed = (STREAM, NIXL, FABRIC)
    nodes._nixl = way(True) if nixl else None
    transports = {STREAM: "", **({FABRIC: ""} if offered else {}), **({NIXL: ""} if nixl else {})}
    word = replace(WORDS[7], transports=transports)
    others = [NIXL, STREAM] if nixl else [STREAM]
    assert [name for name, _ in nodes._ways(word)] == others, "it is not there"
    nodes._fabric = way(usable)
    by_nvlink = [FABRIC] if offered and usable else []
    assert [name for name, _ in nodes._ways(word)] == [*by_nvlink, *others]


@pytest.mark.parametrize("way", [NIXL, STREAM])
@pytest.mark.parametrize("in_vram", [False, True])
def test_what_nixl_wrote_into_vram_is_counted_apart(
    nodes: RemoteNodes, told: Told, way: str, in_vram: bool
) -> None:
    counts = dict(nodes.counts)
    assert set(counts) >= {"nixl_vram_hits", "nixl_vram_bytes"}
    by(nodes, (way, Way({1: HIT._replace(in_vram=in_vram)})))
    nodes.read([wanted(1)])
    took = "nixl_vram" if in_vram and way == NIXL else way
    assert nodes.counts == {**counts, f"{took}_hits": 1, f"{took}_bytes": 100}


def test_a_node_that_does_not_offer_nixl_is_not_tried_by_it(nodes: RemoteNodes) -> None:
    def usable(_: object) -> bool:
        raise AssertionError("asked of a node that offers none")

    nodes._nixl = SimpleNamespace(usable=usable, close=lambda: None)  # type: ignore[assignment]
    nodes._allowed = (STREAM, NIXL)
    assert nodes._ways(replace(WORDS[7], transports={STREAM: ""})) == [(STREAM, nodes.stream)]


def test_what_fails_one_way_is_read_the_next_in_the_other_half_of_the_time(
    nodes: RemoteNodes, told: Told
) -> None:
    first, second = Way({2: FAILED, 3: MISS, 4: FAILED}), Way({4: MISS})
    by(nodes, (NIXL, first), (STREAM, second))
    outcomes = nodes.read([wanted(number) for number in (1, 2, 3, 4)], NOW + 0.5)
    assert outcomes == [HIT, HIT, MISS, MISS]
    assert first.asked == [([1, 2, 3, 4], NOW + 0.25)]
    assert second.asked == [([2, 4], NOW + 0.5)]
    assert told == [(7, [Op.TOUCH, 0, keys(1)], NOW + TOUCH_TIMEOUT_S)]
    counts = {name: count for name, count in nodes.counts.items() if count}
    assert counts == {
        "nixl_hits": 1,
        "nixl_bytes": 100,
        "nixl_misses": 1,
        "nixl_failed": 2,
        "stream_hits": 1,
        "stream_bytes": 100,
        "stream_misses": 1,
    }


def test_no_way_is_asked_for_nothing(nodes: RemoteNodes, told: Told) -> None:
    first, second = Way({1: MISS, 2: MISS}), Way()
    by(nodes, (NIXL, first), (STREAM, second))
    assert nodes.read([wanted(1), wanted(2)]) == [MISS, MISS]
    assert second.asked == []
    assert told == []
    by(nodes, (NIXL, Way({1: FAILED})))
    assert nodes.read([wanted(1)]) == [FAILED]


def test_a_block_without_a_checksum_is_read_by_a_stream_alone(
    nodes: RemoteNodes, told: Told
) -> None:
    first, second = Way({1: FAILED}), Way()
    by(nodes, (NIXL, first), (STREAM, second))
    batch = [wanted(1), wanted(2, checksum=0), wanted(3), wanted(4, checksum=0)]
    assert nodes.read(batch, NOW + 0.5) == [HIT] * 4
    assert first.asked == [([1, 3], NOW + 0.25)]
    assert second.asked == [([1], NOW + 0.5), ([2, 4], NOW + 0.5)]
    del first.asked[:], second.asked[:]
    assert nodes.read(batch[1::2], NOW + 0.5) == [HIT] * 2
    assert (first.asked, second.asked) == ([], [([2, 4], NOW + 0.5)])
    alone = Way()
    by(nodes, (NIXL, alone))
    unread = Outcome(Read.MISS, UNCHECKED_REASON)
    assert nodes.read(batch, NOW + 0.5) == [HIT, unread, HIT, unread]
    assert [numbers for numbers, _ in alone.asked] == [[1, 3]]
    by(nodes, (STREAM, second))
    assert nodes.read(batch, NOW + 0.5) == [HIT] * 4


# --- device memory of this host ---------------------------------------------


class Vram:
    """The nodes in VRAM that `words` are of."""

    def __init__(self, *words: Announcement) -> None:
        self._words = {word.node_id: word for word in words}
        self.way = Way()

    def node(self, node_id: int, epoch: int, now: float) -> Announcement | None:
        return self._words.get(node_id)

    def read(self, word: Announcement, batch: Sequence[Wanted], deadline: float) -> Any:
        return self.way.read(word, batch, deadline)

    def there(self, word: Announcement, blocks: Sequence[tuple[Key, Location]]) -> list[bool]:
        return [location.length == 1 for _, location in blocks]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("given", [0.25, 60.0])
def test_a_node_in_vram_is_read_as_such_and_no_other(nodes: RemoteNodes, given: float) -> None:
    vram, stream = Vram(announcement(node_id=5)), Way()
    nodes.vram = vram  # type: ignore[assignment]
    by(nodes, (STREAM, stream))
    batch = [wanted(1, node_id=5), wanted(2), wanted(3, node_id=5)]
    assert nodes.read(batch, NOW + given) == [HIT] * 3
    assert vram.way.asked == [([1, 3], NOW + min(given, nodes.timeout_s(200)))]
    assert [numbers for numbers, _ in stream.asked] == [[2]]


# --- whether it is there ----------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], float]]:
    """What was asked of streams. They have blocks of 100 bytes; node 8 does not answer."""
    asked: list[tuple[list[int], float]] = []

    def look(stream: Any, word: Announcement, blocks: Any, deadline: float) -> list[bool]:
        asked.append(([key[0] for key, _ in blocks], deadline))
        if word.node_id == 8:
            raise NodeUnavailableError("silent")
        return [location.length == 100 for _, location in blocks]

    monkeypatch.setattr(reader_module, "look", look)
    return asked


def there(nodes: RemoteNodes, *asked: Wanted) -> list[bool]:
    return nodes.there([(one.key, one.location) for one in asked])


def test_each_node_says_which_blocks_it_has_by_a_deadline_that_claims_do_not_move(
    nodes: RemoteNodes, looks: list[tuple[list[int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "STREAM_BLOCKS_MAX", 2)
    asked = [wanted(1, length=10_000_000), wanted(2), wanted(3, node_id=8), wanted(4)]
    assert there(nodes, *asked) == [False, True, False, True]
    until = NOW + nodes.timeout_s(0)
    assert sorted(looks) == [([1, 2], until), ([3], until), ([4], until)]
    assert known(nodes).answered_at > 0
    its = nodes.directory.get(8)
    assert its is not None
    assert its.breaker.state is BreakerState.OPEN


@pytest.mark.parametrize(
    ("left_s", "state"), [(0.25, BreakerState.CLOSED), (0.75, BreakerState.OPEN)]
)
def test_a_question_that_failed_for_want_of_time_is_not_the_nodes_fault(
    nodes: RemoteNodes,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    left_s: float,
    state: BreakerState,
) -> None:
    its = known(nodes, 8)

    def look(*_: object) -> list[bool]:
        clock.now = NOW + left_s
        raise NodeUnavailableError("silent")

    monkeypatch.setattr(reader_module, "look", look)
    asked = wanted(1, node_id=8)
    assert nodes.there([(asked.key, asked.location)], NOW + left_s) == [False]
    assert its.breaker.state is state


def test_nobody_is_asked_when_the_time_is_over(
    nodes: RemoteNodes, looks: list[tuple[list[int], float]]
) -> None:
    asked = wanted(1)
    assert nodes.there([(asked.key, asked.location)], NOW) == [False]
    assert looks == []


def test_of_a_node_that_is_not_there_nothing_is_known(
    nodes: RemoteNodes,
    looks: list[tuple[list[int], float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert there(nodes, wanted(1, node_id=9), wanted(2, node_id=9)) == [False, False]
    nodes.vram = Vram()  # type: ignore[assignment]
    assert there(nodes, wanted(1, node_id=9)) == [False]
    monkeypatch.setattr(nodes.directory, "get", lambda _: None)
    assert there(nodes, wanted(1)) == [False]
    assert looks == []


def test_a_node_in_vram_is_asked_as_such_and_no_other(
    nodes: RemoteNodes, looks: list[tuple[list[int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    vram = announcement(node_id=5, transports={CUDA_IPC: "there"})
    nodes.vram = Vram(vram)  # type: ignore[assignment]
    asked = [wanted(1, node_id=5, length=1), wanted(2, node_id=5), wanted(3)]
    assert there(nodes, *asked) == [True, False, True]
    assert [numbers for numbers, _ in looks] == [[3]]
    nodes.vram = None
    monkeypatch.setattr(nodes, "node", lambda *_: vram)
    assert there(nodes, wanted(1)) == [True]  # by a stream, if that is how it is reached


# --- threads ----------------------------------------------------------------


def test_what_a_read_of_another_node_raises_is_raised(nodes: RemoteNodes) -> None:
    class Broken(Way):
        def read(self, word: Any, batch: Sequence[Wanted], deadline: float) -> list[Outcome]:
            if word.node_id == 8:
                raise ZeroDivisionError
            return super().read(word, batch, deadline)

    by(nodes, (STREAM, Broken()))
    with pytest.raises(ZeroDivisionError):
        nodes.read([wanted(1), wanted(2, node_id=8)])


def test_of_nodes_that_no_thread_could_ask_nothing_is_known(
    nodes: RemoteNodes, looks: list[tuple[list[int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_start", lambda *_: None)
    assert there(nodes, wanted(1), wanted(2, node_id=8)) == [True, False]
    assert [numbers for numbers, _ in looks] == [[1]]


def test_threads_are_kept_for_the_next_read_and_waited_for_by_no_close(
    nodes: RemoteNodes,
) -> None:
    pool, release = nodes._pool(), threading.Event()
    assert nodes._pool() is pool
    begun = threading.Event()

    def stuck() -> None:
        begun.set()
        release.wait(20)

    pool.submit(stuck)
    assert begun.wait(20)
    freed = threading.Timer(5, release.set)
    freed.start()
    nodes.close()
    assert not release.is_set()
    freed.cancel()
    release.set()
    with pytest.raises(RuntimeError):
        pool.submit(stuck)
    nodes.close()
