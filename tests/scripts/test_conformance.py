"""The judge of connectors calls wrong what is wrong, and only that."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from each_input import each

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "scripts" / "lib"))

from conformance import bench as conformance_bench  # noqa: E402
from conformance import faults as conformance_faults  # noqa: E402
from conformance import results as conformance_results  # noqa: E402
from conformance import run as conformance  # noqa: E402
from conformance.bench import (  # noqa: E402
    APPLIES_NOT,
    DIED,
    FAILED,
    LOADED,
    NOT_RUN,
    RECOMPUTED,
    REFUSED,
    SHARED,
    SILENT,
    WRONG,
    Bench,
    Verdict,
    filled_in,
    judge,
)
from conformance.faults import flip_bits, flip_copies, lose_store  # noqa: E402
from conformance.results import PAGE, RESULTS, command, enter, table, with_table  # noqa: E402
from conformance.run import CONTROL, failed  # noqa: E402
from engines import Generated  # noqa: E402

RIGHT = [[1, 2, 3], [4, 5, 6]]


def answers(tokens: list[list[int]], cached: int) -> list[Generated]:
    return [Generated(one, 0.1, cached) for one in tokens]


@each(
    ("tokens", "cached", "apart", "verdict"),
    [
        (RIGHT, 64, False, LOADED),
        (RIGHT, 0, False, RECOMPUTED),
        (RIGHT, 0, True, RECOMPUTED),
        (RIGHT, 64, True, SHARED),
        ([RIGHT[0], [4, 5, 7]], 64, False, WRONG),
        ([RIGHT[0], [4, 5]], 0, False, FAILED),
        ([RIGHT[0], []], 0, True, FAILED),
        ([RIGHT[0], [*RIGHT[1], 7]], 0, False, WRONG),
        ([RIGHT[0], [4, 5, 7]], 64, True, WRONG),
    ],
)
def test_a_verdict_says_what_was_answered_and_where_it_came_from(
    tokens: list[list[int]], cached: int, apart: bool, verdict: str
) -> None:
    found = judge("c", RIGHT, answers(tokens, cached), 1000, apart=apart)
    assert (found.verdict, found.cached_tokens) == (verdict, 2 * cached)


@each(
    ("case", "verdict", "fails"),
    [
        ("c", LOADED, False),
        ("c", RECOMPUTED, False),
        ("c", NOT_RUN, False),
        ("c", WRONG, True),
        ("c", SHARED, True),
        ("c", FAILED, True),
        ("c", DIED, True),
        ("c", SILENT, True),
        ("c", REFUSED, False),
        ("shared-prefix", REFUSED, True),
        ("shared-again", RECOMPUTED, True),
        (CONTROL, WRONG, False),
        ("shared-prefix", LOADED, False),
        ("shared-prefix", RECOMPUTED, True),
        (CONTROL, LOADED, True),
        (CONTROL, RECOMPUTED, True),
        (CONTROL, DIED, True),
    ],
)
def test_a_run_fails_for_what_is_bad_and_for_a_control_that_passes(
    case: str, verdict: str, fails: bool
) -> None:
    assert failed([Verdict("other", LOADED), Verdict(case, verdict)]) is fails


def test_the_folder_of_the_run_stands_wherever_the_configuration_wants_it() -> None:
    given = {"a": "{dir}/x", "b": [{"c": "kv:{id}"}], "d": 3}
    assert filled_in(given, Path("/w"), "n") == {"a": "/w/x", "b": [{"c": "kv:n"}], "d": 3}


def test_bits_are_flipped_where_bytes_are_and_nowhere_else(tmp_path: Path) -> None:
    payload, empty, small = tmp_path / "payload", tmp_path / "empty", tmp_path / "small"
    payload.write_bytes(bytes(4096) + b"\x01" * 4096)
    empty.write_bytes(bytes(8192))
    small.write_bytes(b"a name")
    assert flip_bits(tmp_path) == ""
    assert payload.read_bytes()[:4096] == bytes(4096)
    assert sum(a != 1 for a in payload.read_bytes()[4096:]) == 8
    assert (empty.read_bytes(), small.read_bytes()) == (bytes(8192), b"a name")


def test_what_cannot_be_reached_is_said_and_not_counted(tmp_path: Path) -> None:
    assert "no file of {dir}" in flip_bits(tmp_path)
    assert "no file in {dir}" in lose_store(tmp_path)


def test_a_store_is_lost_with_its_nodes_or_else_with_its_files(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "payload").write_bytes(b"x" * 8192)
    assert lose_store(files) == ""
    assert list(files.iterdir()) == []

    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    node = tmp_path / "nodes" / "n"
    node.mkdir(parents=True)
    word = {"pid": process.pid, "data_path": str(tmp_path / "gone")}
    (node / "node.json").write_text(json.dumps(word))
    assert lose_store(tmp_path) == ""
    assert process.wait(10) == -9


HOLDS_COPIES = """
import mmap, sys
maps = [mmap.mmap(-1, 4 << 20) for _ in range(2)]
for one in maps:
    for i in range(64):  # byte by byte: nothing else of this process has them all
        one[4096 + i] = i + 1
        one[8192 + i] = min(i, 32) + 1
