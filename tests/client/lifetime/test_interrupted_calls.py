"""Ctrl-C, or a handler of signals that raises, in the middle of a call: what the call had reserved
or pinned is free again for others, though its client lives on and asks for nothing more.

Whatever leaves a call without a result is given back by that call, though what was raised is kept
with its traceback, as a prompt does."""

from __future__ import annotations

import gc
import os
import pty
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import pytest
from redis_servers import wait_until
from stores import NodeProcess, node_stats

import kvstore
from kvstore import Client
from kvstore.client.nodes.saving.link import NodeLink
from kvstore.client.pins import Pins

if TYPE_CHECKING:
    from redis_servers import RedisServer

HOUSE = str(Path(kvstore.__file__).parent)
FREE_WITHIN_S = 2.0
"""After the interruption, without another call of the client."""
VALUE = bytes(300_000)


class InterruptedCallError(BaseException):
    pass


class Interruption:
    """Raises at one of the points of a call."""

    def __init__(self, number: int) -> None:
        self.left = number
        """Points that are still to come; at most 0 when it has raised."""
        self.where = ""

    def at(self, code: CodeType, event: str) -> None:
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            sys.settrace(None)
            self.where = f"{event} of {code.co_qualname} ({Path(code.co_filename).name})"
            raise InterruptedCallError


@contextmanager
def at_functions(number: int) -> Iterator[Interruption]:
    """Raise at the so manieth beginning or end of one of our functions, in this thread."""
    interruption = Interruption(number)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "return") and frame.f_code.co_filename.startswith(HOUSE):
            interruption.at(frame.f_code, event)

    sys.setprofile(watch)
    try:
        yield interruption
    except InterruptedCallError:
        pass
    finally:
        sys.setprofile(None)


@contextmanager
def at_instructions(number: int, of: Callable[..., Any]) -> Iterator[Interruption]:
    """Raise at the so manieth instruction of the function `of`, in this thread."""
    interruption, here = Interruption(number), threading.get_ident()

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not of.__code__ or threading.get_ident() != here:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            interruption.at(frame.f_code, event)
        return watch

    sys.settrace(watch)
    try:
        yield interruption
    except InterruptedCallError:
        pass
    finally:
        sys.settrace(None)


def await_nothing_held(other: Client, what: str, where: str) -> None:
    gc.collect()
    deadline = time.monotonic() + FREE_WITHIN_S
    while (count := node_stats(other)[what]) != 0:
        assert time.monotonic() < deadline, f"{count} {what} after the {where}"
        time.sleep(0.02)


@pytest.fixture
def other(node: NodeProcess) -> Iterator[Client]:
    with Client(**node.client_options) as other:
        yield other


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_interrupted_put_many_leaves_its_keys_free_for_others(
    client: Client, other: Client
) -> None:
    client.put("warm", b"1")
    number, tried = 0, Interruption(0)
    while tried.left <= 0:
        number += 1
        keys = [f"{number}-{i}" for i in range(3)]
        with at_functions(number) as tried:
            client.put_many(dict.fromkeys(keys, VALUE))
        await_nothing_held(other, "reserved", tried.where)
        for key in keys:
            assert other.put(key, VALUE), f"{key} after the {tried.where}"


@pytest.mark.long
def test_puts_interrupted_at_each_instruction_of_taking_a_grant_free_their_slots(
    client: Client, other: Client
) -> None:
    client.put("warm", b"1")
    number, tried = 0, Interruption(0)
    while tried.left <= 0:
        number += 1
        with at_instructions(number, NodeLink._granted) as tried:
            client.put_many({f"{number}-{i}": VALUE for i in range(3)})
    await_nothing_held(other, "reserved", f"{number} instructions of NodeLink._granted")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_interrupted_pin_leaves_nothing_pinned(client: Client, other: Client) -> None:
    client.put("k", VALUE)
    number, tried = 0, Interruption(0)
    while tried.left <= 0:
        number += 1
        with at_functions(number) as tried:
            client.pin("k")
        await_nothing_held(other, "pinned", tried.where)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pin_that_was_interrupted_makes_no_later_call_raise(client: Client) -> None:
    client.put("k", VALUE)
    number, tried = 0, Interruption(0)
    while tried.left <= 0:
        number += 1
        with at_instructions(number, Pins.hold) as tried:
            client.pin("k")
        gc.collect()
        with client.pin("k") as pinned:
            assert bytes(pinned.buffer[:10]) == VALUE[:10]


