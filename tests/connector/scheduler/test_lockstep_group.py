"""What processes of one engine tell each other: real processes, real gloo groups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[3]
START = """
import os, sys, time
from torch import distributed
from connector.limits import LOCKSTEP_HEAD_BYTES
from connector.scheduler.lockstep_group import GlooExchange
from kvstore import DeadlineError, PeerError
size, store = int(sys.argv[1]), sys.argv[2]
children = []
for rank in range(size):  # forked: to import torch is most of what a process costs
    child = os.fork()
    if not child:
        break
    children.append(child)
else:
    for child in children:
        os.waitpid(child, 0)
    sys.exit()
os.dup2(os.open(f"{store}.{rank}", os.O_WRONLY | os.O_CREAT), 1)
distributed.init_process_group(
    "gloo", rank=rank, world_size=size, store=distributed.FileStore(store, size)
)
"""


PROGRAM = """
exchange, impatient = GlooExchange(2), GlooExchange(2, timeout_s=0.5)  # engines 0 1 and 2 3
print(exchange.leads, flush=True)
room = LOCKSTEP_HEAD_BYTES
for length in (0, 1, room - 14, room - 13, room - 12, room - 11, room, 3 * room):
    heard = exchange([rank, b"%d" % rank * (length if rank % 2 else 5)])
    first = rank - rank % 2
    wanted = [[one, b"%d" % one * (length if one % 2 else 5)] for one in (first, first + 1)]
    if heard != wanted:
        print("wrong at", length, flush=True)
if rank == 1:
    os._exit(0)
if rank == 3:
    time.sleep(4)
    os._exit(0)
try:
    (exchange if rank == 0 else impatient)("alone")
except DeadlineError as e:
    print("late", e)
except PeerError as e:
    print("gone", e)
sys.stdout.flush()
os._exit(0)
"""
Told = list[list[str]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Lines that each of four processes prints, of two engines."""
    store = tmp_path_factory.mktemp("group") / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", START + PROGRAM, "4", str(store)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    )
    try:
        process.wait(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return [Path(f"{store}.{rank}").read_text().splitlines() for rank in range(4)]


def test_the_first_process_of_each_engine_leads(told: Told) -> None:
    assert [lines[0] for lines in told] == ["True", "False", "True", "False"]


def test_each_process_hears_all_of_its_own_engine_in_order_whatever_the_length(told: Told) -> None:
    assert not [line for lines in told for line in lines if line.startswith("wrong")]
    assert [len(lines) for lines in told] == [2, 1, 2, 1]


def test_trap_a_process_that_dies_ends_the_wait_of_the_other(told: Told) -> None:
    assert told[0][-1].startswith("gone a process of this engine is gone")


def test_trap_a_process_that_says_nothing_ends_the_wait_at_its_deadline(told: Told) -> None:
    assert told[2][-1].startswith("late a process of this engine said nothing for 0.5 s")
