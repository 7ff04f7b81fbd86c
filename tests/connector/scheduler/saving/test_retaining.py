"""A request has its blocks retained: what it finds, and what it saves once that is stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from connector_parts import FakeRequest, Side, prompt
from redis_servers import wait_until

from connector import limits
from connector.messages import WorkerReport
from connector.scheduler.request_settings import RequestSettings, Wish
from kvstore import UsageError
from kvstore import limits as store_limits


def asking(blocks: int, **params: Any) -> FakeRequest:
    request = prompt(blocks)
    request.kv_transfer_params = params
    return request


class Action(NamedTuple):
    action_type: str
    action_version: str
    payload: dict[str, Any]


def hints(*actions: tuple[str, str, dict[str, Any]]) -> list[Action]:
    return [Action(*action) for action in actions]


class TestWishes:
    @pytest.mark.parametrize(
        ("params", "wish"),
        [
            ({}, None),
            ({"retain_s": 60}, Wish(60)),
            ({"retain_s": 0.2, "tenant": "a"}, Wish(1, "a")),
            ({"retain_s": 0, "tenant": "a"}, Wish(0, "a")),
        ],
    )
    def test_they_are_read_from_the_parameters(self, params, wish):
        assert RequestSettings.of("r", params).retain == wish

    @pytest.mark.parametrize(
        ("actions", "wish"),
        [
            ([("retain", "1", {"ttl_s": 60, "tenant": "a"})], Wish(60, "a")),
            ([("retain", "1", {"ttl_s": 60}), ("release", "1", {})], Wish(0)),
            ([("prefetch", "1", {}), ("retain", "1.0", {"ttl_s": 5})], Wish(5)),
            ([], Wish(7)),
        ],
    )
    def test_hints_count_before_the_parameters_and_the_last_of_them_most(self, actions, wish):
        assert RequestSettings.of("r", {"retain_s": 7}, hints(*actions)).retain == wish

    @pytest.mark.parametrize(
        "params",
        [
            {"retain_s": "60"},
            {"retain_s": -1},
            {"retain_s": True},
            {"retain_s": float("nan")},
            {"retain_s": limits.RETAINED_S_MAX + 1},
            {"retain_s": 60, "tenant": 7},
            {"retain_s": 60, "tenant": "x" * 300},
        ],
    )
    def test_one_that_cannot_be_understood_retains_nothing_and_is_named(self, params, caplog):
        settings = RequestSettings.of("r7", params)
        assert settings == RequestSettings()
        assert "request r7: to retain" in caplog.text

    @pytest.mark.vllm
    def test_vllms_own_hints_are_read_the_same(self):
        protocol = pytest.importorskip("vllm.v1.kv_hints.protocol", reason="no vLLM here")
        action = protocol.KvHintAction("a", "retain", "1", {"ttl_s": 60, "tenant": "t"})
        envelope = protocol.KvHintsEnvelope("1", "m", [action])
        assert RequestSettings.of("r", None, envelope.actions).retain == Wish(60, "t")

    def test_an_action_of_another_version_is_not_carried_out_and_named(self, caplog):
        found = RequestSettings.of("r7", {}, hints(("retain", "9", {"ttl_s": 60})))
        assert found.retain is None
        assert "retain of version '9'" in caplog.text

    @pytest.mark.parametrize("action", [("retain", ["1"], {"ttl_s": 60}), ("retain", "1", [60])])
    def test_an_action_of_another_shape_stops_no_engine(self, action, caplog):
        """vLLM checks what comes by HTTP, and not what Python code puts together."""
        assert RequestSettings.of("r7", {}, hints(action)).retain is None
        assert "request r7" in caplog.text

    def test_the_limits_are_those_of_the_store(self):
        assert limits.RETAINED_S_MAX == store_limits.RETAINED_S_MAX
        assert limits.TENANT_BYTES_MAX == store_limits.TENANT_BYTES_MAX


def saved(side: Side, request: FakeRequest) -> None:
    """All tokens of `request` are computed in one step, and all workers save what is new."""
    side.tables[request.request_id] = list(range(101, 200))
    plan = side.step((request, len(request.tokens)))
    for job in plan.saves:
        every = frozenset(range(len(job.blocks)))
        for block in job.blocks:
            for key in block.keys:
                (one,) = side.store.reserve([key], 64, 1)
                side.store.commit([one])
        side.core.report(
            WorkerReport(ended_saves={job.job_id: 1}, stored_blocks={job.job_id: every})
        )


def test_what_a_request_finds_is_retained_once_for_each_lookup(side: Side) -> None:
    request = asking(3, retain_s=60, tenant="a")
    side.put(request, 2)
    side.match(request)
    side.match(request)
    wait_until(lambda: side.store.retained, "the thread has asked")
    assert side.store.retained == dict.fromkeys(side.store.sealed(), (60, "a"))
    assert side.core.take_stats().counts["kvstore_retained_blocks:yes"] == 2


def test_what_it_saves_is_retained_once_it_is_stored(side: Side) -> None:
    request = asking(3, retain_s=60)
    side.match(request)
    saved(side, request)
    wait_until(lambda: len(side.store.retained) == 3, "the thread has asked")
    assert set(side.store.retained.values()) == {(60, "")}


def test_a_release_lets_go_what_is_found(side: Side) -> None:
    first, second = asking(3, retain_s=60), asking(3, retain_s=0)
    second.request_id = "another"
    side.put(first, 3)
    side.match(first)
    wait_until(lambda: len(side.store.retained) == 3, "the first has asked")
    side.match(second)
    wait_until(lambda: not side.store.retained, "the second has asked")


def test_others_retain_nothing_and_begin_no_thread(side: Side) -> None:
    request = asking(3)
    side.put(request, 3)
    side.match(request)
    saved(side, request)
    assert side.core._retainer._thread is None


def test_what_became_of_it_is_counted_and_told(side: Side) -> None:
    request = asking(3, retain_s=60)
    side.put(request, 2)
    side.match(request)
    wait_until(lambda: side.store.retained, "the thread has asked")

    def told() -> bool:
        explanation = side.core.explain(request.request_id)
        return explanation is not None and "retained for 60 s: 2 yes" in explanation.events

    wait_until(told, "the request's history says so")
    stats = side.core.take_stats()
    assert stats is not None
    assert "kvstore_retained_blocks:yes" in str(stats)


def test_a_node_that_may_only_be_read_costs_the_wish_and_says_why(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("request", "refused", "this user may only read")

    monkeypatch.setattr(side.store, "retain", refuse)
    request = asking(3, retain_s=0)
    side.put(request, 2)
    side.match(request)

    def told() -> bool:
        return "may only read" in str(side.core.explain(request.request_id).events)

    wait_until(told, "the request's history says so")
    assert "released: 2 no-node" in str(side.core.explain(request.request_id).events)


def test_a_node_that_is_away_costs_the_wish_and_nothing_else(side: Side) -> None:
    request = asking(3, retain_s=60)
    side.put(request, 2)
    side.store.node_down = True
    side.match(request)

    def counted() -> bool:
        return "no-node" in str(side.core.explain(request.request_id).events)

    wait_until(counted, "the thread has asked in vain")
    assert side.store.retained == {}