import ctypes
print(*(ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in maps), flush=True)
sys.stdin.read()
print(*(one[:16384].hex() for one in maps), flush=True)
"""


def test_bits_are_flipped_in_a_processs_copies_but_for_its_own_cache() -> None:
    needle = bytes(range(1, 65))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_COPIES], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        cache = int(process.stdout.readline().split()[1])
        assert flip_copies(process.pid, [bytes(range(2, 66))], []) == 0
        assert flip_copies(process.pid, [needle], [(cache, 4 << 20)]) == 1
        process.stdin.close()
        in_store, in_cache = (bytes.fromhex(o.decode()) for o in process.stdout.read().split())
    assert in_cache[4096:4160] == needle
    assert in_store[4096:4160] == needle[:-1] + bytes([needle[-1] ^ 0x40])
    assert in_store[:4096] + in_store[4160:] == in_cache[:4096] + in_cache[4160:]


def test_what_a_connector_has_started_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_faults, "END_TIMEOUT_S", 0.2)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", deaf]
    started = []
    try:
        with conformance.bench_of({}) as bench:
            for env in ({**os.environ, "TMPDIR": str(bench.tmp)}, None):
                process = subprocess.Popen(
                    command, env=env, start_new_session=env is not None, stdout=subprocess.PIPE
                )
                started.append(process)
                assert process.stdout is not None
                assert process.stdout.readline() == b"deaf\n"
        server, other = started
        assert server.wait(10) == -9
        assert other.poll() is None
        assert not bench.work.exists()
    finally:
        for process in started:
            with process:
                process.kill()


BUSY_ENGINE = """
import threading, time, engines

class Busy:
    def __init__(self):
        threading.Thread(target=time.sleep, args=(600,)).start()

engines.serve(lambda model, settings: Busy())
"""


def test_an_engine_ends_with_the_script_that_started_it(tmp_path: Path) -> None:
    program = tmp_path / "busy.py"
    program.write_text(BUSY_ENGINE)
    script = f"""
