"""MultiConnector: load from the first that has something, save to all, merge the answers."""

from __future__ import annotations

from typing import Any

import pytest
from connector_parts import FakeRequest
from each_input import each
from fake_connectors import CALLS, Fake

from connector.stats import CountStats
from connector.transfer import multi
from connector.transfer.aggregate import WorkerEvents
from connector.transfer.base import KVConnectorOutput, KVConnectorRole
from connector.transfer.base_v1 import (
    KVConnectorTransferResults,
    SupportsHMA,
)
from connector.transfer.config import KVTransferConfig
from connector.transfer.engine import EngineBlocks, EngineInfo, SchedulerSteps
from connector.transfer.factory import KVConnectorFactory
from connector.transfer.multi import (
    MultiConnector,
    MultiMetadata,
    MultiStats,
    MultiWorkerMetadata,
)
from kvstore import UsageError

REQUEST = FakeRequest("r", [1, 2, 3])
STEP = SchedulerSteps().next((), lambda _: None)
ENGINE = EngineInfo()
BLOCKS = EngineBlocks([5, 6])


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "made", [])


def child(name: str = "Fake", **values: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": "fake_connectors",
        "kv_role": "kv_both",
        **values,
    }


def config(*children: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id="outer",
        kv_connector_extra_config={"connectors": list(children)},
    )


def make(wanted: KVTransferConfig, role: KVConnectorRole) -> tuple[Any, list[Fake]]:
    """Any: the calls are made by name, and with stand-ins."""
    Fake.made = []
    made = KVConnectorFactory.create_connector(wanted, role, ENGINE)
    assert isinstance(made, MultiConnector)
    return made, Fake.made


def scheduler(count: int = 2) -> tuple[Any, list[Fake]]:
    return make(config(*[child()] * count), KVConnectorRole.SCHEDULER)


def worker(*children: Any) -> tuple[Any, list[Fake]]:
    return make(config(*(children or [child(), child()])), KVConnectorRole.WORKER)


MULTI_META = MultiMetadata(("a", "b", "c"), {})
# Every call of the base, with some arguments: by name, because a call that the base gains must
# be given some here.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "on_new_request": (REQUEST,),
    "get_num_new_matched_tokens": (REQUEST, 4),
    "update_state_after_alloc": (REQUEST, BLOCKS, 0),
    "build_connector_meta": (STEP,),
    "update_connector_output": (KVConnectorOutput(finished_recving={"r"}),),
    "request_finished": (REQUEST, [1, 2]),
    "register_finished_partial_tail": (REQUEST, ([1],), []),
    "take_events": (),
    "get_kv_connector_stats": (),
    "has_pending_push_work": (),
    "has_pending_block_frees": (),
    "reset_cache": (),
    "bind_kv_cache_manager": ("manager",),
    "bind_gpu_block_pool": ("pool",),
    "set_xfer_handshake_metadata": ({},),
    "set_xfer_handshake_metadata_pp_aware": ({},),
    "get_finished_count": (),
    "register_kv_caches": ({"layer0": "tensor"},),
    "unregister_kv_caches": (),
    "restore_kv_caches": (),
    "set_host_xfer_buffer_ops": ("operation",),
    "get_mem_pool_context": (),
    "bind_connector_metadata": (MULTI_META,),
    "clear_connector_metadata": (),
    "handle_preemptions": (MULTI_META,),
    "start_load_kv": ("context",),
    "finish_forward": (),
    "reset_capture_state": (),
    "wait_for_layer_load": ("layer0",),
    "save_kv_layer": ("layer0", "tensor", None),
    "wait_for_save": (),
    "get_transfer_results": ({"r"},),
    "get_block_ids_with_load_errors": (),
    "get_handshake_metadata": (),
    "build_connector_worker_meta": (),
    "get_kv_connector_kv_cache_events": (),
    "shutdown": (),
}
OF_ONE = {"get_loaded_kv_cache_group_ids", "get_external_cache_hit_sources"}
"""Calls that only the child is asked that loads."""
OWN = {"has_connector_metadata", "get_finished"}
"""Calls that it answers by itself, or by another one of the children's."""


def test_the_table_names_every_call_of_the_base() -> None:
    assert set(ARGUMENTS) == CALLS - OF_ONE - OWN


@each("name", ARGUMENTS)
def test_call_reaches_every_child_with_its_arguments(name: str) -> None:
    made, children = scheduler(3)
    getattr(made, name)(*ARGUMENTS[name])
    parts = ARGUMENTS[name] == (MULTI_META,)
    expected = [("a",), ("b",), ("c",)] if parts else [ARGUMENTS[name]] * 3
    assert [c.called(name) for c in children] == [[args] for args in expected]


