"""The process with a NIXL agent ends, or cannot be started or watched: a peer's fault, no crash.

Without NIXL: in place of child.py runs a program that only waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from signal_handlers import handling, raising

from kvstore.cuda.base import CudaDevice
from kvstore.errors import NodeUnavailableError
from kvstore.protocol.nixl import Endpoint
from kvstore.transport.base import Wanted
from kvstore.transport.nixl import process as module
from kvstore.transport.nixl import reader as reader_module
from kvstore.transport.nixl.child import ADD
from kvstore.transport.nixl.process import NixlProcess
from kvstore.transport.nixl.reader import NixlReader, Part
from kvstore.transport.nixl.transfer import NixlBatch
from kvstore.transport.nixl.transport import NixlTransport
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import StreamTransport
from kvstore.types import Location

PATIENCE_S = 10.0


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "waits.py"
    program.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(module, "_PROGRAM", program)


@pytest.fixture
def process(waits: None) -> Iterator[NixlProcess]:
    process = NixlProcess("reader", [])
    yield process
    process.kill()
    assert process.join(PATIENCE_S)


def no_threads(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_process_that_ends_while_it_is_asked_is_a_peers_fault(process: NixlProcess) -> None:
    """Its socket is closed by the thread that saw its end."""
    process._socket.close()
    with pytest.raises(NodeUnavailableError, match="has ended"):
        process.ask(ADD, "agent", b"", deadline=time.monotonic() + PATIENCE_S)


def test_a_process_that_nobody_can_listen_to_is_not_started(
    waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    start = module.start_in_background

    def noted(*arguments: Any, **options: Any) -> Any:
        started.append(start(*arguments, **options))
        return started[0]

    monkeypatch.setattr(module, "start_in_background", noted)
    monkeypatch.setattr(threading.Thread, "start", no_threads)
    with pytest.raises(NodeUnavailableError, match="thread"):
        NixlProcess("reader", [])
    assert started[0].wait(PATIENCE_S) == -9


def test_an_arena_is_given_up_where_no_thread_can_wait_for_others_reads(
    waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = NixlReader("client")
    monkeypatch.setattr(threading.Thread, "start", no_threads)
    reader.retire()
    monkeypatch.undo()
    assert reader._process.join(PATIENCE_S), "else late bytes may come for ever"
    assert not reader.usable


class Layout:
    header_bytes = 64

    def places(self, location: Location) -> tuple[int, int]:
        return 0, 0


class Alarmed:
    """A READ under way when a signal comes."""

    def result(self, _: float) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(PATIENCE_S)


class Reader:
    vram = None

    def take(self, _: float) -> Part:
        return Part(0, 0, memoryview(bytearray(reader_module.PART_BYTES)))

    def read(self, *_: object) -> Alarmed:
        return Alarmed()

    def give(self, part: Part) -> None:
        """It is free again."""

    def abandon(self, part: Part, future: Future[Any]) -> None:
        """It ends in the arena."""


def test_an_interruption_is_not_taken_for_a_late_read() -> None:
    endpoint = Endpoint("agent", b"m", 1, 1, 1, bytes(4096))
    wanted = Wanted(bytes(32), Location(1, 1, 0, 0, 1, 8, 0, 0), (memoryview(bytearray(8)),))
    reader: Any = Reader()
    layout: Any = Layout()
    batch = NixlBatch(reader, endpoint, layout, [wanted], time.monotonic() + PATIENCE_S)
    with handling(raising(KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        batch.read(lambda reason: pytest.fail(reason))


def test_a_forked_child_asks_nothing_of_its_parents_device() -> None:
    """What CUDA has made does not outlive a fork."""
    touched: list[str] = []

    class Device:
        def __getattr__(self, name: str) -> object:
            touched.append(name)
            raise AssertionError(name)

    device: CudaDevice = Device()  # type: ignore[assignment]
    layout: Any = SimpleNamespace()
    stream = StreamTransport(StreamSecurity())
    transport = NixlTransport(stream, lambda _: layout, device)
    touched.clear()
    transport.after_fork_in_child()
    assert transport._vram is None
    transport.close()
    assert touched == []
