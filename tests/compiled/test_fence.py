"""Which fence a process has, and what refuses to be one (kvstore/compiled/fence.py)."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_readers import compiled_module

from kvstore.compiled import fence, part

DMB_OSH = bytes.fromhex("bf3303d5")
NOWHERE = "kvstore.compiled._no_such_part"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    module = compiled_module(fence.SOURCE, tmp_path_factory.mktemp("built"))
    sys.modules["_fence_as_built"] = module
    yield module
    del sys.modules["_fence_as_built"]


@pytest.mark.parametrize("wanted", [None, "no"])
def test_a_processor_that_keeps_the_order_needs_no_fence(wanted: str | None) -> None:
    assert fence.choose("x86_64", wanted, NOWHERE).call is None


@pytest.mark.parametrize("machine", ["aarch64", "riscv64", "a new one"])
def test_every_other_machine_has_one(machine: str, compiled: Any) -> None:
    assert fence.choose(machine, None, "_fence_as_built").call is compiled.fence
    assert fence.choose(machine, "no", "_fence_as_built").call is fence.by_lock
    assert fence.choose(machine, None, NOWHERE).call is fence.by_lock
    with pytest.raises(ImportError):
        fence.choose(machine, "yes", NOWHERE)


def test_this_process_has_that_of_its_machine() -> None:
    assert fence.choose(platform.machine(), part.wanted()) == fence.CHOSEN
    assert fence.CHOSEN.call is fence.FENCE


def test_either_fence_can_be_called_again_by_a_signals_handler(compiled: Any) -> None:
    """Which comes in between any two of its steps."""
    calls: list[int] = []
    for call in (fence.by_lock, compiled.fence):
        before = signal.signal(signal.SIGVTALRM, lambda *_, call=call: calls.append(call() is None))
        signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4, 1e-4)
        try:
            while len(calls) < 20:
                call()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        calls.clear()


@pytest.mark.skipif(platform.machine() != "aarch64", reason="looks at instructions of aarch64")
def test_compiled_it_is_a_barrier(compiled: Any) -> None:
    assert DMB_OSH in Path(compiled.__file__).read_bytes()


def test_a_big_endian_machine_is_refused_by_name() -> None:
    code = "import platform, sys; sys.byteorder = 'big'; platform.machine = lambda: 's390x'"
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}; import kvstore"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert "(s390x) is big-endian" in ran.stderr
