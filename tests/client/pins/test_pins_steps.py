"""Pins without a node: who ends them, when, and who is woken for it."""

import os
import queue
import threading

import pytest

from kvstore.client.pins import HeldPin, Pins
from kvstore.errors import NodeUnavailableError
from kvstore.record import pack_place

PIN, OTHER = (7, 1), (9, 1)
"""(slot, generation)."""
VALUE = memoryview(bytearray(b"0123456789"))


class Ended(list):
    """What was let go, in its order, and how often and by whom something was to be."""

    def __init__(self):
        self.held = set()
        self.calls = 0
        self.threads = set()
        self.some = threading.Event()

    def __call__(self, refs):
        self.calls += 1
        self.threads.add(threading.get_ident())
        self.extend(ref.handle for ref in refs if ref in self.held)
        self.held.difference_update(refs)
        self.some.set()


def pins_of(ended):
    return Pins(ended, lambda: [ended.held])


def hold(pins, ended, handle):
    """Pin a block, as a node grants it, and return its memory."""
    slot, generation = handle
    pin = HeldPin(pack_place(bytes(32), 1, 1, 0, slot, generation, 0, 1, 0), pins)
    ended.held.add(pin.ref)
    return pins.hold(pin, VALUE)


class Wakes:
    """Instead of the queue: `get` takes one step after the other."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def get(self, timeout):
        self.steps.pop(0)()

    def put(self, item):
        pass


def idle():
    raise queue.Empty


def nothing():
    pass


@pytest.fixture
def starts(monkeypatch):
    """Threads that were to be started: none is."""
    started = []

    def refused(thread):
        started.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    return started


def test_a_pin_ends_with_the_last_view_by_a_thread_that_keeps_no_process():
    ended = Ended()
    pins = pins_of(ended)
    memory = hold(pins, ended, PIN)
    assert bytes(memory) == bytes(VALUE)
    assert pins._thread.daemon
    view = memoryview(memory)[2:4]
    del memory
    pins.settle()
    assert ended == []
    del view
    assert ended.some.wait(30)
    assert ended == [PIN]


def test_one_thread_serves_all_pins():
    ended = Ended()
    pins = pins_of(ended)
    memories = [hold(pins, ended, PIN)]
    first = pins._thread
    memories.append(hold(pins, ended, OTHER))
    assert pins._thread is first


def test_a_thread_that_could_not_be_started_is_tried_again_with_the_next_pin(starts):
    ended = Ended()
    pins = pins_of(ended)
    memories = [hold(pins, ended, PIN), hold(pins, ended, OTHER)]
    assert len(starts) == len(memories)


def test_who_drops_a_view_wakes_the_thread_and_takes_no_step_itself(starts):
    ended = Ended()
    pins = pins_of(ended)
    memory = hold(pins, ended, PIN)
    del memory
    assert (pins._wake.qsize(), ended.calls) == (1, 0)


def test_who_closes_a_pin_ends_it_himself_and_wakes_nobody(starts):
    ended = Ended()
    pins = pins_of(ended)
    held = [hold(pins, ended, PIN), hold(pins, ended, OTHER)]
    with pins.closing():
        held.pop()
        assert ended == []
    assert (ended, pins._wake.qsize()) == ([OTHER], 0)
    held.pop()
    assert pins._wake.qsize() == 1


def test_where_no_pin_has_ended_the_node_is_told_nothing(starts):
    ended = Ended()
    pins = pins_of(ended)
    memory = hold(pins, ended, PIN)
    pins.settle()
    assert ended.calls == 0
    del memory
    pins.settle()
    assert (ended, ended.calls) == ([PIN], 1)
    pins.settle()
    assert ended.calls == 1


def test_another_process_lets_nothing_go(starts, monkeypatch):
    ended = Ended()
    pins = pins_of(ended)
    hold(pins, ended, PIN)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: pins._pid + 1)
        pins.settle()
        assert ended.calls == 0
    pins.settle()
    assert ended == [PIN]


def test_the_thread_ends_when_nothing_has_been_held_for_a_while():
    ended = Ended()
    pins = pins_of(ended)
    pins._thread = threading.current_thread()
    pins._wake = Wakes(idle)
    pins._run()
    assert pins._thread is None


def test_the_thread_stays_as_long_as_a_pin_is_held(starts):
    ended = Ended()
    pins = pins_of(ended)
    held = [hold(pins, ended, PIN)]
    pins._wake = Wakes(idle, held.clear, idle)
    pins._run()
    assert ended == [PIN]
    assert pins._wake.steps == []


def test_the_thread_stays_until_what_has_ended_is_let_go(starts):
    ended = Ended()
    let_go = []

    def second_time(refs):
        let_go.append(len(refs))
        if len(let_go) > 1:
            ended(refs)
        else:
            raise KeyboardInterrupt

    pins = Pins(second_time, lambda: [ended.held])
    hold(pins, ended, PIN)
    pins._wake = Wakes(nothing, idle, idle)
    with pytest.raises(KeyboardInterrupt):
        pins._run()
    pins._run()
    assert let_go == [1, 1]
    assert ended == [PIN]
    assert pins._thread is None


def test_what_was_closed_or_given_back_is_not_held_again(starts):
    ended = Ended()
    pins = pins_of(ended)
    pin = HeldPin(pack_place(bytes(32), 1, 1, 0, 7, 1, 0, 1, 0), pins)
    with pytest.raises(NodeUnavailableError):
        pins.hold(pin, VALUE)
    ended.held.add(pin.ref)
    pins.end([pin])
    assert ended == [PIN]
    with pytest.raises(NodeUnavailableError):
        pins.hold(pin, VALUE)
    del pin
    pins.settle()
    assert ended == [PIN], "once"


def test_a_forked_child_keeps_nothing_of_what_had_ended_and_no_lock(starts):
    ended = Ended()
    pins = pins_of(ended)
    hold(pins, ended, PIN)
    assert len(pins.dropped) == 1
    locks = (pins._lock, pins._settling)
    with pins._lock, pins._settling:
        child = os.fork()
        if child == 0:
            empty = not pins.dropped
            os._exit(0 if empty and pins._lock not in locks and pins._settling not in locks else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(pins.dropped) == 1
