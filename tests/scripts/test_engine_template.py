"""scripts/lib/engine_template.py: what it forks is like a process of its own, and ends alike."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import engine_template
import pytest
from engine_template import ForkedProcess, can_be_forked, fork_engine

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(300)]
LIB = Path(__file__).parents[2] / "scripts" / "lib"
PROGRAM = """
import json, os, sys, tempfile
import neighbour, elsewhere
with os.fdopen(int(sys.argv[1]), "r+b", buffering=0) as connection:
    told = {
        "arguments": sys.argv[2:], "folder": os.getcwd(), "vllm": "vllm" in sys.modules,
        "own": os.environ.get("OF_ITS_OWN"), "temporary": tempfile.gettempdir(), "main": __name__,
    }
    connection.write(json.dumps(told).encode() + b"\\n")
    print("in the log", flush=True)
    sys.exit(int(connection.read(2)))
"""


@pytest.fixture(scope="module", autouse=True)
def no_template_of_others() -> None:
    """Other tests of this process may have used one up."""
    for one in templates():
        one._process.kill()
        one._process.wait()
    engine_template._templates.clear()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    for name, text in (("program.py", PROGRAM), ("neighbour.py", ""), ("path/elsewhere.py", "")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path / "program.py"


def started(program: Path, number: int) -> tuple[ForkedProcess, socket.socket, Path]:
    ours, theirs = socket.socketpair()
    folder = program.parent / str(number)
    folder.mkdir()
    environment = {
        **os.environ,
        "OF_ITS_OWN": str(number),
        "TMPDIR": str(folder),
        "PYTHONPATH": str(program.parent / "path"),
    }
    with theirs, (folder / "log").open("wb") as log:
        command = [str(program), str(theirs.fileno()), "of", str(number)]
        process = fork_engine(
            [sys.executable], command, environment, pass_fd=theirs.fileno(), cwd=folder, log=log
        )
    return process, ours, folder


def templates() -> list[engine_template.Template]:
    return list(engine_template._templates.values())


def test_each_has_what_it_was_started_with_and_vllm_is_imported(program: Path) -> None:
    both = [started(program, number) for number in (3, 4)]
    for number, (process, ours, folder) in enumerate(both, 3):
        with ours:
            assert json.loads(ours.makefile("rb").readline()) == {
                "arguments": ["of", str(number)],
                "folder": str(folder),
                "vllm": True,
                "own": str(number),
                "temporary": str(folder),
                "main": "__main__",
            }
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.0)
            ours.sendall(b"%2d" % number)
            assert process.wait(60) == process.poll() == number
        assert (folder / "log").read_text().endswith("in the log\n")  # the first has imports', too
    assert both[0][0].pid != both[1][0].pid


def test_one_that_is_killed_says_so(program: Path) -> None:
    process, ours, _ = started(program, 1)
    with ours:
        assert ours.makefile("rb").readline()
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        process.kill()  # nobody's number by now


def test_after_one_that_ended_another_is_made(program: Path) -> None:
    first, ours, _ = started(program, 1)
    (template,) = templates()
    template._process.kill()
    template._process.wait()
    with ours:
        ours.sendall(b" 0")
        assert first.wait(60) == engine_template.UNKNOWN_CODE
    with pytest.raises(RuntimeError, match="has ended"):
        template.code_of(first.pid)
    process, ours, folder = started(program, 2)
    with ours:
        assert json.loads(ours.makefile("rb").readline())["own"] == "2"
        ours.sendall(b" 0")
        assert process.wait(60) == 0
    assert (folder / "log").read_text().endswith("in the log\n")  # the first has imports', too


def test_it_ends_when_its_caller_is_killed(program: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
sys.path[:0] = [{str(LIB)!r}, {str(Path(__file__).parent)!r}]
import test_engine_template as tests
process, ours, folder = tests.started(Path({str(program)!r}), 7)
ours.makefile("rb").readline()
(template,) = tests.templates()
print(process.pid, template._process.pid, flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as caller:
        assert caller.stdout is not None
        ended = [os.pidfd_open(int(pid)) for pid in caller.stdout.readline().split()]
        caller.kill()
    try:
        for one in ended:
            assert select.select([one], [], [], 60)[0]
    finally:
        for one in ended:
            os.close(one)


def test_variables_that_are_read_by_imports_are_the_templates() -> None:
    assert can_be_forked({"PYTHONPATH": "/anywhere", "VLLM_CPU_KVCACHE_SPACE": "1"})
    assert not can_be_forked({"OMP_NUM_THREADS": "17"})
    assert not can_be_forked({"LD_PRELOAD": "/lib/any.so"})
