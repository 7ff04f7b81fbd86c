"""The channel to a node, to one that does not answer."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest
from own_python import holds_in_child

from kvstore.circuit_breaker import BreakerState
from kvstore.client.nodes import control as control_module
from kvstore.client.nodes import deadlines
from kvstore.client.nodes.control import (
    CATCH_UP_TRIES,
    PROBE_TIMEOUT_S,
    SAY_CONNECT_TIMEOUT_S,
    ControlChannel,
)
from kvstore.errors import DeadlineError, InternalError, NodeUnavailableError, UsageError
from kvstore.nodedir import NodeDir
from kvstore.protocol import control
from kvstore.protocol.control import Op
from kvstore.protocol.control_replies import InvalidReplyError

TIMEOUT_S = 60.0


@pytest.fixture
def listening(tmp_path):
    """A channel, and what it connects to: the kernel takes connections, and nobody answers yet."""
    directory = NodeDir(tmp_path, "node")
    directory.leases.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory.socket))
        server.listen(8)
        channel = ControlChannel(directory, (1, 1), TIMEOUT_S, lambda: ((), ()))
        yield channel, server
        channel.close()


@pytest.fixture
def channel(listening):
    """To a stopped node."""
    return listening[0]


def test_asking_whether_a_stopped_node_answers_again_costs_no_whole_deadline(channel, monkeypatch):
    monkeypatch.setattr(control_module, "FIRST_ANSWER_TIMEOUT_S", 0.0)  # it has answered before
    channel._breaker.failed(time.monotonic() - TIMEOUT_S)
    begun = time.monotonic()
    with pytest.raises(DeadlineError):
        channel.request(Op.STAT)
    assert PROBE_TIMEOUT_S <= time.monotonic() - begun < TIMEOUT_S / 2
    with pytest.raises(NodeUnavailableError, match="did not answer lately"):
        channel.request(Op.STAT)


def test_a_caller_in_a_hurry_does_not_keep_others_from_a_node(listening):
    """Else a `clear` with a time-out of 20 ms would have the puts of a second rejected."""
    channel, server = listening
    with deadlines.until(time.monotonic() + 0.01), pytest.raises(DeadlineError):
        channel.request(Op.STAT)
    threading.Thread(target=answer_all, args=(server,), daemon=True).start()
    assert channel.request(Op.STAT) is None


def test_a_hurried_answer_that_does_not_come_keeps_nobody_from_a_node(listening):
    channel, server = listening
    silent = threading.Event()
    threading.Thread(target=answer_all, args=(server, silent), daemon=True).start()
    assert channel.request(Op.STAT) is None
    silent.set()
    with deadlines.until(time.monotonic() + 0.01), pytest.raises(DeadlineError):
        channel.request(Op.STAT)
    silent.clear()
    assert channel.request(Op.STAT) is None


def test_a_node_that_lets_its_whole_time_pass_is_not_asked_again_at_once(channel):
    begun = time.monotonic()
    with deadlines.until(begun + PROBE_TIMEOUT_S * 1.2), pytest.raises(DeadlineError):
        channel.request(Op.STAT)
    with pytest.raises(NodeUnavailableError, match="did not answer lately"):
        channel.request(Op.STAT)


def test_a_stopped_node_costs_callers_with_little_time_one_deadline_and_not_one_each(channel):
    """Two tenths of a second are enough for a node of this host: who always has so little
    would wait for it each time."""
    had_s = TIMEOUT_S / 300
    begun = time.monotonic()
    with deadlines.until(begun + had_s), pytest.raises(DeadlineError):
        channel.request(Op.STAT)
    for _ in range(3):
        until = time.monotonic() + had_s
        with deadlines.until(until), pytest.raises(NodeUnavailableError, match="lately"):
            channel.request(Op.STAT)


def test_what_could_not_be_said_in_passing_does_not_keep_requests_from_a_node(listening):
    """Saying may wait a moment only, which a node without a processor does not answer in."""
    channel, server = listening
    assert not channel.say(Op.TOUCH, b"")
    threading.Thread(target=answer_all, args=(server,), daemon=True).start()
    assert channel.request(Op.STAT) is None
    assert channel.say(Op.TOUCH, b"")


def test_who_asks_nothing_says_ever_more_seldom_to_a_silent_node_what_it_holds(listening):
    channel, server = listening
    server.setblocking(False)
    began = time.monotonic()
    for _ in range(50):
        channel.doubt()
        channel.catch_up()
    assert time.monotonic() - began < 3 * CATCH_UP_TRIES * SAY_CONNECT_TIMEOUT_S
    came = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            came += 1
    assert came == CATCH_UP_TRIES


def test_saying_in_passing_waits_once_for_a_stopped_node_and_not_each_time(channel):
    begun = time.monotonic()
    assert not any(channel.say(Op.TOUCH, b"") for _ in range(20))
    assert time.monotonic() - begun < SAY_CONNECT_TIMEOUT_S * 10


@pytest.fixture
def answered(listening):
    """To a node that answers everything with None."""
    channel, server = listening
    threading.Thread(target=answer_all, args=(server,), daemon=True).start()
    return channel


def test_who_reads_an_invalid_reply_for_another_ends_that_ones_wait_too(answered):
    def invalid(body):
        raise InvalidReplyError("no sense")

    first = answered.post(Op.STAT, accept=invalid)
    second = answered.post(Op.STAT)
    for ticket in (second, first):
        with pytest.raises(NodeUnavailableError):
            answered.collect(ticket)


BUGS = [ValueError, TypeError, AttributeError, KeyError, IndexError, ZeroDivisionError, OSError]


@pytest.mark.parametrize("error", BUGS)
def test_a_bug_in_what_is_made_of_an_answer_is_ours_and_not_the_nodes(answered, error):
    def broken(body):
        raise error("a bug")

    first = answered.post(Op.STAT, accept=broken)
    second = answered.post(Op.STAT)
    assert answered.collect(second) is None  # who reads for the other does not end with it
    with pytest.raises(InternalError, match="a bug") as caught:
        answered.collect(first)
    assert isinstance(caught.value.__cause__, error)
    assert answered._breaker.state is BreakerState.CLOSED
    assert answered.request(Op.STAT) is None


@pytest.mark.parametrize("error", [ValueError, TypeError, AttributeError])
def test_a_bug_in_the_search_for_what_is_held_is_ours(tmp_path, error):
    """It is raised as it is, and nobody calls the node silent for it."""

    def broken():
        raise error("a bug")

    directory = NodeDir(tmp_path, "node")
    directory.leases.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory.socket))
        server.listen(8)
        channel = ControlChannel(directory, (1, 1), TIMEOUT_S, broken)
        for _ in range(3):
            with pytest.raises(error, match="a bug"):
                channel.request(Op.STAT)
        assert channel._breaker.state is BreakerState.CLOSED
        channel.close()


def answer_all(server, silent=None):
    """Answer, unless it is to be `silent`, one connection after another."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        unpacker, known = msgpack.Unpacker(), False
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                unpacker.feed(data)
                for op, request, *_ in unpacker:
                    known |= op == Op.HELLO
                    body = [1, 1] if op == Op.HELLO else None
                    if request and not (silent and silent.is_set()):
                        answer = body if known else "the first must be HELLO"
                        connection.sendall(control.packed([request, known, answer]))


