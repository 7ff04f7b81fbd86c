"""What a greeting leaves to a child that is forked meanwhile."""

import subprocess
import sys

SCRIPT = """
import os, signal, socket, sys, threading, time
from importlib.abc import MetaPathFinder
from kvstore.errors import PeerError
from kvstore.transport.stream.channel import Channel
from kvstore.transport.stream.greeting import shake_hands

begun = threading.Event()

class Slow(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("cryptography.hazmat.primitives.ciphers"):
            begun.set()
            time.sleep(0.5)

def greet():
    here, there = socket.socketpair()
    there.close()
    try:
        shake_hands(Channel(here), b"secret" * 6, (1, 1), time.monotonic() + 5)
    except PeerError:
        pass

assert "cryptography.hazmat.primitives.ciphers" not in sys.modules
sys.meta_path.insert(0, Slow())
first = threading.Thread(target=greet)
first.start()
assert begun.wait(10)
child = os.fork()
if not child:
    signal.alarm(5)  # ends a child that hangs
    greet()
    os._exit(0)
_, status = os.waitpid(child, 0)
first.join()
print(os.waitstatus_to_exitcode(status))
"""


def test_a_child_forked_while_a_thread_greets_the_first_node_can_greet_one_too() -> None:
    """The thread's import of `cryptography` left its lock to the child, which hung."""
    script = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.stderr) == ("0\n", "")
