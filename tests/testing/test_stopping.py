"""`stop` returns when nothing of the process runs any more."""

import select
import signal
import subprocess
import sys
import time

import pytest

from kvstore.testing.stopping import stop

BUSY = """
import threading

def count(n):
    while True:
        shared[n] += 1

shared = [0] * 4
for n in range(4):
    threading.Thread(target=count, args=(n,), daemon=True).start()
while True:
    print(sum(shared), flush=True)
"""


def test_a_stopped_process_says_nothing_more():
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            stop(process.pid)
            while process.stdout.fileno() in _readable(process.stdout):
                process.stdout.read1(1 << 20)
            time.sleep(0.05)
            assert not _readable(process.stdout), "it went on writing"
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline()
        finally:
            process.kill()


def _readable(stream):
    return [fd.fileno() for fd in select.select([stream], [], [], 0)[0]]


def test_stopping_nobody_is_an_error():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(30)
    with pytest.raises(ProcessLookupError):
        stop(process.pid)