@pytest.fixture
def crowded(tmp_path):
    """The directory of a node whose queue of connections is full, and what it listens at."""
    directory = NodeDir(tmp_path, "node")
    directory.leases.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(directory.socket))
        server.listen(0)
        for _ in range(10):
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.setblocking(False)
            try:
                other.connect(str(directory.socket))
            except BlockingIOError:
                break
            other.close()  # it keeps its place
        else:
            pytest.fail("the queue has no end")
        yield directory, server


def test_a_full_queue_of_connections_is_waited_for(crowded):
    """Or of 200 clients that start together most would have their first put rejected."""
    directory, server = crowded
    channel = ControlChannel(directory, (1, 1), TIMEOUT_S, lambda: ((), ()))
    later = threading.Timer(0.2, answer_all, args=(server,))
    later.daemon = True  # accept is not woken when the socket is closed
    later.start()
    assert channel.request(Op.STAT) is None
    channel.close()


def test_a_queue_that_stays_full_costs_no_more_than_the_deadline(crowded, monkeypatch):
    monkeypatch.setattr(control_module, "FIRST_ANSWER_TIMEOUT_S", 0.0)
    directory, _ = crowded
    channel = ControlChannel(directory, (1, 1), 0.2, lambda: ((), ()))
    begun = time.monotonic()
    with pytest.raises(NodeUnavailableError):
        channel.request(Op.STAT)
    assert 0.2 <= time.monotonic() - begun < TIMEOUT_S / 2
    channel.close()


