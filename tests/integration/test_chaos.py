"""`scripts/chaos`: its plan, its verdict, and a short run of it without an engine."""

import itertools
import signal

import chaos
import chaos_plan as plan
import pytest
from script_runs import run_without_engine

RIGHT = {(1,): [7, 8], (2,): [9]}
SEED, SECONDS = 48, 12.0
"""The shortest run in which node and Redis are both killed."""
FAULT = plan.Window(plan.Fault(10.0, "node", "kill", 2.0), 10.0, 12.5)


def answer(prompt, tokens, at_s=0.0, kind=plan.REPEAT, cached=plan.BLOCK):
    return plan.Answer(prompt, kind, at_s, 0.5, tokens, 0.25, cached)


def verdict(*answers, windows=(FAULT,)):
    summary = plan.judge(answers, RIGHT, windows, [0.5])
    return plan.passed(summary, planned=1), summary


@pytest.mark.parametrize("seed", range(50))
def test_faults_come_one_at_a_time_and_end_before_the_run_does(seed):
    faults = plan.faults(seed, 120.0)
    assert faults == plan.faults(seed, 120.0)
    ends = [fault.at_s + fault.lasts_s for fault in faults]
    assert faults[0].at_s == plan.FIRST_FAULT_S
    assert ends[-1] + plan.AFTER_S <= 120.0
    for end, after in itertools.pairwise(zip(ends, faults, strict=True)):
        assert after[1].at_s >= end[0] + plan.CALM_S[0]
    assert {(fault.victim, fault.kind) for fault in faults} == set(plan.WAYS)


def test_prompts_follow_the_seed_and_old_ones_come_again():
    first, again = (list(itertools.islice(plan.traffic(3, 500), 200)) for _ in range(2))
    assert first == again
    for i, (kind, prompt) in enumerate(first):
        assert len(prompt) == plan.BLOCKS * plan.BLOCK + plan.TAIL_TOKENS
        before = [p for _, p in first[:i]]
        half = plan.BLOCKS // 2 * plan.BLOCK
        assert (prompt in before) == (kind == plan.REPEAT)
        assert any(p[:half] == prompt[:half] for p in before) == (kind != plan.NEW)


def test_all_answered_and_alike_passes():
    assert verdict(answer((1,), [7, 8]), answer((2,), [9]))[0]


@pytest.mark.parametrize(
    "bad",
    [
        answer((1,), [7, 9]),
        answer((1,), [7]),
        answer((1,), []),
        answer((1,), None),
        answer((3,), [1]),
    ],
    ids=["another token", "too short", "empty", "not answered", "the reference is missing"],
)
def test_one_wrong_or_missing_answer_fails(bad):
    assert not verdict(answer((1,), [7, 8]), answer((2,), [9]), bad)[0]


def test_a_run_without_its_faults_or_without_loads_fails():
    assert not verdict(answer((1,), [7, 8]), windows=())[0]
    assert not verdict(answer((1,), [7, 8], cached=0))[0]
    assert not verdict()[0]


def test_an_answer_counts_under_the_fault_it_meets():
    def where(at_s):
        return set(verdict(answer((1,), [7, 8], at_s))[1]["under"])

    fault = {"fault", "kill node"}
    assert where(9.0) == {"calm"}
    assert where(9.6) == fault
    assert where(12.5 + plan.AFTER_S - 0.1) == fault
    assert where(12.5 + plan.AFTER_S) == {"calm"}


def test_redis_is_up_once_it_answers_whatever_sockets_lie_about(tmp_path):
    store = chaos.Store(tmp_path)
    try:
        assert store._up("redis", 0)
        store.end("redis", signal.SIGKILL)
        assert store.socket.exists()
        assert not store._up("redis", 0)
        store.start("redis")
        assert store._up("redis", 0)
    finally:
        store.close()


def test_a_short_run_without_an_engine_passes(tmp_path):
    pytest.importorskip("matplotlib", reason="the demo extra is not installed")
    (fault,) = plan.faults(SEED, SECONDS)
    assert (fault.victim, fault.kind) == ("both", "kill")
    options = ("--seed", str(SEED), "--seconds", str(SECONDS), "--out", str(tmp_path))
    summary, _ = run_without_engine("chaos.py", *options)
    assert summary["answered"] == summary["identical"] == summary["requests"] > 0
    assert (tmp_path / "chaos.png").stat().st_size > 10_000
