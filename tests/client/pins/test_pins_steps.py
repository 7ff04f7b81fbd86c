"""Pins without a node: who ends them, when, and who is woken for it."""

import os
import queue
import threading

import pytest
from own_python import holds_in_child

from kvstore.client.pins import HeldPin, Pins
from kvstore.errors import NodeUnavailableError
from kvstore.machine import Machine
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


class Starts(list):
    """Threads that were to be started: none is. Takes the place of their queue, too."""

    def __init__(self):
        self.wakes = 0
        """How often one is to be woken."""
        self.steps = []

    def get(self, timeout):
        self.steps.pop(0)()

    def put(self, item):
        self.wakes += 1

    def runs(self, pins, *steps):
        """Be the thread, which is woken by these steps; return those that it did not take."""
        self.steps = list(steps)
        pins.watch()
        self[-1].run()
        return self.steps


def idle():
    raise queue.Empty


def nothing():
    pass


@pytest.fixture
def starts(monkeypatch):
    started = Starts()
    monkeypatch.setattr(queue, "SimpleQueue", lambda: started)

    def refused(thread):
        started.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    return started


def test_a_pin_ends_with_the_last_view_by_a_thread_that_keeps_no_process():
    ended, before = Ended(), set(threading.enumerate())
    pins = pins_of(ended)
    memory = hold(pins, ended, PIN)
    assert bytes(memory) == bytes(VALUE)
    assert [thread.daemon for thread in {*threading.enumerate()} - before] == [True]
    view = memoryview(memory)[2:4]
    del memory
    pins.settle()
    assert ended == []
    del view
    assert ended.some.wait(30)
    assert ended == [PIN]


def test_one_thread_serves_all_pins():
    ended, before = Ended(), threading.active_count()
    pins = pins_of(ended)
    memories = [hold(pins, ended, PIN), hold(pins, ended, OTHER)]
    assert threading.active_count() == before + 1, len(memories)


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
    assert (starts.wakes, ended.calls) == (1, 0)


def test_who_closes_a_pin_ends_it_himself_and_wakes_nobody(starts):
    ended = Ended()
    pins = pins_of(ended)
    held = [hold(pins, ended, PIN), hold(pins, ended, OTHER)]
    with pins.closing():
        held.pop()
    assert starts.wakes == 0
    pins.settle()
    assert ended == [OTHER]
    held.pop()
    assert starts.wakes == 1


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
    own_pid = os.getpid()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: own_pid + 1)
        pins.settle()
        assert ended.calls == 0
    pins.settle()
    assert ended == [PIN]


def test_the_thread_ends_when_nothing_has_been_held_for_a_while(starts, monkeypatch):
    ended = Ended()
    pins = pins_of(ended)
    monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: True)
    assert starts.runs(pins, idle) == []
    assert len(starts) == 1
    pins.watch()
    assert len(starts) == 2, "also while the first is on its way out"


def test_the_thread_stays_as_long_as_a_pin_is_held(starts):
    ended = Ended()
    pins = pins_of(ended)
    held = [hold(pins, ended, PIN)]
    assert starts.runs(pins, idle, held.clear, idle) == []
    assert ended == [PIN]


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
    with pytest.raises(KeyboardInterrupt):
        starts.runs(pins, nothing)
    assert starts.runs(pins, idle, idle) == []
    assert let_go == [1, 1]
    assert ended == [PIN]


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


class Locks(Machine):
    """Notes the locks that it gave."""

    def __init__(self):
        super().__init__()
        self.locks = []

    def lock(self):
        self.locks.append(threading.Lock())
        return self.locks[-1]


def test_a_forked_child_keeps_nothing_of_what_had_ended_and_no_lock(starts):
    ended, machine = Ended(), Locks()
    pins = Pins(ended, lambda: [ended.held], machine)
    hold(pins, ended, PIN)
    assert len(pins.dropped) == 1
    before = [*machine.locks]

    def fresh():
        pins.watch()
        return not pins.dropped and len(machine.locks) == 2 * len(before)

    with before[0], before[1]:
        assert holds_in_child(fresh)
    assert len(pins.dropped) == 1
