"""The replay of agents' sessions: what it sends, how answers are judged, what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from argparse import ArgumentParser
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from each_input import each

from benchmarks.serving import slow_disk
from benchmarks.serving.engines import Answer
from benchmarks.serving.floor import matched_tokens, read_possible, write_possible
from benchmarks.serving.replay import Turn
from benchmarks.serving.report import Measured, into_document, judge, markdown, ratio_interval, rows
from benchmarks.serving.scenarios import FULL, SCENARIOS
from benchmarks.serving.sessions import PROMPT_TOKENS_MAX, load_of, sessions
from benchmarks.serving.stores import Place, StoreMissingError, start_lmcache, start_mooncake
from benchmarks.suites import serve

ROOT = Path(__file__).parents[2]


def made(count: int = 6, requests_max: int = 8, seed: int = 7) -> list:
    return sessions(None, count=count, requests_max=requests_max, seed=seed)


def test_sessions_from_a_seed_are_the_same_each_time() -> None:
    assert made() == made()
    assert made() != made(seed=8)


def test_every_prompt_begins_with_what_it_keeps() -> None:
    for session in made():
        for before, request in pairwise(session):
            kept = request.kept_tokens
            assert 0 < kept <= len(before.prompt)
            assert request.prompt[:kept] == before.prompt[:kept]
            assert len(request.prompt) <= PROMPT_TOKENS_MAX


def test_sessions_share_nothing() -> None:
    heads = {session[0].prompt[:32] for session in made()}
    assert len(heads) == 6


def test_a_trace_is_read_up_to_its_first_prompt_that_is_too_long(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    shapes = [
        [[0.0, 0, 2000, "stop"], [1.0, 0, 10, "stop"]],
        [
            [0.0, 0, 10, "tool_use"],
            [60.0, 9, 12, "tool_use"],
            [61.0, 12, 1025, "x"],
            [62, 0, 3, "x"],
        ],
    ]
    trace.write_text("\n".join(map(json.dumps, shapes)))
    ((first, second),) = sessions(trace, count=1, requests_max=9, seed=1)
    assert (len(first.prompt), first.think_s, first.kept_tokens) == (40, 0.0, 0)
    assert (len(second.prompt), second.think_s, second.kept_tokens) == (48, 1.0, 36)
    assert second.prompt[:36] == first.prompt[:36]
    assert second.prompt[36:40] != first.prompt[36:40]
    assert second.possible_tokens(32) == 32
    with pytest.raises(ValueError, match="1 sessions begin small enough, 2 are wanted"):
        sessions(trace, count=2, requests_max=9, seed=1)


def test_the_last_token_is_never_possible_from_a_cache() -> None:
    ((_, second),) = sessions(None, count=1, requests_max=2, seed=3)
    whole = replace(second, prompt=second.prompt[:64], kept_tokens=64)
    assert whole.possible_tokens(32) == 32


def test_sticky_sessions_stay_at_one_engine_and_others_do_not() -> None:
    for session in made():
        at = {SCENARIOS["sticky"].engine_of(r, 2, 7) for r in session}
        assert at == {session[0].session % 2}
    assert {FULL.engine_of(r, 2, 7) for r in made()[0]} == {0, 1}


REFERENCE = Answer(tokens=[5, 6, 7], best=[[(-1.0, 5), (-2.0, 8)], [(-1.0, 6), (-1.001, 9)], []])


@each(
    ("tokens", "verdict"),
    [
        ([5, 6, 7], "equal"),
        ([5, 9, 1], "tie"),
        ([8, 6, 7], "wrong"),
        ([5, 4, 7], "wrong"),
        ([5, 6, 3], "wrong"),
        ([5, 6], "wrong"),
    ],
)
def test_a_tie_is_the_second_best_token_within_noise(tokens: list[int], verdict: str) -> None:
    assert judge(REFERENCE, Answer(tokens=tokens), 0.02) == verdict


def test_an_answer_with_an_error_is_no_wrong_one() -> None:
    assert judge(REFERENCE, Answer(error="gone"), 0.02) == "error"


def test_the_interval_holds_the_mean_and_is_none_for_few_turns() -> None:
    middle, interval = ratio_interval([1.1, 1.2, 1.3])
    assert interval is not None
    assert interval[0] < middle < interval[1]
    assert middle == pytest.approx((1.1 * 1.2 * 1.3) ** (1 / 3))
    # By hand: s of the logs 0.0836, t(2) 4.303, half of the interval 0.2077.
    assert interval[1] / middle == pytest.approx(1.231, abs=0.002)
    assert ratio_interval([1.1, 1.2]) == (pytest.approx((1.1 * 1.2) ** 0.5), None)


def measured(*walls: dict[str, float | str]) -> list[dict]:
    """Rows of turns with those walls, or reasons."""
    replayed = made(1, 2)
    answers = {r.name: Answer(tokens=[1], ttft_s=0.5, cached_tokens=32) for r in replayed[0]}

    def turn(connector: str, wall_s: float | str) -> Turn:
        if isinstance(wall_s, str):
            return Turn(connector, reason=wall_s)
        return Turn(connector, wall_s=wall_s, answers=answers)

    turns = {c: [turn(c, one[c]) for one in walls] for c in walls[0]}
    reference = turns["none"][0] if "none" in turns else None
    return rows(Measured("full", turns, reference, load_of(replayed, 32), "bfloat16"))


def test_a_peer_that_does_not_start_is_a_row_with_its_reason() -> None:
    none, ours, peer = measured({"none": 9.0, "kvstore": 3.0, "LMCacheMPConnector": "no lmcache"})
    assert (peer["turns"], peer["said"]) == (0, "no lmcache")
    assert (ours["equal"], ours["wrong"], ours["errors"]) == (2, 0, 0)
    few = "no interval, too few to tell"
    assert none["said"] == f"kvstore 3.00 times as fast in 1 of 3 turns: {few}"
    assert ours["said"] == f"1 of 3 turns: {few}"
    assert "no lmcache" in markdown({}, [none, ours, peer])


def test_a_connector_that_answers_nothing_is_a_row_of_errors() -> None:
    replayed = made(1, 2)
    reference = Turn("none", wall_s=9.0, answers={r.name: Answer(tokens=[1]) for r in replayed[0]})
    dead = {r.name: Answer(error="the engine has ended") for r in replayed[0]}
    turns = {
        "LMCacheMPConnector": [Turn("LMCacheMPConnector", wall_s=420.0, answers=dead, over=False)]
    }
    (row,) = rows(Measured("store-killed", turns, reference, load_of(replayed, 32), "bfloat16"))
    assert (row["equal"], row["wrong"], row["errors"], row["ttft_s_p99"]) == (0, 0, 2, None)
    assert row["said"] == "not over after 420 s"


def test_a_run_that_is_too_small_to_tell_says_so() -> None:
    near = measured(*({"kvstore": w, "LMCacheMPConnector": 10.0} for w in (9.0, 10.5, 10.0)))
    assert near[1]["said"].endswith("too small a run to tell")
    far = measured(*({"kvstore": w, "LMCacheMPConnector": 10.0} for w in (4.0, 4.1, 4.2)))
    assert far[1]["said"] == "kvstore 2.44 times as fast (2.30 to 2.59, 95%)"


def test_turns_are_compared_in_pairs_though_one_did_not_run() -> None:
    walls = ({"kvstore": 1.0, "x": "gone"}, {"kvstore": 2.0, "x": 6.0}, {"kvstore": 3.0, "x": 9.0})
    assert measured(*walls)[1]["said"].startswith("gone; kvstore 3.00 times as fast in 2 of 3")


def test_the_floor_is_not_compared_with_answers_and_bounds_the_best_peer() -> None:
    turn = {"none": 9.0, "kvstore": 3.0, "LMCacheMPConnector": 4.0, "Mooncake": 3.3, "floor": 3.0}
    *_, floor = measured(turn, turn, turn)
    assert (floor["equal"], floor["ties"], floor["wrong"]) == (None, None, None)
    bound = "no store can be more than 1.10 (1.10 to 1.10, 95%) times as fast as Mooncake"
    assert floor["said"].endswith(bound)


def test_the_floor_finds_what_an_unlimited_cache_has_and_no_more(tmp_path: Path) -> None:
    replayed = made()
    load = load_of(replayed, 32)
    write_possible(tmp_path / "possible.json", replayed, 32)
    possible = read_possible(tmp_path / "possible.json")
    found = [matched_tokens(possible, list(r.prompt), 0) for s in replayed for r in s]
    assert sum(found) == load.possible_tokens
    assert found[0] == 0
    assert all(number % 32 == 0 for number in found)
    second = replayed[0][1]
    assert matched_tokens(possible, second.prompt, 32) == found[1] - 32
    assert matched_tokens(possible, second.prompt, len(second.prompt)) == 0
    assert matched_tokens(possible, (*second.prompt, 5), 0) == 0


def test_answers_are_compared_where_rounding_moves_no_token_by_default() -> None:
    parser = ArgumentParser()
    serve.arguments(parser)
    assert parser.parse_args([]).dtype == "float32"
    assert parser.parse_args(["--dtype", "bfloat16"]).dtype == "bfloat16"


@pytest.mark.parametrize(("dtype", "told"), [("bfloat16", True), ("float32", False)])
def test_what_is_wrong_in_bfloat16_may_be_rounding(dtype: str, told: bool) -> None:
    replayed = made(1, 2)
    right = {r.name: Answer(tokens=[1]) for r in replayed[0]}
    other = {r.name: Answer(tokens=[2]) for r in replayed[0]}
    reference, turn = Turn("none", wall_s=9, answers=right), Turn("x", wall_s=3, answers=other)
    (row,) = rows(Measured("full", {"x": [turn]}, reference, load_of(replayed, 32), dtype))
    assert row["wrong"] == 2
    assert ("may be rounding" in row["said"]) == told


def test_the_tables_replace_their_section_alone() -> None:
    once = into_document("# B\n\n## a\n\nx\n\n## serve\n\nold\n\n## z\n\ny\n", "new")
    assert "old" not in once
    assert once.startswith("# B\n\n## a\n\nx\n\n## serve\n\n")
    assert once.endswith("new\n\n## z\n\ny\n")
    assert into_document(once, "new") == once
    assert into_document("# B\n", "new").endswith("new\n")


@pytest.mark.parametrize("start", [start_mooncake, start_lmcache])
def test_what_is_not_installed_is_told_with_the_command_that_gets_it(start, tmp_path) -> None:
    with pytest.raises(StoreMissingError, match="scripts/bench serve --install-peers"):
        start(Place(tmp_path, tmp_path, 1 << 30, 2, tmp_path / "nowhere"))


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_quick_replay_answers_everything_as_without_a_store(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    bench = [sys.executable, "-m", "benchmarks", "serve", "--quick", "--json"]
    done = subprocess.run(
        [*bench, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    none, ours, floor = told["rows"]
    assert [row["connector"] for row in told["rows"]] == ["none", "kvstore", "floor"]
    assert told["machine"]["dtype"] == "float32"
    assert (floor["turns"], floor["errors"], floor["wrong"]) == (1, 0, None)
    assert floor["hit"] == floor["hit_possible"]
    for row in (none, ours):
        assert row["turns"] == 1, row
        assert (row["wrong"], row["errors"]) == (0, 0)
        assert row["equal"] + row["ties"] == 16, row
        assert row["engine_cpu_s"] > 0
    assert none["hit"] < ours["hit"] <= ours["hit_possible"]
    # A quick machine's store may use less than a tick (10 ms).
    assert ours["engine_cpu_s"] > ours["store_cpu_s"] >= 0 == none["store_cpu_s"]
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - before}
    assert not [name for name in left if "kvb" in name]
    assert (tmp_path / "table.md").read_text().count("| kvstore |") == 1


def test_what_an_engine_starts_is_the_engines_unless_it_has_the_stores_mark() -> None:
    bench = textwrap.dedent("""
        import json, subprocess, sys
        from benchmarks.serving.family import *
        busy = "import time\\nwhile time.process_time() < 0.3: pass\\nprint(1, flush=True); input()"
        child = [sys.executable, "-c", busy]
        told = []
        for mark in (None, "process_time"):
            engine = subprocess.Popen(
                [sys.executable, "-c", f"import subprocess; subprocess.run({child!r})"]
                if mark is None else child,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            family = Family([engine.pid] if mark is None else [], [], mark)
            family.begin()
            engine.stdout.readline()
            family.sample()
            told.append([family.cpu_s("engine") > 0.2, family.cpu_s("store") > 0.2])
            engine.communicate(b"\\n")
        print(json.dumps(told))
    """)
    said = subprocess.run(
        [sys.executable, "-c", bench],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert json.loads(said) == [[True, False], [False, True]]


def test_orphans_are_counted_and_ended_and_their_shared_memory_is_removed(tmp_path: Path) -> None:
    name = f"/dev/shm/kvb-test-{tmp_path.parent.name}"
    child = textwrap.dedent(f"""
        import mmap, os, subprocess, sys, time
        if len(sys.argv) == 1:  # the parent ends, its child is an orphan
            subprocess.Popen([sys.executable, __file__, "on"], stdout=sys.stdout)
            sys.exit()
        with open({name!r}, "wb+") as file:
            file.truncate(4096)
            kept = mmap.mmap(file.fileno(), 4096)
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        print(os.getpid(), flush=True)
        time.sleep(600)
    """)
    bench = textwrap.dedent("""
        import json, subprocess, sys
        from benchmarks.serving.family import *
        become_subreaper()
        parent = subprocess.Popen([sys.executable, sys.argv[1]], stdout=subprocess.PIPE)
        family = Family([], [parent.pid], "no such mark")
        family.begin()
        pid = int(parent.stdout.readline())
        parent.wait()
        family.sample()
        family.note_shm()
        killed = end_all(spared=())
        family.sample()
        print(json.dumps({
            "killed": killed == [pid],
            "left": sorted(descendants()),
            "store": family.cpu_s("store"),
            "engine": family.cpu_s("engine"),
            "removed": remove_shm(family.shm_files),
        }))
    """)
    program = tmp_path / "child.py"
    program.write_text(child)
    said = subprocess.run(
        [sys.executable, "-c", bench, str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    found = json.loads(said)
    assert found.pop("store") >= 0.25
    assert found == {"killed": True, "left": [], "engine": 0, "removed": [name]}
    assert not Path(name).exists()


def test_a_slow_disk_is_compared_with_the_better_one_without_a_disk() -> None:
    fast, slow, *_, broken = slow_disk.STATES
    asked = [
        slow_disk.Asked(state, variant, (0, 1), SimpleNamespace(tokens=tokens, ttft_s=ttft_s,
                                                                cached_tokens=768))
        for state, variant, ttft_s, tokens in (
            (slow, "none", 2.0, [1]),
            (slow, "kvstore", 1.0, [1]),
            (slow, "kvstore --disk", 0.5, [1]),
            (broken, "none", 2.0, [1]),
            (broken, "kvstore", 4.0, [1]),
            (broken, "kvstore --disk", 8.0, [2]),
        )
    ]  # fmt: skip
    found = slow_disk.rows(asked)
    ours = [row for row in found if row["variant"] == "kvstore --disk"]
    said = [(row["disk"], row["p50_ratio"], row["other"]) for row in ours]
    assert said == [(slow, 0.5, 0), (broken, 4.0, 1)]
    assert fast not in {row["disk"] for row in found}