def test_the_child_that_loads_says_from_where_and_into_which_groups() -> None:
    made, children = scheduler()
    assert made.get_external_cache_hit_sources(REQUEST, 8) == {"external_unspecified": 8}
    children[1].answers["get_num_new_matched_tokens"] = (8, True)
    made.get_num_new_matched_tokens(REQUEST, 0)
    children[1].answers["get_external_cache_hit_sources"] = {"host": 8}
    children[1].answers["get_loaded_kv_cache_group_ids"] = (0,)
    assert made.get_external_cache_hit_sources(REQUEST, 8) == {"host": 8}
    assert made.get_loaded_kv_cache_group_ids(REQUEST) == (0,)


def test_child_that_must_deliver_makes_all() -> None:
    """The outer role does not decide it, as it does on the base."""
    assert worker(child(kv_role="kv_consumer"), child())[0].requires_kv_delivery
    assert not worker(child(kv_role="kv_consumer"))[0].requires_kv_delivery


class OfGroups(Fake, SupportsHMA):
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, {"groups": block_ids}


def test_child_of_groups_is_told_of_the_end_by_its_own_call() -> None:
    of_groups = {**child("OfGroups"), "kv_connector_module_path": __name__}
    made, children = make(config(child(), of_groups), KVConnectorRole.SCHEDULER)
    children[0].answers["request_finished"] = (True, None)
    assert made.request_finished(REQUEST, [1]) == (True, {"groups": ([1],)})
    assert children[0].called("request_finished") == [(REQUEST, [1])]
    with pytest.raises(UsageError, match=r"2 groups.*Fake takes blocks of one"):
        made.request_finished_all_groups(REQUEST, ([1], [2]))


def test_first_child_that_offers_tokens_loads_and_the_others_only_hear_of_the_blocks() -> None:
    made, children = scheduler(3)
    children[1].answers["get_num_new_matched_tokens"] = (8, True)
    children[2].answers["get_num_new_matched_tokens"] = (16, False)
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (8, True)
    made.update_state_after_alloc(REQUEST, BLOCKS, 8)
    told = [c.called("update_state_after_alloc") for c in children]
    assert told == [[(REQUEST, BLOCKS, tokens)] for tokens in (0, 8, 0)]


def test_child_that_needs_time_makes_all_wait() -> None:
    made, children = scheduler(3)
    children[0].answers["get_num_new_matched_tokens"] = (8, True)
    children[1].answers["get_num_new_matched_tokens"] = (None, False)
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
    made.update_state_after_alloc(REQUEST, BLOCKS, 8)
    assert children[0].called("update_state_after_alloc") == [(REQUEST, BLOCKS, 0)]


def test_offer_of_an_earlier_question_is_forgotten() -> None:
    made, children = scheduler()
    children[0].answers["get_num_new_matched_tokens"] = (8, True)
    made.get_num_new_matched_tokens(REQUEST, 0)
    children[0].answers["get_num_new_matched_tokens"] = (0, False)
    children[1].answers["get_num_new_matched_tokens"] = (4, True)
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (4, True)
    made.update_state_after_alloc(REQUEST, BLOCKS, 4)
    assert children[0].called("update_state_after_alloc") == [(REQUEST, BLOCKS, 0)]
    assert children[1].called("update_state_after_alloc") == [(REQUEST, BLOCKS, 4)]


def test_each_child_gets_its_own_metadata_both_ways() -> None:
    made, children = scheduler()
    children[0].answers["build_connector_meta"] = "for the first"
    children[1].answers["build_connector_meta"] = "for the second"
    assert made.build_connector_meta(STEP) == MultiMetadata(("for the first", "for the second"), {})
    output = KVConnectorOutput(
        finished_recving={"r"}, kv_connector_worker_meta=MultiWorkerMetadata(("one", None))
    )
    made.update_connector_output(output)
    got: list[Any] = [c.called("update_connector_output")[0][0] for c in children]
    assert [o.kv_connector_worker_meta for o in got] == ["one", None]
    assert [o.finished_recving for o in got] == [{"r"}, {"r"}]
    assert output.kv_connector_worker_meta == MultiWorkerMetadata(("one", None))


