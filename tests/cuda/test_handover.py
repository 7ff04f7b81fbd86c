"""Memory goes to another process by a descriptor, wherever that process is."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress

import pytest
from contract.cuda import PATIENCE_S, handed_over, put

from kvstore.cuda.base import SHARED_NAME_BYTES, Shared
from kvstore.cuda.handover import hand_over, take_over
from kvstore.testing.cuda import ModelCuda

TAKES = """
import mmap, os, pathlib, sys
from kvstore.cuda.handover import take_over
shared = take_over(pathlib.Path(sys.argv[1]), os.geteuid(), 60.0)
print(os.getpid(), bytes(mmap.mmap(shared.fd, shared.size_bytes)[:5]))
"""


def test_a_process_of_another_pid_namespace_gets_it(tmp_path):
    """As containers and pods have: legacy IPC handles do not open there."""
    apart = [shutil.which("unshare") or "unshare", "--pid", "--fork"]
    try:
        subprocess.run([*apart, "true"], check=True, capture_output=True, timeout=PATIENCE_S)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no PID namespace can be made here: {e}")
    device = ModelCuda(tmp_path)
    memory = device.allocate(1 << 20)
    put(device, memory, b"there")
    path = tmp_path / "vram.sock"
    with handed_over(device, memory, path):
        taken = subprocess.run(
            [*apart, sys.executable, "-c", TAKES, path],
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert taken.stdout.split(maxsplit=1) == ["1", "b'there'\n"]
    device.free(memory)


def answer(listener, message):
    connection, _ = listener.accept()
    with connection:
        connection.sendall(message)


@pytest.mark.parametrize("message", [b"", b"short", b"x" * 24])
def test_who_hands_over_no_descriptor_is_an_error(tmp_path, message):
    path = tmp_path / "vram.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=answer, args=(listener, message), daemon=True)
        thread.start()
        with pytest.raises(OSError, match="0 descriptors"):
            take_over(path, os.geteuid(), PATIENCE_S)
        thread.join(PATIENCE_S)


def test_who_never_answers_costs_the_timeout_alone(tmp_path):
    path = tmp_path / "vram.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        open_before = os.dup(listener.fileno())
        os.close(open_before)
        with pytest.raises(TimeoutError):
            take_over(path, os.geteuid(), 0.05)
        again = os.dup(listener.fileno())
        os.close(again)
        assert again == open_before, "no descriptor is left behind"


def test_where_nobody_listens_it_says_so(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        take_over(tmp_path / "vram.sock", os.geteuid(), PATIENCE_S)


def test_memory_is_not_taken_from_who_listens_as_another_user(tmp_path):
    """The owner of a run directory can link the name to a socket of anybody's."""
    path = tmp_path / "vram.sock"
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryFile() as file:
        listener.bind(str(path))
        listener.listen()
        shared = Shared(b"n" * SHARED_NAME_BYTES, 4096, file.fileno())

        def hand() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                hand_over(connection, shared)

        thread = threading.Thread(target=hand, daemon=True)
        thread.start()
        with pytest.raises(PermissionError, match="not of user"):
            take_over(path, os.geteuid() + 1, PATIENCE_S)
        thread.join(PATIENCE_S)
