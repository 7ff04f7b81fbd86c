"""`scripts/chaos`: its plan, its verdict, and a short run of it without an engine."""

import contextlib
import itertools
import signal
import threading
import time
from contextlib import closing

import pytest
import synthetic
from chaos import plan
from chaos import run as chaos
from chaos.load import NEW_TOKENS
from each_input import each
from engines import EngineSettings, kv_transfer
from redis_servers import wait_until
from script_runs import run_without_engine
from services import redis_up
from synthetic import SyntheticDriver

from kvstore import Client
from kvstore.client.nodes.saving.link import NodeLink
from kvstore.client.values import put_pipeline
from kvstore.client.values.put_pipeline import unless
from kvstore.protocol.control import Op
from kvstore.testing.crash import workers

RIGHT = {(1,): [7, 8], (2,): [9]}
SEED, SECONDS = 48, 12.0
"""The shortest run in which node and Redis are both killed."""
RUDE = {"wrong": [], **dict.fromkeys(plan.RUDE, 1)}
FAULT = plan.Window(plan.Fault(10.0, "node", "kill", 2.0), 10.0, 12.5)


def answer(prompt, tokens, at_s=0.0, kind=plan.REPEAT, cached=plan.BLOCK):
    return plan.Answer(prompt, kind, at_s, 0.5, tokens, 0.25, cached)


def verdict(*answers, windows=(FAULT,)):
    summary = plan.judge(answers, RIGHT, windows, [0.5]) | {"neighbours": RUDE}
    return plan.passed(summary, planned=1), summary


@each("seed", range(50))
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


@each(
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


@pytest.mark.parametrize("bad", [{"wrong": ["read wrong bytes"]}, {"cancelled": 0}, {"forks": 0}])
def test_neighbours_that_met_something_wrong_or_did_nothing_fail(bad):
    assert verdict(answer((1,), [7, 8]))[0]
    summary = verdict(answer((1,), [7, 8]))[1] | {"neighbours": {**RUDE, **bad}}
    assert not plan.passed(summary, planned=1)


def test_an_answer_counts_under_the_fault_it_meets():
    def where(at_s):
        return set(verdict(answer((1,), [7, 8], at_s))[1]["under"])

    fault = {"fault", "kill node"}
    assert where(9.0) == {"calm"}
    assert where(9.6) == fault
    assert where(12.5 + plan.AFTER_S - 0.1) == fault
    assert where(12.5 + plan.AFTER_S) == {"calm"}


def test_redis_is_up_once_it_answers_whatever_sockets_lie_about(tmp_path):
    with closing(chaos.Store(tmp_path)) as store:
        up, server = redis_up(store.socket), store.services["redis"]
        assert up(server)
        store.end("redis", signal.SIGKILL)
        assert store.socket.exists()
        assert not up(server)
        store.start("redis")
        assert up(server)


@pytest.mark.long
def test_a_short_run_without_an_engine_passes(tmp_path):
    pytest.importorskip("matplotlib", reason="the demo extra is not installed")
    (fault,) = plan.faults(SEED, SECONDS)
    assert (fault.victim, fault.kind) == ("both", "kill")
    options = ("--seed", str(SEED), "--seconds", str(SECONDS), "--out", str(tmp_path))
    summary, _ = run_without_engine("chaos.run", *options)
    assert summary["answered"] == summary["identical"] == summary["requests"] > 0
    assert (tmp_path / "chaos.png").stat().st_size > 10_000


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """(store, an engine on the node's host, one on another host, one without a store)"""
    monkeypatch.setattr(chaos, "NODE_BYTES", 128 << 20)
    monkeypatch.setattr(chaos, "TAMPER_CHANCE", 0.5)
    with contextlib.ExitStack() as stack:
        store = chaos.Store(tmp_path)
        stack.callback(store.close)
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)

        def engine(run_dir):
            transfer = kv_transfer(url=store.url, run_dir=str(run_dir), key_prefix=chaos.KEY_PREFIX)
            made = SyntheticDriver(EngineSettings(connector=transfer if run_dir else None))
            stack.callback(made.close)
            return made

        yield store, engine(store.run_dir), engine(store.far_run_dir), engine(None)