class Alarm:
    """A handler of signals that raises once in a call, at any moment of it."""

    def __init__(self) -> None:
        self.armed: list[bool] = []
        self.kept: list[BaseException] = []
        """What was raised, with its traceback."""

    def ring(self, *_: object) -> None:
        if self.armed:
            self.armed.clear()
            raise InterruptedCallError

    def interrupt(self, call: Callable[[], object], after_s: float) -> None:
        try:
            self.armed.append(True)
            signal.setitimer(signal.ITIMER_REAL, after_s)
            call()
            self.armed.clear()
        except InterruptedCallError as e:
            self.kept.append(e)
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    before = signal.signal(signal.SIGALRM, alarm.ring)
    try:
        yield alarm
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


PUTS, PINS = 1500, 500


@pytest.mark.long
@pytest.mark.timeout(900)
def test_interrupted_puts_and_pins_leave_nothing_though_each_traceback_is_kept(
    client: Client, other: Client, alarm: Alarm
) -> None:
    rng = random.Random(36)
    client.put("k", VALUE)
    numbers = iter(range(1 << 30))

    def put() -> None:
        client.put_many({f"{next(numbers)}": VALUE for _ in range(3)})

    def pin() -> None:
        client.pin("k")

    for call, count in ((put, PUTS), (pin, PINS)):
        began = time.monotonic()
        for _ in range(20):
            call()
        each_s = (time.monotonic() - began) / 20
        alarm.kept.clear()
        while len(alarm.kept) < count:
            alarm.interrupt(call, rng.uniform(1e-6, 1.2 * each_s))
        for what in ("reserved", "pinned"):
            await_nothing_held(other, what, f"{count} interrupted calls of {call.__name__}")
    assert client.put("afterwards", VALUE)


class Prompt:
    """Python as a person has it, at a terminal: it keeps what was raised last."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [sys.executable, "-q"], environment)
        self._said = b""
        self.hear(b">>> ")

    def type(self, line: str) -> None:
        self._said = b""
        os.write(self._terminal, line.encode() + b"\n")

    def hear(self, what: bytes) -> None:
        while what not in self._said:
            self._said += os.read(self._terminal, 1 << 16)

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._terminal)

    def system_call(self) -> str:
        """Return the number of the one that it waits in."""
        return Path(f"/proc/{self.pid}/syscall").read_text().split()[0]


@pytest.fixture
def roomy(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with NodeProcess(redis_server, size=64 << 20) as process:
        yield process


@pytest.fixture
def prompt(roomy: NodeProcess) -> Iterator[Prompt]:
    prompt = Prompt({**os.environ, "PYTHONPATH": str(Path(HOUSE).parent)})
    options = {n: str(roomy.client_options[n]) for n in ("url", "run_dir", "key_prefix")}
    try:
        prompt.type(f"import itertools, kvstore; c = kvstore.Client(**{options!r})")
        prompt.hear(b">>> ")
        prompt.type("v = bytes(4 << 20); print('sto' + 'red', bool(c.put('warm', v)))")
        prompt.hear(b"stored True")
        prompt.hear(b">>> ")
        yield prompt
    finally:
        prompt.end()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["it waits for its node", "it has slots"])
def test_ctrl_c_at_a_prompt_frees_the_keys_though_the_client_is_idle(
    roomy: NodeProcess, prompt: Prompt, when: str
) -> None:
    with Client(**roomy.client_options) as other:
        assert node_stats(other)["reserved"] == 0
        if when == "it has slots":
            prompt.type(
                "for i in itertools.count(): _ = c.put_many({f'{i}-{j}': v for j in 'abcd'})"
            )
            prompt.type("")
            wait_until(lambda: node_stats(other)["reserved"] > 0, "it copies")
            prompt.press_ctrl_c()
            prompt.hear(b"KeyboardInterrupt")
        else:
            idle = prompt.system_call()
            roomy.signal(signal.SIGSTOP)
            try:
                prompt.type("c.put('k', v)")
                wait_until(lambda: prompt.system_call() not in (idle, "running"), "it waits")
                prompt.press_ctrl_c()
                prompt.hear(b"KeyboardInterrupt")
            finally:
                roomy.signal(signal.SIGCONT)
        await_nothing_held(other, "reserved", "Ctrl-C at a prompt")
        assert other.put("k", VALUE)
        prompt.type("import sys; print('ke' + 'pt', sys.last_traceback.tb_next is not None)")
        prompt.hear(b"kept True")
