"""Processes that start warm are processes like any other."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from redis_servers import wait_until
from warm_processes import WarmProcess, program

from kvstore.nodedir import NodeDir

WAITS = "import time; print('here', flush=True); time.sleep(60)"
PATIENCE_S = 30.0


@pytest.mark.parametrize(
    ("source", "code"),
    [("", 0), ("import sys; sys.exit(3)", 3), ("import os; os._exit(4)", 4), ("1 / 0", 1)],
)
def test_a_program_ends_with_its_exit_code(source, code, capfd):
    process = WarmProcess(program, source)
    assert process.wait(PATIENCE_S) == code
    assert process.poll() == process.returncode == code


def test_it_has_its_own_arguments_environment_and_output(monkeypatch):
    monkeypatch.setenv("KVSTORE_TEST_WORD", "ours")
    source = "import os, sys; print(sys.argv[1:], os.environ['KVSTORE_TEST_WORD'], os.getpid())"
    for environment, word in ((None, "ours"), ({"KVSTORE_TEST_WORD": "its"}, "its")):
        process = WarmProcess(
            program, source, "a", "b", environment=environment, stdout=subprocess.PIPE
        )
        assert process.stdout.read() == f"['a', 'b'] {word} {process.pid}\n"
        assert process.pid != os.getpid()
        process.wait(PATIENCE_S)


def test_it_can_be_killed_and_waited_for():
    process = WarmProcess(program, WAITS, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "here\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    process.kill()  # no other process that has its number since


def test_a_signal_to_one_that_has_just_ended_is_nothing(monkeypatch):
    process = WarmProcess(program, "")
    process.wait(PATIENCE_S)
    monkeypatch.setattr(process, "poll", lambda: None)  # not heard of yet
    process.kill()


STARTER = """
import sys, time
from warm_processes import WarmProcess, command
if __name__ == "__main__":
    url, run_dir = sys.argv[1:]
    size = ("--size", "1MiB")
    node = WarmProcess(command, "node", "--url", url, "--run-dir", run_dir, *size)
    print(node.pid, flush=True)
    time.sleep(60)
"""


def test_a_node_ends_when_what_started_it_is_killed(redis_server, tmp_path):
    """Else a test run that is killed would leave its nodes behind, and their memory."""
    run_dir, script = tmp_path / "run", tmp_path / "starter.py"
    script.write_text(STARTER)
    starter = subprocess.Popen(
        [sys.executable, script, redis_server.url, run_dir],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        node = int(starter.stdout.readline())
        wait_until(lambda: NodeDir(run_dir, "node").announcement(), "the node is at work")
    finally:
        starter.kill()
        starter.wait()
    wait_until(lambda: not Path(f"/proc/{node}").exists(), "the node has ended")
    assert NodeDir(run_dir, "node").announcement() is None