def of(engine, prompt, at_s=0.0):
    (done,) = engine.generate([list(prompt)], NEW_TOKENS, {})
    return plan.Answer(prompt, plan.REPEAT, at_s, 0.5, **done)


def verdict_on(answers, alone):
    right = {answer.prompt: of(alone, answer.prompt).tokens for answer in answers}
    summary = plan.judge(answers, right, [FAULT], [0.5]) | {"neighbours": RUDE}
    return plan.passed(summary, planned=1)


def test_who_tampers_between_hosts_changes_no_answer(hosts):
    store, near, far, alone = hosts
    prompts = [(i,) * (plan.BLOCK + plan.TAIL_TOKENS) for i in range(3)]
    for prompt in prompts:
        of(near, prompt)
    wait_until(lambda: of(far, prompts[0]).cached_tokens, "the other host loads")
    fault = plan.Fault(0.0, "stream", plan.TAMPER, 4.0)
    tampering = threading.Thread(target=store.carry_out, args=(fault,))
    tampering.start()
    answers = [of(far, prompts[0])]
    while tampering.is_alive():
        answers += [of(far, prompt) for prompt in prompts]
        time.sleep(0.1)
    tampering.join()
    assert store.tampered > 0
    assert {answer.tokens is None for answer in answers} == {False}
    answers.append(of(near, prompts[0]))
    assert verdict_on(answers, alone)


def test_one_wrong_byte_that_is_loaded_is_noticed(hosts):
    """The others show nothing unless this is so."""
    _, near, far, alone = hosts
    prompt = (5,) * (plan.BLOCK + plan.TAIL_TOKENS)
    of(near, prompt)
    read = far.client.get_blocks

    def spoilt(tokens, out):
        wait_until(lambda: read(tokens, out), "the other host loads")
        out[0][-1] ^= 1
        return 1

    assert verdict_on([of(far, prompt)], alone)
    far.client.get_blocks = spoilt
    assert not verdict_on([of(far, prompt)], alone)


def committed(self, handles):
    """In the place of `NodeLink._give_back`: what a call leaves behind is sealed."""
    if handles:
        items = [(*handle, 0) for handle in handles if handle in self.held.reserved]
        self.control.request(Op.COMMIT, items)


def given_up(engine, prompt, monkeypatch):
    """Ask, and give it up when one block of its save is copied."""
    wanted = iter([True] * (plan.BLOCKS + 2))
    with monkeypatch.context() as patched:
        patched.setattr(put_pipeline, "COPY_BYTES", 1)  # so that each is a copy of its own
        patched.setattr(
            synthetic, "unless", lambda _, call: unless(lambda: not next(wanted, False), call)
        )
        (done,) = engine.generate([list(prompt)], NEW_TOKENS, {"0": 0.0})
    assert next(wanted, None) is None
    assert done["tokens"] == []


def test_a_request_that_is_given_up_in_its_save_changes_no_answer(hosts, monkeypatch):
    _, near, _, alone = hosts
    whole = plan.BLOCKS * plan.BLOCK + plan.TAIL_TOKENS
    given_up(near, (6,) * whole, monkeypatch)
    assert verdict_on([of(near, (6,) * whole), of(near, (6,) * whole)], alone)
    # What was given up is sealed: if that is not noticed, the above shows nothing.
    monkeypatch.setattr(NodeLink, "_give_back", committed)
    given_up(near, (7,) * whole, monkeypatch)
    assert not verdict_on([of(near, (7,) * whole)], alone)


def test_a_neighbour_that_reads_one_wrong_byte_is_noticed(hosts):
    store, *_ = hosts
    with closing(store.neighbours(1)) as neighbours:
        wait_until(lambda: neighbours.summary()["hits"], "they read what they wrote", 30)
        assert neighbours.summary()["wrong"] == []
        with Client(store.url, run_dir=store.run_dir, key_prefix=chaos.KEY_PREFIX) as liar:
            names = [f"k{i}" for i in range(workers.KEYS)]

            def noticed():
                for name in names:
                    liar.delete(name)
                    liar.put(name, workers.content(name, 600)[:-1] + b"?")
                return "read wrong bytes" in neighbours.summary()["wrong"]

            wait_until(noticed, "somebody reads it", 30)