def test_request_that_two_children_send_is_sent_when_both_say_so() -> None:
    made, children = scheduler(3)
    for c in children[:2]:
        c.answers["request_finished"] = (True, None)
    assert made.request_finished(REQUEST, [1]) == (True, None)
    meta: Any = made.build_connector_meta(STEP)
    assert meta.extra_saves == {"r": 1}
    assert made.build_connector_meta(STEP).extra_saves == {}
    Fake.made.clear()
    both, workers = worker(child(), child(), child())
    both.bind_connector_metadata(meta)
    workers[0].answers["get_transfer_results"] = KVConnectorTransferResults({"r", "alone"})
    assert both.get_transfer_results(set()).finished_sending == {"alone"}
    workers[0].answers["get_transfer_results"] = KVConnectorTransferResults()
    workers[1].answers["get_transfer_results"] = KVConnectorTransferResults({"r"})
    assert both.get_transfer_results(set()).finished_sending == {"r"}


def test_request_that_three_children_send_is_sent_with_the_third() -> None:
    made, workers = worker(child(), child(), child())
    made.bind_connector_metadata(MultiMetadata(("a", "b", "c"), {"r": 2}))
    for c in workers[:2]:
        c.answers["get_transfer_results"] = KVConnectorTransferResults({"r"})
    assert made.get_transfer_results(set()).finished_sending == set()
    workers[1].answers["get_transfer_results"] = KVConnectorTransferResults()
    assert made.get_transfer_results(set()).finished_sending == {"r"}


def test_parameters_of_a_finished_request_are_merged_and_must_not_clash() -> None:
    made, children = scheduler(3)
    first = {"host": "a"}
    children[0].answers["request_finished"] = (False, first)
    children[2].answers["request_finished"] = (False, {"port": 1})
    assert made.request_finished(REQUEST, []) == (False, {"host": "a", "port": 1})
    assert first == {"host": "a"}
    children[1].answers["request_finished"] = (False, {"port": 2})
    with pytest.raises(UsageError, match=r"kv_transfer_params=\['port'\]"):
        made.request_finished(REQUEST, [])


@pytest.mark.parametrize(
    ("name", "answers", "expected"),
    [
        ("take_events", [["a"], [], ["b", "c"]], ["a", "b", "c"]),
        ("has_pending_push_work", [False, True, False], True),
        ("has_pending_push_work", [False, False, False], False),
        ("reset_cache", [None, True, None], True),
        ("reset_cache", [None, False, True], False),
    ],
)
def test_scheduler_answers_are_merged(name: str, answers: list[Any], expected: Any) -> None:
    made, children = scheduler(3)
    for c, answer in zip(children, answers, strict=True):
        c.answers[name] = answer
    assert getattr(made, name)() == expected
    assert all(len(c.called(name)) == 1 for c in children)


@each(
    ("name", "answers", "expected"),
    [
        ("get_mem_pool_context", [None, "pool"], "pool"),
        ("get_handshake_metadata", [None, "hello"], "hello"),
        ("get_finished_count", [2, 2], 2),
        ("get_finished_count", [2, None], None),
        ("get_block_ids_with_load_errors", [{1, 2}, {2, 3}], {1, 2, 3}),
        ("build_connector_worker_meta", [None, None], None),
        ("build_connector_worker_meta", [None, "x"], MultiWorkerMetadata((None, "x"))),
        ("get_kv_connector_stats", [None, None], None),
        ("get_kv_connector_kv_cache_events", [None, None], None),
    ],
)
def test_worker_answers_are_merged(name: str, answers: list[Any], expected: Any) -> None:
    made, children = worker()
    for c, answer in zip(children, answers, strict=True):
        c.answers[name] = answer
    assert getattr(made, name)() == expected


@pytest.mark.parametrize(
    ("name", "answers"),
    [("get_mem_pool_context", ["one", "another"]), ("get_finished_count", [1, 2])],
)
def test_children_that_cannot_agree_are_refused(name: str, answers: list[Any]) -> None:
    made, children = worker()
    for c, answer in zip(children, answers, strict=True):
        c.answers[name] = answer
    with pytest.raises(UsageError, match=name):
        getattr(made, name)()


@pytest.mark.parametrize(
    ("layouts", "expected"), [((None, "HND"), "HND"), ((None, None), None), (("HND", "NHD"), "")]
)
def test_layout_is_the_one_that_children_ask_for(layouts: Any, expected: str | None) -> None:
    children = [child(kv_connector_extra_config={"layout": layout}) for layout in layouts]
    described = ENGINE.config_with(config(*children))
    if expected == "":
        with pytest.raises(UsageError, match="get_required_kvcache_layout"):
            MultiConnector.get_required_kvcache_layout(described)
    else:
        assert MultiConnector.get_required_kvcache_layout(described) == expected
    assert Fake.made == [], "it is asked before there is a connector"