import sys
from pathlib import Path
import engines
settings = engines.EngineSettings(env={{"PYTHONPATH": {str(PROJECT / "scripts" / "lib")!r}}})
program = Path({str(program)!r})
print(engines.EngineProcess(Path("m"), settings, program=program, fresh=True).pid, flush=True)
sys.stdin.read()
"""
    env = {**os.environ, "PYTHONPATH": str(PROJECT / "scripts" / "lib")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=env, **pipes) as process:
        assert process.stdout is not None
        engine = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    try:
        assert select.select([engine], [], [], 20)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(engine, signal.SIGKILL)
        os.close(engine)


def judged(monkeypatch: pytest.MonkeyPatch, error: Exception, pids: list[int]) -> list[str]:
    """Verdicts of three cases, of which the second one fails so."""

    def right(bench: Bench) -> Verdict:
        return Verdict("right", LOADED, 1, 1)

    def fails(bench: Bench) -> Verdict:
        raise error

    cases = {"right": right, "fails": fails, "right again": right}
    monkeypatch.setattr(conformance, "CASES", cases)
    return [one.verdict for one in conformance.run({}, list(cases), pids=pids)]


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (TimeoutError("timed out"), SILENT),
        (RuntimeError("the engine ended with code -11"), DIED),
        (BrokenPipeError(), DIED),
        (RuntimeError("an engine did not start, see /x/a.log: ValueError: chunks"), REFUSED),
        (RuntimeError("an engine did not start, see /x/a.log: Exception: only on GPUs"), REFUSED),
        (RuntimeError("an engine did not start, see /x/a.log: KeyError: 'x'"), DIED),
    ],
)
def test_a_case_that_fails_has_a_verdict_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: str
) -> None:
    assert judged(monkeypatch, error, []) == [LOADED, verdict, LOADED]


def test_nothing_is_right_once_the_store_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    store = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, store.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as a child of ours is
    assert judged(monkeypatch, TimeoutError(), [store.pid]) == [DIED, SILENT, DIED]
    store.wait(10)
    alive = judged(monkeypatch, TimeoutError(), [os.getpid()])
    assert alive == [LOADED, SILENT, LOADED]


def test_results_are_kept_by_connector_and_case_and_shown_without_this_machine() -> None:
    results: conformance_results.Results = {}
    said = "an engine did not start, see /tmp/kvc1/first.log: boom"
    for verdict in (Verdict("a", LOADED, 5, 6), Verdict("b", DIED, detail=said)):
        enter(results, "Some", ("Thing 1", "0.32"), ("2026-01-01", "run --peer some"), verdict)
    enter(results, "Other", ("", "0.32"), ("2026-01-02", "run"), Verdict("a", WRONG, 5, 6))
    enter(results, "Some", ("Thing 2", "0.32"), ("2026-01-03", "run"), Verdict("a", SILENT))
    shown = table(results)
    assert "| `a` | **wrong tokens**, 5 of 6 | **no answer** |" in shown
    assert "| `b` |  | **engine failed** |" in shown
    assert "Thing 2" in shown
    assert "2026-01-01 to 2026-01-03" in shown
    assert "see first.log: boom" in shown
    assert "/tmp" not in shown


def test_a_command_is_shown_as_another_machine_would_be_given_it() -> None:
    told = ["--peer", "nixl", "--lock", "/tmp/l", "--peers-venv=/tmp/v", "--only", "a", "--publish"]
    assert command(told) == "scripts/conformance --peer nixl"


def test_the_table_on_the_page_is_that_of_the_results() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    assert with_table(PAGE.read_text(), results) == PAGE.read_text()


JUDGED_HERE = (
    "shared-prefix",
    "long-prefix",
    "cache-salt",
    "killed-while-saving",
    "flipped-bits",
    "adapters",
    "pictures",
    "states",
    "evicted-before-load",
    "store-lost",
)
"""Half of the cases; scripts/nightly has the time for all."""


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_this_projects_connector_gives_nothing_wrong_and_the_control_does() -> None:
    script = (str(PROJECT / "scripts" / "lib"), "conformance.run")
    done = subprocess.run(
        [sys.executable, *script, "--json", *(f"--only={case}" for case in JUDGED_HERE)],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cases = {one["case"]: one["verdict"] for one in json.loads(done.stdout)["cases"]}
    assert cases.pop(CONTROL) == WRONG
    assert cases["shared-prefix"] == cases["long-prefix"] == LOADED
    assert cases["flipped-bits"] == RECOMPUTED


FOLDER = {
    "kv_connector": "FolderConnector",
    "kv_connector_module_path": "folder_connectors",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"folder": "{dir}"},
}
FOUND_OUT = (
    ("FolderConnector", "shared-prefix", LOADED),
    ("FolderConnector", "control: loads zeros", WRONG),
    ("FolderConnector", "parts-of-prompts", LOADED),
    ("FolderConnector", "cache-salt", RECOMPUTED),
    ("FolderConnector", "flipped-bits", LOADED),  # vLLM counts what a load was to bring
    ("NoSalt", "cache-salt", SHARED),
)
"""Connectors of tests/support/vllm_engines/folder_connectors.py, and the case that finds each."""


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_connector_that_somebody_wrote_is_right_or_found_out() -> None:
    found = []
    with conformance.bench_of(FOLDER) as bench:
        for kind, case, _ in FOUND_OUT:
            (bench.folder / "kind").write_text(kind)
            found.append((kind, case, conformance._judged(bench, case).verdict))
            bench.let_go()
    assert tuple(found) == FOUND_OUT


def test_a_connector_of_which_nothing_can_be_said_is_not_asked_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shared_prefix(bench: Bench) -> Verdict:
        bench.without["a"] = "it has none"
        return Verdict("shared-prefix", verdict)

    cases = {"shared-prefix": shared_prefix, "a": shared_prefix}
    monkeypatch.setattr(conformance, "CASES", cases)
    for verdict, ran in ((RECOMPUTED, 1), (REFUSED, 1), (LOADED, 2), (WRONG, 2)):
        found = [(one.verdict, one.detail) for one in conformance.run({}, list(cases))]
        assert found == [(verdict, ""), (APPLIES_NOT, "it has none")][:ran]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["{"], "CONNECTOR_JSON: Expecting property name"),
        (["[]"], 'must be {"kv_connector": NAME, ...}'),
        (['{"kv_role": "kv_both"}'], 'must be {"kv_connector": NAME, ...}'),
        (['{"kv_connector": "A"}', "--peer", "nixl"], "--peer names the connector"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused_with_the_reason(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        conformance.arguments(given)
    assert said in capsys.readouterr().err


def test_paths_of_environments_are_the_callers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    given = conformance.arguments(["--python", "python", "--peers-venv", "peers"])
    assert (given.python, given.peers_venv) == (tmp_path / "python", tmp_path / "peers")
    assert conformance.arguments([]).python is None
    assert conformance_bench.absolute("a::/b") == f"{tmp_path}/a:/b"


class Store:
    """Stands in for engines that share KV: knows of prompts, and answers with their tokens."""

    def __init__(self, *, alike: str = "") -> None:
        self.kept: list[list[int]] = []
        self.alike = alike

    def generate(self, prompts: list[list[int]], **_: object) -> list[Generated]:
        found = [Generated([sum(one)], 0.1, self.cached(one)) for one in prompts]
        self.kept += prompts
        return found

    def cached(self, prompt: list[int]) -> int:
        """As a store of blocks of 32 tokens, named with what is before them or, wrongly, not."""
        blocks = [prompt[i : i + 32] for i in range(0, len(prompt) - 32, 32)]
        most = 0
        for kept in self.kept:
            same = [a == kept[i * 32 : i * 32 + 32] for i, a in enumerate(blocks)]
            most = max(most, same.index(False) if False in same else len(same))
        if self.alike == "own tokens":
            known = {tuple(k[i : i + 32]) for k in self.kept for i in range(0, len(k), 32)}
            most = next((i for i, a in enumerate(blocks) if tuple(a) not in known), len(blocks))
        if self.alike == "all of it":
            most = len(blocks) if most else 0
        return 32 * most

    def call(self, op: str, **_: object) -> bool:
        return True

    def drain(self) -> None:
        pass


@pytest.mark.parametrize(
    ("alike", "verdict"), [("", LOADED), ("own tokens", SHARED), ("all of it", SHARED)]
)
def test_of_prompts_that_share_a_part_no_more_may_be_loaded(
    alike: str, verdict: str, tmp_path: Path
) -> None:
    store = Store(alike=alike)
    with conformance.bench_of({}) as bench:
        bench.engines = {"alone": Store(), "first": store, "second": store}  # type: ignore[dict-item]
        bench.models[7] = tmp_path
        (bench.work / "mounted is 7").touch()
        assert conformance.CASES["parts-of-prompts"](bench).verdict == verdict