class Interrupting:
    """A channel's lock, and a signal handler that raises just when it was got."""

    def __init__(self, lock):
        self._lock = lock

    def acquire(self, *args, **kwargs):
        assert self._lock.acquire(*args, **kwargs)
        raise KeyboardInterrupt

    def __getattr__(self, name):
        return getattr(self._lock, name)


@pytest.mark.parametrize("call", ["post", "collect", "say"])
def test_who_is_interrupted_when_its_turn_comes_does_not_keep_it(answered, call):
    """Or every later call would wait for its whole deadline and fail."""
    ticket = answered.post(Op.STAT)
    calls = {
        "post": lambda: answered.post(Op.STAT),
        "collect": lambda: answered.collect(ticket),
        "say": lambda: answered.say(Op.TOUCH, b""),
    }
    lock = answered._lock
    answered._lock = Interrupting(lock)
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    answered._lock = lock
    free = []

    def takes():
        free.append(lock.acquire(blocking=False))
        lock.release()

    other = threading.Thread(target=takes)
    other.start()
    other.join()
    assert free == [True]


def test_who_is_interrupted_while_it_connects_to_say_something_leaves_no_half_connection(answered):
    """The node refuses whoever begins with anything but HELLO."""
    held = answered._held

    def interrupted():
        raise KeyboardInterrupt

    answered._held = interrupted
    with pytest.raises(KeyboardInterrupt):
        answered.say(Op.TOUCH, b"")
    answered._held = held
    assert answered.request(Op.STAT) is None
    assert answered.say(Op.TOUCH, b"")


def test_a_child_is_refused_at_once_although_a_thread_of_its_parent_waits(answered):
    """It has that thread's lock, and not the thread."""
    assert answered.request(Op.STAT) is None
    held, done = threading.Event(), threading.Event()

    def waits():
        with answered._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    assert held.wait(30)

    def refused():
        began = time.monotonic()
        with pytest.raises(UsageError, match="before a fork"):
            answered.request(Op.STAT)
        return time.monotonic() - began < TIMEOUT_S / 2

    refused_there = holds_in_child(refused)
    done.set()
    thread.join()
    assert refused_there


def test_a_signal_handler_that_asks_the_same_node_is_refused_at_once(answered):
    """What it interrupts may be in the middle of a message."""
    refused = []

    def asks(body):
        with pytest.raises(DeadlineError):
            answered.request(Op.STAT)
        refused.append(answered.say(Op.TOUCH, b""))
        return body

    begun = time.monotonic()
    assert answered.request(Op.STAT, accept=asks) is None
    assert refused == [False]
    assert time.monotonic() - begun < TIMEOUT_S / 2


def test_a_signal_handler_may_close_what_it_interrupts(answered):
    assert answered.request(Op.STAT, accept=lambda body: answered.close()) is None
    with pytest.raises(NodeUnavailableError, match="closed"):
        answered.request(Op.STAT)


def test_who_gave_up_waiting_for_the_connection_has_it_made_anew(answered, monkeypatch):
    """What was to be given back, and was not sent, would else stay held until the client ends."""
    held = [0]

    def hello():
        held[0] += 1
        return (), ()

    monkeypatch.setattr(answered, "_held", hello)
    answered.request(Op.STAT)
    with ThreadPoolExecutor(1) as other:
        other.submit(answered._lock.acquire).result()
        with deadlines.until(time.monotonic() + 0.01), pytest.raises(DeadlineError, match="busy"):
            answered.request(Op.STAT)
        other.submit(answered._lock.release).result()
    answered.request(Op.STAT)
    assert held[0] == 2, "each HELLO says what is held"
