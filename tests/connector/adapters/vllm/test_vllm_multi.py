"""MultiConnector beside vLLM's own: the same children, the same calls and answers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from differential import NAMES, Sum, differential, ids, maybe, outcome
from hypothesis import given
from hypothesis import strategies as st

from connector.transfer import multi
from connector.transfer.base_v1 import KVConnectorRole, KVConnectorTransferResults

pytestmark = pytest.mark.vllm


class Child:
    """Answers and records the calls of either package."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.calls.append((name, copy.deepcopy(args)))
            return self.answers.get(name)

        return call


def theirs_over(kids: list[Child]) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    made = object.__new__(MultiConnector)
    made._connectors = kids
    made._requests_to_connector = {}
    made._extra_async_saves = {}
    made._connector_metadata = None
    return made


def ours_over(kids: list[Child]) -> Any:
    # Statistics go under the connector's name here, under its class's in vLLM.
    named = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="Child"))
    kinds = [(lambda *_, kid=kid: kid, named) for kid in kids]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(multi, "_kinds", lambda vllm_config: kinds)
        return multi.MultiConnector(named, KVConnectorRole.SCHEDULER)


CHILDREN = 3


def each_child(answers: Any) -> Any:
    return st.lists(answers, min_size=CHILDREN, max_size=CHILDREN)


offers = each_child(st.sampled_from([(0, False), (4, True), (8, False), (None, False)]))
ends = each_child(
    st.tuples(st.booleans(), st.sampled_from([None, {"a": 1}, {"b": 2}, {"c": 3, "d": 4}]))
)
scheduler_ops = st.one_of(
    st.tuples(st.just("match"), st.sampled_from(NAMES), offers),
    st.tuples(st.just("end"), st.sampled_from(NAMES), ends),
    st.tuples(st.just("meta"), st.none(), each_child(st.integers())),
    st.tuples(st.just("events"), st.none(), each_child(st.lists(st.integers(), max_size=2))),
    st.tuples(st.just("pending"), st.none(), each_child(st.booleans())),
    st.tuples(st.just("reset"), st.none(), each_child(st.sampled_from([None, True, False]))),
)


def drive_scheduler(made: Any, kids: list[Child], op: tuple[str, Any, list[Any]]) -> Any:
    what, name, answers = op
    request = SimpleNamespace(request_id=name)
    call = {
        "match": "get_num_new_matched_tokens",
        "end": "request_finished",
        "meta": "build_connector_meta",
        "events": "take_events",
        "pending": "has_pending_push_work",
        "reset": "reset_cache",
    }[what]
    for kid, answer in zip(kids, answers, strict=True):
        kid.answers[call] = copy.deepcopy(answer)
    if what == "match":
        tokens, later = made.get_num_new_matched_tokens(request, 4)
        if tokens is not None:  # an engine allocates only then
            made.update_state_after_alloc(request, [1, 2], tokens)
        return tokens, later
    if what == "end":
        try:
            return made.request_finished(request, [1, 2])
        except (RuntimeError, ValueError):
            return "clash"
    if what == "meta":
        meta = made.build_connector_meta(None)
        extra = meta.extra_saves if hasattr(meta, "extra_saves") else meta.extra_async_saves
        parts = meta.children if hasattr(meta, "children") else meta.metadata
        return parts, extra or {}
    answer = getattr(made, call)()
    return list(answer) if what == "events" else answer


@differential
@given(st.lists(scheduler_ops, max_size=12))
def test_scheduler_side_of_multi_connector_does_what_vllms_does(ops: list[Any]) -> None:
    ours_kids = [Child() for _ in range(CHILDREN)]
    theirs_kids = [Child() for _ in range(CHILDREN)]
    ours = ours_over(ours_kids)
    theirs = theirs_over(theirs_kids)
    for op in ops:
        us, them = drive_scheduler(ours, ours_kids, op), drive_scheduler(theirs, theirs_kids, op)
        assert us == them, op
        if us == "clash":
            return  # both raised; what is left of the request then is nobody's promise
        for one, other in zip(ours_kids, theirs_kids, strict=True):
            if op[0] == "pending":
                # Ours asks every child; vLLM's stops at the first that says yes.
                one.calls, other.calls = [], []
            assert one.calls == other.calls