def test_received_and_failed_requests_are_united() -> None:
    made, children = worker()
    children[0].answers["get_transfer_results"] = KVConnectorTransferResults(set(), {"a"}, set())
    children[1].answers["get_transfer_results"] = KVConnectorTransferResults(set(), {"b"}, {"b"})
    expected = KVConnectorTransferResults(set(), {"a", "b"}, {"b"})
    assert made.get_transfer_results({"x"}) == expected
    assert made.get_finished({"x"}) == (None, {"a", "b"})


def test_binding_is_visible_and_ends() -> None:
    made, _ = worker(child(), child(), child())
    assert not made.has_connector_metadata()
    made.bind_connector_metadata(MULTI_META)
    assert made.has_connector_metadata()
    made.clear_connector_metadata()
    assert not made.has_connector_metadata()


def test_statistics_are_kept_by_name_and_added_over_workers() -> None:
    made, children = worker(child(), child("OtherFake"), child())
    for c, count in zip(children, (1, 10, 100), strict=True):
        c.answers["get_kv_connector_stats"] = CountStats({"n": count})
    stats = made.get_kv_connector_stats()
    assert stats.to_dict() == {"Fake": {"n": 101}, "OtherFake": {"n": 10}}
    both = stats.aggregate(MultiStats({"Fake": CountStats({"n": 1}), "New": CountStats({"n": 2})}))
    assert both.to_dict() == {"Fake": {"n": 102}, "OtherFake": {"n": 10}, "New": {"n": 2}}
    assert not both.is_empty()
    assert MultiStats({"Fake": CountStats()}).is_empty()


def test_statistics_of_scheduler_sides_are_kept_by_name_too() -> None:
    made, children = scheduler(2)
    assert made.get_kv_connector_stats() is None
    for c, count in zip(children, (1, 10), strict=True):
        c.answers["get_kv_connector_stats"] = CountStats({"n": count})
    stats = made.get_kv_connector_stats()
    assert stats is not None
    assert stats.to_dict() == {"Fake": {"n": 11}}


def test_worker_metadata_is_aggregated_child_by_child() -> None:
    class Said(list[str]):
        def aggregate(self, other: Said) -> Said:
            return Said(self + other)

    one = MultiWorkerMetadata((Said("a"), None, None))
    two = MultiWorkerMetadata((Said("b"), Said("c"), None))
    assert one.aggregate(two).children == (["a", "b"], ["c"], None)


def test_event_that_two_children_saw_counts_once_a_worker() -> None:
    made, children = worker()
    children[0].answers["get_kv_connector_kv_cache_events"] = WorkerEvents(["a"])
    children[1].answers["get_kv_connector_kv_cache_events"] = WorkerEvents(["a", "b"])
    assert sorted(made.get_kv_connector_kv_cache_events().common_events()) == ["a", "b"]


@pytest.mark.parametrize("make", [scheduler, worker])
def test_all_children_are_shut_down_although_one_fails(make: Any) -> None:
    made, children = make()
    children[0].answers["shutdown"] = RuntimeError("first")
    children[1].answers["shutdown"] = RuntimeError("second")
    with pytest.raises(RuntimeError, match="first"):
        made.shutdown()
    assert children[1].called("shutdown") == [()]


def test_children_already_made_are_shut_down_when_another_cannot_be_made() -> None:
    failing = child(kv_connector_extra_config={"fails": True})
    with pytest.raises(RuntimeError, match="cannot be made"):
        worker(child(), failing)
    assert Fake.made[0].called("shutdown") == [()]


def test_children_have_their_own_configs_and_the_outer_engine_id() -> None:
    _, children = worker(child(kv_role="kv_producer"), child(engine_id="inner"))
    assert [c.config.engine_id for c in children] == ["outer", "inner"]
    assert [c.config.kv_role for c in children] == ["kv_producer", "kv_both"]
    assert [c.engine for c in children] == [ENGINE, ENGINE]


@pytest.mark.parametrize(
    ("children", "says"),
    [
        ([], "must list 1 to 16"),
        ([child()] * 17, "must list 1 to 16"),
        (["Fake"], r"connectors\[0\]"),
        ([child(), {"kv_role": "kv_both"}], r"connectors\[1\].*kv_connector"),
        ([child(kv_role=None)], "kv_role"),
    ],
)
def test_list_of_children_that_cannot_work_is_refused(children: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        worker(*children) if children else KVConnectorFactory.create_connector(
            config(), KVConnectorRole.WORKER, ENGINE
        )


def test_multi_connector_without_a_list_is_refused() -> None:
    with pytest.raises(UsageError, match="connectors=None"):
        multi.child_configs(KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both"))
