"""Throughput beyond an engine's KV memory is compared fairly, and what did not run is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpu import cliff
from gpu.engine import DidNotStartError

if TYPE_CHECKING:
    import pytest

NATIVE = ("SimpleCPUOffloadConnector", "OffloadingConnector")


class Engine:
    """Has so many tokens a second at each number of users."""

    def __init__(self, name: str, rates: dict[int, float], calls: list[tuple[str, int]]) -> None:
        self._name, self._rates, self._calls = name, rates, calls

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def call(self, op: str, users: int, seconds: float, shape: dict[str, int]) -> dict[str, Any]:
        assert op == "talk"
        self._calls.append((self._name, users))
        tokens = self._rates[users] * seconds
        cached = {"prompt_tokens": 100, "cached_tokens": 50}
        return {"turns": 3, "tokens": tokens, "seconds": seconds, **cached}


class Run:
    """What one run said."""

    def __init__(self, folder: Path, rates: dict[str, tuple[float, float]]) -> None:
        self.rows: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.calls: list[tuple[str, int]] = []

        def start(name: str, settings: Any) -> Engine:
            assert (settings.connector is None) == (name == cliff.NONE)
            if name not in rates:
                raise DidNotStartError("it needs CUDA")
            return Engine(name, dict(zip((8, 11), rates[name], strict=True)), self.calls)

        def say(name: str, value: Any, unit: str = "", **more: Any) -> None:
            self.rows[name] = (value, more)

        measured = cliff.measured(start, folder, cliff.SMALL, say)
        self.wrong = cliff.judged(measured, say)


ALL = {
    "none": (100.0, 20.0),
    "kvstore": (98.0, 85.0),
    NATIVE[0]: (99.0, 80.0),
    NATIVE[1]: (97.0, 90),
}


def test_beyond_the_cliff_ours_is_compared_with_the_peak_and_the_best_native_one(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, ALL)
    assert run.wrong == []
    assert run.rows["kvstore at 1.33 x, of the best at 1.0 x"] == (0.85, {"least": 0.8})
    ratio, more = run.rows["kvstore at 1.33 x, of the best of vLLM's own"]
    assert (ratio, more) == (0.944, {"least": 0.97, "best": NATIVE[1]})
    assert run.rows["none: tokens/s at 1.33 x, of its own at 1.0 x"][0] == 0.2


def test_variants_take_turns_in_going_first_and_each_runs_as_often(tmp_path: Path) -> None:
    calls = Run(tmp_path, ALL).calls
    assert len(calls) == 3 * 2 * 4
    assert {users for _, users in calls} == {8, 11}
    firsts = [calls[i][0] for i in range(0, len(calls), 4)]
    assert len(set(firsts)) == 3
    assert all(len({name for name, _ in calls[i : i + 4]}) == 4 for i in range(0, 24, 4))


def test_a_variant_that_does_not_start_is_named_with_what_it_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, {name: ALL[name] for name in ("none", "kvstore")})
    assert run.wrong == []
    for name in NATIVE:
        assert run.rows[f"{name} did not start"][0] == "it needs CUDA"
    assert not any("vLLM's own" in name for name in run.rows)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("SKIPPED")] == [
        *(f"SKIPPED cliff with {name}: it did not start" for name in NATIVE),
        "SKIPPED cliff beside vLLM's own connectors: none of them started",
    ]


def test_without_ours_nothing_is_known_and_that_is_a_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, {name: ALL[name] for name in ("none", NATIVE[0])})
    assert run.wrong == ["kvstore did not start: nothing is known of it"]


def test_an_engine_in_which_nothing_ended_is_no_figure_but_a_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, ALL | {"none": (100.0, 0.0)})
    assert run.wrong == ["none: no turn ended within 30 s"]
    assert not any(" x, of " in name for name in run.rows)


class Vllm:
    """Ends each request a second after it was added, one at a time."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.waiting, self.prompts = clock, [], []

    def add_request(self, name: str, given: dict[str, Any], *_: object) -> None:
        self.waiting.append(name)
        self.prompts.append(given["prompt_token_ids"])

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        self.clock[0] += 1.0
        ended = SimpleNamespace(finished=True, request_id=self.waiting.pop(0))
        ended.outputs, ended.num_cached_tokens = [SimpleNamespace(token_ids=[7, 7])], 8
        return [ended]


def test_the_clock_starts_when_each_user_had_an_answer_and_what_ends_later_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpu import users

    clock = [0.0]
    engine = Vllm(clock)
    monkeypatch.setattr(users.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(users, "sampling", lambda tokens, params: None)
    driver = users.UsersDriver(SimpleNamespace(llm_engine=engine))
    monkeypatch.setattr(driver, "drain", lambda: None)
    shape = {"first": 8, "new": 2, "answer": 2, "longest": 100, "vocabulary": 100}
    seen = driver.talk(3, 6.0, shape)
    # Three answers before the clock starts, five before it ends, three that were under way.
    assert seen["turns"] == 5
    assert len(engine.prompts) == 11
    assert seen["tokens"] == 3 * (14 + 2) + 2 * (18 + 2)
    assert (seen["prompt_tokens"], seen["cached_tokens"]) == (3 * 14 + 2 * 18, 40)
    assert len({len(prompt) for prompt in engine.prompts}) > 2, "histories grow"


def test_as_many_histories_fit_as_there_are_users_and_no_more(tmp_path: Path) -> None:
    for size in (cliff.LARGE, cliff.SMALL):
        settings = cliff.settings(size, None)
        tokens = settings.kv_blocks * settings.block_size
        assert tokens == cliff.USERS * size.shape["longest"]
        assert settings.max_model_len >= size.shape["longest"]
        assert (
            size.shape["first"] + size.shape["new"] + size.shape["answer"] < size.shape["longest"]
        )


def test_a_user_grows_and_begins_anew_with_the_same_first_tokens() -> None:
    from gpu.users import User

    shape = {"first": 8, "new": 3, "answer": 2, "longest": 20, "vocabulary": 100}
    user, lengths, first = User(1, shape), [], None
    for _ in range(6):
        prompt = list(user.ask())
        first = first or prompt[:8]
        assert prompt[:8] == first
        lengths.append(len(prompt))
        user.hear([7, 7])
    assert lengths == [11, 16, 11, 16, 11, 16]
    assert User(2, shape).ask()[:8] != first