results = each_child(st.tuples(ids, ids, ids))
send_ops = st.one_of(
    st.tuples(st.just("bind"), st.dictionaries(st.sampled_from(NAMES), st.integers(1, 2))),
    st.tuples(st.just("finished"), results),
)
worker_ops = st.one_of(
    send_ops,
    st.tuples(st.just("errors"), each_child(st.sets(st.integers(0, 5), max_size=2))),
    st.tuples(st.just("count"), each_child(st.sampled_from([None, 2, 3]))),
    st.tuples(st.just("meta"), each_child(st.sampled_from([None, 1, 2]))),
    st.tuples(st.just("stats"), each_child(maybe)),
)


def drive_worker(made: Any, kids: list[Child], op: tuple[str, Any]) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiKVConnectorMetadata,
    )

    is_ours = isinstance(made, multi.MultiConnector)
    what, values = op
    if what == "bind":
        parts = tuple(range(CHILDREN))
        meta: Any = (
            multi.MultiMetadata(parts, dict(values))
            if is_ours
            else MultiKVConnectorMetadata(parts, dict(values))
        )
        made.bind_connector_metadata(meta)
        made.handle_preemptions(meta)
        bound = made.has_connector_metadata()
        made.clear_connector_metadata()
        return bound, made.has_connector_metadata()
    call = {
        "finished": "get_transfer_results",
        "errors": "get_block_ids_with_load_errors",
        "count": "get_finished_count",
        "meta": "build_connector_worker_meta",
        "stats": "get_kv_connector_stats",
    }[what]
    for kid, value in zip(kids, copy.deepcopy(values), strict=True):
        if what == "finished":
            value = (KVConnectorTransferResults if is_ours else base.KVConnectorTransferResults)(
                *value
            )
        elif what == "stats" and value is not None:
            value = Sum(value)
        kid.answers[call] = value
    if what == "finished":
        got = made.get_transfer_results({"x"})
        return got.finished_sending, got.finished_recving, got.failed_recving
    answer = outcome(getattr(made, call))
    if answer is None or answer == "refused":
        return answer
    if what == "meta":
        return answer.children if is_ours else answer.metadata
    if what == "stats":
        return answer.by_name if is_ours else answer.data
    return answer


@differential
@given(st.one_of(st.lists(send_ops, max_size=20), st.lists(worker_ops, max_size=12)))
def test_worker_side_of_multi_connector_does_what_vllms_does(ops: list[Any]) -> None:
    ours_kids = [Child() for _ in range(CHILDREN)]
    theirs_kids = [Child() for _ in range(CHILDREN)]
    ours = ours_over(ours_kids)
    theirs = theirs_over(theirs_kids)
    for op in ops:
        assert drive_worker(ours, ours_kids, op) == drive_worker(theirs, theirs_kids, op), op
    assert [kid.calls for kid in ours_kids] == [kid.calls for kid in theirs_kids]


@pytest.mark.parametrize("layouts", [(None, None), ("HND", None), ("HND", "HND"), ("NHD", "HND")])
def test_layouts_agree_or_are_refused_as_in_vllm(
    layouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    kids = [Child() for _ in layouts]
    for kid, layout in zip(kids, layouts, strict=True):
        kid.answers["get_required_kvcache_layout"] = layout

    class Theirs(MultiConnector):  # type: ignore[misc]
        @classmethod
        def _get_connector_classes_and_configs(cls, vllm_config: Any) -> Any:
            return [(kid, None) for kid in kids]

    said = SimpleNamespace(kv_transfer_config=1)
    them = outcome(lambda: Theirs.get_required_kvcache_layout(said))
    monkeypatch.setattr(multi, "_kinds", lambda vllm_config: [(kid, None) for kid in kids])
    assert outcome(lambda: multi.MultiConnector.get_required_kvcache_layout(said)) == them
