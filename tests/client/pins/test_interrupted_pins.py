"""A handler of signals raises while pins begin and end: none is lost, and none is let go twice."""

import signal
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from stores import node_stats

from kvstore.client import pins
from kvstore.client.nodes.control import ControlChannel
from kvstore.client.nodes.saving import link, writer
from kvstore.client.pins import HeldPin, Pins
from kvstore.record import pack_place

VALUE = b"v" * 100_000
FILES = frozenset(str(Path(module.__file__)) for module in (pins, link, writer))


class SignalledError(Exception):
    pass


def pinned(client):
    return node_stats(client)["pinned"]


@pytest.mark.parametrize("many", [False, True])
def test_a_pin_that_is_interrupted_when_it_was_granted_is_not_kept(client, monkeypatch, many):
    client.put("k", VALUE)
    client.exists("k")
    key = client.namespace.value_key("k")
    collect = ControlChannel.collect

    def interrupted(self, ticket):
        answer = collect(self, ticket)
        if answer and isinstance(answer[0], HeldPin):
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(ControlChannel, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.session.pin([key]) if many else client.pin("k")
    assert pinned(client) == 0


@pytest.mark.parametrize("many", [False, True])
def test_a_pin_that_is_interrupted_before_its_answer_is_read_is_not_kept(client, monkeypatch, many):
    client.put("k", VALUE)
    client.exists("k")
    key = client.namespace.value_key("k")

    def interrupted(self, ticket):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ControlChannel, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.session.pin([key]) if many else client.pin("k")
    (link,) = client.session.writer.links()
    assert pinned(client) == 0
    assert not link.held.pins


def test_who_is_interrupted_while_it_lets_pins_go_lets_the_others_go_later():
    held, let_go = set(), []

    def interrupted(ended):
        let_go.append(next(ref for ref in ended if ref in held))
        held.remove(let_go[-1])
        raise KeyboardInterrupt

    pins = Pins(interrupted, lambda: [held])
    wanted = [HeldPin(pack_place(bytes(32), 1, 1, 0, i, 1, 0, 1, 0), pins) for i in range(3)]
    refs = [pin.ref for pin in wanted]
    held.update(refs)
    wanted.clear()
    for _ in refs:
        with pytest.raises(KeyboardInterrupt):
            pins.settle()
    assert sorted(ref.handle for ref in let_go) == sorted(ref.handle for ref in refs)
    assert not held


@contextmanager
def signalled_after(instructions):
    """A signal, whose handler raises, after so many instructions of the files that count pins;
    yields what is left of the number."""
    left = [instructions]
    this = threading.get_ident()

    def traced(frame, event, argument):
        if frame.f_code.co_filename not in FILES or threading.get_ident() != this:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return traced

    def handle(*_):
        raise SignalledError

    before = signal.signal(signal.SIGUSR1, handle)
    sys.settrace(traced)
    try:
        yield left
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)


STEP = 7
"""Instructions between two tries: all of them together would take a minute."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("way", ["close", "drop", "unpin"])
def test_wherever_a_handler_raises_a_pin_that_ends_is_let_go_once(client, way):
    client.put("k", VALUE)
    key = client.namespace.value_key("k")
    (ref,) = client.session.pin([key])
    (node_link,) = client.session.writer.links()
    own = client.session.writer.writers()[0].pins
    tried, left = 0, [0]
    while left[0] <= 0:
        tried += STEP
        pin = client.session.pin([key]) if way == "unpin" else client.pin("k")
        own._closing.here = way == "drop"  # nobody else wakes up for it
        if way == "drop":
            del pin
        with suppress(SignalledError), signalled_after(tried) as left:
            if way == "unpin":
                client.session.unpin(pin)
            elif way == "close":
                pin.close()
            else:
                own.settle()
        own._closing.here = False
        pin = None
        own.settle()
        times = len(node_link.held.pins)
        if way == "unpin" and times == 2:  # interrupted before it began
            client.session.unpin([ref])
            times = len(node_link.held.pins)
        assert times == 1, tried
        assert not own.dropped, tried
    assert tried > 10 * STEP
    assert pinned(client) == 1
    client.session.unpin([ref])
    assert pinned(client) == 0
