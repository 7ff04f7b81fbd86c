"""`kvstore run` around programs that are called as engines are. Around a real one:
tests/connector/adapters/vllm/real_engine/test_vllm_run.py."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import Place, Running, wait_until
from redis_servers import RedisServer

from kvstore import Client
from kvstore.cli import engine_guard, host_node
from kvstore.cli.engine_guard import GRACE_S
from kvstore.nodedir import node_dirs

ENGINE = f"""#!{sys.executable}
import json, os, signal, subprocess, sys, time
names = ("KVSTORE_URL", "KVSTORE_RUN_DIR", "NOTIFY_SOCKET")
said = {{name: os.environ.get(name) for name in names}} | {{"arguments": sys.argv[1:]}}
if "CHILD" in os.environ:  # which outlives it, unless somebody ends it
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    said["child"] = child.pid
def signalled(number, frame):
    print("signal", number, flush=True)
    if "STUBBORN" not in os.environ or number == signal.SIGHUP:
        sys.exit(40 + number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signalled)
print("engine", json.dumps(said), flush=True)
if "PUT" in os.environ:
    import kvstore
    with kvstore.Client() as client:
        print("put", bool(client.put("greeting", b"hello")), flush=True)
if "CODE" in os.environ:
    sys.exit(int(os.environ["CODE"]))
if "KILLED" in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(1)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """PATH with a `vllm` and a `sglang` that are what ENGINE says."""
    for name in ("vllm", "sglang"):
        program = tmp_path / name
        program.write_text(ENGINE)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def said(engine: Running) -> dict[str, object]:
    output = engine.wait_for("\nengine ")
    engine.wait_for("}\n" if output.endswith("\nengine ") else "engine {")
    line = engine.output.partition("\nengine ")[2].partition("\n")[0]
    found: dict[str, object] = json.loads(line)
    return found


def nothing_left(place: Place) -> None:
    wait_until(lambda: not place.processes(), f"no process left: {place.processes()}", 30.0)
    assert place.segments(*(d.name for d in node_dirs(place.run_dir))) == []
    wait_until(lambda: place.files() == [], f"no file left: {place.files()}")


def gone(pid: int) -> bool:
    """Whether it has ended: nobody here waits for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_an_engine_finds_a_store_that_is_ready_and_all_ends_with_it(
    place: Place, path: str
) -> None:
    run = place.engine("vllm", "serve", "M", "--port", "1", PATH=path, PUT="1", CODE="0")
    assert run.exit_code() == 0
    assert "put True" in run.output
    assert run.output.index("ready") < run.output.index("\nengine ")
    nothing_left(place)


def test_an_engine_is_told_where_the_store_is_and_what_to_do(place: Place, path: str) -> None:
    run = place.engine("vllm", "serve", "M", "--api-key=k3y", PATH=path, NOTIFY_SOCKET="/nowhere")
    found = said(run)
    assert "k3y" not in run.output.partition("\nengine ")[0]
    assert found["KVSTORE_URL"] == f"unix://{place.run_dir}/redis/redis.sock"
    assert found["KVSTORE_RUN_DIR"] == str(place.run_dir)
    assert found["NOTIFY_SOCKET"] is None
    arguments = found["arguments"]
    assert isinstance(arguments, list)
    assert arguments[:-1] == ["serve", "M", "--api-key=k3y", "--kv-transfer-config"]
    assert json.loads(arguments[-1])["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_goes_to_the_engine_and_its_exit_code_is_ours(
    place: Place, path: str, number: int
) -> None:
    run = place.engine("sglang", "serve", "M", PATH=path)
    said(run)
    assert run.end(number) == 40 + number
    assert run.output.count(f"signal {number}") == 1
    nothing_left(place)


def test_a_signal_that_ends_nothing_is_passed_on_as_well(place: Place, path: str) -> None:
    run = place.engine("vllm", "serve", "M", PATH=path, STUBBORN="1")
    said(run)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        run.process.send_signal(number)
        run.wait_for(f"signal {number}")
    assert run.end(signal.SIGHUP) == 40 + signal.SIGHUP


@pytest.mark.parametrize(("how", "code"), [({"CODE": "7"}, 7), ({"KILLED": "1"}, 137)])
def test_the_exit_code_of_an_engine_is_ours_and_its_children_end_with_it(
    place: Place, path: str, how: dict[str, str], code: int
) -> None:
    run = place.engine("vllm", "serve", "M", PATH=path, CHILD="1", **how)
    child = said(run)["child"]
    assert isinstance(child, int)
    assert run.exit_code() == code
    assert gone(child)
    nothing_left(place)


def test_a_killed_run_leaves_no_engine_no_node_and_no_redis(place: Place, path: str) -> None:
    run = place.engine("vllm", "serve", "M", PATH=path, CHILD="1", PUT="1")
    child = said(run)["child"]
    assert isinstance(child, int)
    run.wait_for("put True")
    run.process.kill()
    wait_until(lambda: gone(child), "the engine's child is gone", 30.0)
    nothing_left(place)


@pytest.mark.long
def test_a_killed_run_leaves_no_engine_that_ends_for_no_signal(place: Place, path: str) -> None:
    run = place.engine("vllm", "serve", "M", PATH=path, CHILD="1", STUBBORN="1")
    child = said(run)["child"]
    assert isinstance(child, int)
    run.process.kill()
    wait_until(lambda: gone(child), "the engine's child is gone", GRACE_S + 10)
    run.process.communicate(timeout=GRACE_S + 10)  # its output is the engine's, too
    nothing_left(place)


def test_a_run_that_is_killed_while_its_node_starts_leaves_no_node(place: Place, path: str) -> None:
    with RedisServer() as redis:
        os.kill(redis.process.pid, signal.SIGSTOP)
        run = place.engine("vllm", "serve", "M", PATH=path, options=("--url", redis.url))
        run.wait_for("is not ready yet")
        run.process.kill()
        wait_until(lambda: not place.processes(), f"no process left: {place.processes()}")
        os.kill(redis.process.pid, signal.SIGCONT)
    assert "\nengine " not in run.output


def test_a_signal_before_the_engine_starts_ends_it_all(place: Place, path: str) -> None:
    with RedisServer() as redis:
        os.kill(redis.process.pid, signal.SIGSTOP)
        run = place.engine("vllm", "serve", "M", PATH=path, options=("--url", redis.url))
        run.wait_for("is not ready yet")
        assert run.end(signal.SIGTERM) == 128 + signal.SIGTERM
        os.kill(redis.process.pid, signal.SIGCONT)
    assert "\nengine " not in run.output
    nothing_left(place)


def test_without_its_redis_an_engine_starts_later_and_is_told_why(
    place: Place, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    node = node_of(place, "redis://127.0.0.1:1", told)
    monkeypatch.setattr(host_node, "REDIS_WAIT_S", 0.5)
    node.open(lambda: False, lambda: None)
    assert "the engine starts anyway: Redis at 127.0.0.1:1" in told[-1]
    node.close()
    nothing_left(place)


def node_of(place: Place, url: str, told: list[str]) -> host_node.HostNode:
    options = ["--size", "16MiB"]
    env = {"KVSTORE_URL": url}
    return host_node.HostNode(url, "kv:default", place.run_dir, options, env, told.append)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def test_a_node_that_runs_is_used_and_stays(place: Place, path: str, redis: RedisServer) -> None:
    node = place.node("--url", redis.url, "--name", "mine")
    run = place.engine(
        *("vllm", "serve", "M"), options=("--url", redis.url), PATH=path, PUT="1", CODE="0"
    )
    assert run.exit_code() == 0
    assert "node mine: found, 4" in run.output
    with Client(redis.url, run_dir=place.run_dir) as client:
        assert client.get("greeting") == b"hello"
    assert node.end(signal.SIGTERM) == 0


def test_a_node_of_another_redis_is_not_used(place: Place, path: str, redis: RedisServer) -> None:
    place.node("--name", "other")
    run = place.engine("vllm", "serve", "M", options=("--url", redis.url), PATH=path, CODE="0")
    assert run.exit_code() == 0
    assert "found" not in run.output


def test_two_runs_share_a_node_that_ends_with_the_last(place: Place, path: str) -> None:
    """Also when they start together, and whichever ends first."""
    runs = [place.engine("vllm", "serve", "M", PATH=path) for _ in range(2)]
    for run in runs:
        said(run)
    first, second = runs if "found" in runs[1].output else reversed(runs)
    assert "found" in second.output
    assert "found" not in first.output
    assert first.end(signal.SIGTERM) == 40 + signal.SIGTERM
    assert "stays: others use it" in first.output
    (directory,) = node_dirs(place.run_dir)
    assert directory.alive()
    assert second.end(signal.SIGTERM) == 40 + signal.SIGTERM
    nothing_left(place)


def test_a_node_that_dies_is_started_again_and_held(place: Place, path: str) -> None:
    run = place.engine("vllm", "serve", "M", PATH=path)
    said(run)
    (directory,) = node_dirs(place.run_dir)
    before = directory.announcement()
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    run.wait_for("ended (signal 9)")

    def again() -> bool:
        now = directory.announcement()
        return now is not None and now.epoch > before.epoch and any(directory.leases.glob("*"))

    wait_until(again, "another start, which is held", 30.0)
    assert run.end(signal.SIGTERM) == 40 + signal.SIGTERM
    nothing_left(place)


def test_where_the_node_that_was_found_is_gone_one_is_started(
    place: Place, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    found = place.node("--url", redis.url, "--name", "mine")
    node = node_of(place, redis.url, told)
    monkeypatch.setattr(host_node, "GONE_S", 0.2)
    monkeypatch.setattr(host_node, "LOOK_EVERY_S", 0.1)
    node.open(lambda: False, lambda: None)
    node.tend()
    assert found.end(signal.SIGTERM) == 0

    def one_is_held() -> bool:
        node.tend()
        return any(
            directory.name != "mine" and directory.alive() and any(directory.leases.glob("*"))
            for directory in node_dirs(place.run_dir)
        )

    wait_until(one_is_held, "another node", 30.0)
    assert "no node is left on this host: starting one" in told
    node.close()
    nothing_left(place)


@pytest.mark.parametrize(
    ("command", "said_of_it"),
    [
        ((), "is missing: kvstore run -- vllm serve MODEL"),
        (("sleep", "1"), "--kv-transfer-config"),
        (("vllm", "serve", "M", "--kv_transfer_config={}"), "--kv_transfer_config"),
        (("/nowhere/vllm", "serve", "M"), "is not found"),
        (("vllm", "serve", "M", "--config", "/nowhere/c.yaml"), "No such file"),
    ],
)
def test_what_is_refused_starts_nothing(
    place: Place, path: str, command: tuple[str, ...], said_of_it: str
) -> None:
    run = place.engine(*command, PATH=path)
    assert run.exit_code() == 2
    assert said_of_it in run.output
    assert run.output.count("\n") == 1
    assert list(place.run_dir.iterdir()) == []


def test_a_config_file_with_a_connector_is_refused_and_merged_when_asked(
    place: Place, path: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nkv_transfer_config:\n  kv_connector: LMCacheMPConnector\n")
    command = ("vllm", "serve", "M", "--config", str(file))
    run = place.engine(*command, PATH=path)
    assert run.exit_code() == 2
    assert f"--kv_transfer_config in {file.parent.parent}" in run.output
    run = place.engine(*command, PATH=path, CODE="0", options=("--merge",))
    assert run.exit_code() == 0
    assert "MultiConnector" in run.output
    assert "LMCacheMPConnector" in run.output


def test_the_guard_ends_a_group_at_once_that_is_empty() -> None:
    began = time.monotonic()
    engine_guard.end_group(2**22)
    assert time.monotonic() - began < 1.0


KILLED_AT_ONCE = """
import os, signal, subprocess, sys
from kvstore.cli.commands import run
real = subprocess.Popen
def popen(command, **how):
    process = real(command, **how)
    if command[0] == sys.argv[1]:
        print(process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return process
run.subprocess.Popen = popen
run.RunningEngine().run(sys.argv[1:], os.environ, None)
"""


def test_an_engine_ends_with_a_run_that_is_killed_as_soon_as_it_started_it() -> None:
    """The guard knows the engine before `run` has said a word of it."""
    command = [sys.executable, "-c", KILLED_AT_ONCE, "sleep", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        engine = int(started.stdout.readline())
        assert started.wait(60) == -signal.SIGKILL
        wait_until(lambda: gone(engine), "the engine is gone", 10.0)
