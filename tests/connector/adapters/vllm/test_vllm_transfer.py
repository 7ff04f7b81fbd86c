"""KVTransferConfig, KVConnectorFactory and KVOutputAggregator beside vLLM's own: the same random
input, the same answer. Where we differ on purpose the test says so."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from differential import NAMES, Sum, differential, ids, maybe, outcome
from each_input import each
from hypothesis import given
from hypothesis import strategies as st

from connector.transfer import aggregate, base, config, factory

pytestmark = pytest.mark.vllm

ROLES = ["kv_producer", "kv_consumer", "kv_both"]


# KVTransferConfig


OURS_ALONE = {
    "kv_buffer_size": "vLLM had it: for connectors of one's own that buffer",
    "kv_rank": "vLLM had it: for connectors of one's own that pair engines up",
    "kv_parallel_size": "the same",
    "kv_ip": "vLLM had it: for connectors of one's own that listen",
}
"""Of which nothing that runs under vLLM may read: there it is an AttributeError."""


def test_the_fields_are_vllms_but_for_those_listed() -> None:
    from vllm.config import KVTransferConfig

    theirs = {f.name for f in dataclasses.fields(KVTransferConfig)}
    ours = {f.name for f in dataclasses.fields(config.KVTransferConfig)}
    assert theirs - ours == set()
    assert ours - theirs == set(OURS_ALONE)


def test_what_our_config_answers_vllms_answers_too() -> None:
    from vllm.config import KVTransferConfig

    def public(kind: type) -> set[str]:
        names = {*dir(kind), *(f.name for f in dataclasses.fields(kind))}
        return {name for name in names if not name.startswith("_")}

    here = {"from_dict", "from_env", "from_json", "to_dict"}  # how one is made and written
    assert public(config.KVTransferConfig) - public(KVTransferConfig) - set(OURS_ALONE) == here


def test_nothing_that_runs_under_vllm_reads_what_its_config_lacks() -> None:
    folder = Path(config.__file__).parent
    shared = [path for path in folder.rglob("*.py") if path.name != "config.py"]
    for name in OURS_ALONE:
        read = re.compile(rf"\b(config|transfer)\.{name}\b")
        readers = [path.name for path in shared if read.search(path.read_text())]
        assert readers == [], name


children = st.lists(st.builds(dict, kv_connector=st.sampled_from(NAMES)), max_size=3)
VALUES: dict[str, list[Any]] = {
    "kv_connector": [None, *NAMES, "MultiConnector", "", 7],
    "kv_role": [None, *ROLES, "kv_nobody", 7],
    "engine_id": [None, "e", 7],
    "kv_buffer_device": ["cuda", "cpu", "xpu", "npu", "tpu", "", None, 7],
    "kv_port": [
        *(1, 14579, 65535, 0, -1, 65536, 1.0, 1.5, True, None, [1]),
        *("21001", " 7 ", "7.0", "1_0", "1e3", "+5", "-1", "65536", "x", ""),
    ],
    "kv_connector_module_path": [None, "m.n", "", 7],
    "enable_permute_local_kv": [
        *(True, False, 0, 1, 2, 1.0, 0.5, None, []),
        *("true", "TRUE", "Off", "y", "no", "t", "f", "on", "1", "0", "maybe", "", " true"),
    ],
    "kv_load_failure_policy": ["recompute", "fail", "ignore", None],
    "kv_connector_extra_config": [{}, {"a": None}, None, [1], {1: 2}, "{}"],
    "kv_rolle": ["kv_both"],
}
"""What JSON documents have in a field, rightly and wrongly."""
fields = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from(values) for name, values in VALUES.items()},
        "kv_connector_extra_config": st.builds(dict, connectors=children),
    },
)


def refused_by_us_alone(values: dict[str, Any]) -> list[str]:
    """Why we refuse what vLLM takes."""
    names = ("kv_connector", "kv_connector_module_path", "kv_buffer_device")
    reasons = [f"{n}: nothing has an empty name" for n in names if values.get(n) == ""]
    port = values.get("kv_port", 1)
    if isinstance(port, bool):
        reasons.append("kv_port: true is a slip, not port 1")
    elif not 1 <= int(float(port)) <= 65535:
        reasons.append("kv_port: there is no such port")
    return reasons


def test_values_of_every_field_of_vllms_are_tried() -> None:
    from vllm.config import KVTransferConfig

    assert {f.name for f in dataclasses.fields(KVTransferConfig)} <= set(VALUES)


@each("name", VALUES)
def test_each_value_alone_is_taken_or_refused_as_by_vllm(name: str) -> None:
    for value in VALUES[name]:
        whole = {"kv_connector": "a", "kv_role": "kv_both", name: value}
        for values in (whole, {name: value}):
            taken_refused_and_answered_alike(values)


@differential
@given(fields)
def test_config_takes_refuses_and_answers_like_vllms(values: dict[str, Any]) -> None:
    taken_refused_and_answered_alike(values)


def taken_refused_and_answered_alike(values: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig

    theirs = outcome(lambda: KVTransferConfig(**values))
    ours = outcome(lambda: config.KVTransferConfig.from_dict(values))
    if ours == "refused":
        assert theirs == "refused" or refused_by_us_alone(values)
        return
    assert theirs != "refused"
    for name in ("is_kv_transfer_instance", "is_kv_producer", "is_kv_consumer"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in NAMES:
        assert ours.has_connector(name) == theirs.has_connector(name)
    for key in ("connectors", "other"):
        assert ours.get_from_extra_config(key, 1) == theirs.get_from_extra_config(key, 1)
    for field in dataclasses.fields(KVTransferConfig):
        fixed = ("kv_port", "kv_role", "enable_permute_local_kv")
        given_or_fixed = field.name in values or field.name in fixed
        if given_or_fixed and values.get(field.name) is not None:
            assert getattr(ours, field.name) == getattr(theirs, field.name)
    assert isinstance(ours.engine_id, str)
    assert isinstance(theirs.engine_id, str)


def test_defaults_are_vllms_but_for_the_failure_policy() -> None:
    from vllm.config import KVTransferConfig

    theirs, ours = KVTransferConfig(), config.KVTransferConfig()
    assert (theirs.kv_port, theirs.kv_role) == (ours.kv_port, ours.kv_role)
    assert theirs.kv_connector_extra_config == ours.kv_connector_extra_config
    # A store that fails costs a recompute here, never a request.
    assert (theirs.kv_load_failure_policy, ours.kv_load_failure_policy) == ("fail", "recompute")


def test_hash_of_no_config_depends_on_its_fields_in_either() -> None:
    from vllm.config import KVTransferConfig

    for make in (KVTransferConfig, config.KVTransferConfig):
        full = make(kv_connector="a", kv_role="kv_both", engine_id="e", kv_port=9)
        assert full.compute_hash() == make().compute_hash()


# KVConnectorFactory

SOURCE = """
from connector import KVConnectorBase_V1
class {name}(KVConnectorBase_V1): ...
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("modules")
    for module in ("diff_m", "diff_n"):
        (folder / f"{module}.py").write_text("".join(SOURCE.format(name=n) for n in "ab"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


MODULES = ["diff_m", "diff_n", "diff_absent"]
registrations = st.tuples(st.sampled_from("abc"), st.sampled_from(MODULES), st.sampled_from("abc"))
wanted = st.tuples(st.sampled_from("abc"), st.sampled_from([None, *MODULES]))


@differential
@given(st.lists(registrations, max_size=5), st.lists(wanted, max_size=5))
def test_factory_finds_and_refuses_like_vllms(modules: Any, known: Any, asked: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def replay(registry: Any) -> list[Any]:
        said: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "_registry", {})
            said += [outcome(lambda r=r: registry.register_connector(*r)) for r in known]
            for name, path in asked:
                transfer = SimpleNamespace(kv_connector=name, kv_connector_module_path=path)
                said.append(outcome(lambda: registry.get_connector_class(transfer)))  # noqa: B023
                said.append(outcome(lambda: registry.get_connector_class_by_name(name)))  # noqa: B023
        return said

    assert replay(factory.KVConnectorFactory) == replay(KVConnectorFactory)


# KVOutputAggregator


@functools.cache
def events_class() -> type:
    from vllm.distributed.kv_events import KVConnectorKVEvents

    class Events(KVConnectorKVEvents):  # type: ignore[misc]
        """vLLM's abstract container over ours."""

        def __init__(self, events: list[int]) -> None:
            self.inner = aggregate.WorkerEvents(events)

        def add_events(self, events: list[Any]) -> None:
            self.inner.add_events(events)

        def increment_workers(self, count: int = 1) -> None:
            self.inner.increment_workers(count)

        def get_all_events(self) -> list[Any]:
            return self.inner.get_all_events()

        def aggregate(self) -> Any: ...
        def get_number_of_workers(self) -> int:
            return self.inner._workers

        def clear_events(self) -> None: ...

    return Events


outputs = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "finished_sending": st.one_of(st.none(), ids),
            "finished_recving": st.one_of(st.none(), ids),
            "failed_recving": ids,
            "invalid_block_ids": st.sets(st.integers(0, 5), max_size=2),
            "expected_finished_count": st.sampled_from([0, 0, 0, 1, 2, 3]),
            "kv_connector_stats": maybe,
            "kv_connector_worker_meta": maybe,
            "kv_cache_events": maybe,
        }
    ),
)


def report(output: Any, kind: type) -> Any:
    """One of `outputs` as a report of class `kind`; nothing in it is shared with another."""
    if output is None:
        return None
    values = copy.deepcopy(output)
    for name, wrap in (
        ("kv_connector_stats", Sum),
        ("kv_connector_worker_meta", Sum),
        ("kv_cache_events", events_class()),
    ):
        values[name] = None if values[name] is None else wrap(values[name])
    return kind(**values)


def runner_output(output: Any, rank: int) -> Any:
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=[f"of worker {rank}"],
        req_id_to_index={},
        kv_connector_output=report(output, KVConnectorOutput),
    )


def assert_the_same(us: Any, them: Any) -> None:
    for name in (f.name for f in dataclasses.fields(them)):
        if name != "kv_cache_events":
            assert getattr(us, name) == getattr(them, name), name
    assert (us.kv_cache_events is None) == (them.kv_cache_events is None)
    if us.kv_cache_events is not None:
        for ask in ("get_all_events", "get_number_of_workers"):
            assert getattr(us.kv_cache_events, ask)() == getattr(them.kv_cache_events, ask)()
    assert us.is_empty() == them.is_empty()


@differential
@given(st.integers(1, 3), st.lists(st.lists(outputs, min_size=3, max_size=3), max_size=6))
def test_aggregator_gives_what_vllms_gives_step_after_step(count: int, steps: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    ours, theirs = aggregate.KVOutputAggregator(count), KVOutputAggregator(count)
    for step in steps:
        them = theirs.aggregate([runner_output(o, i) for i, o in enumerate(step)])
        us = ours.aggregate([report(o, base.KVConnectorOutput) for o in step])
        assert_the_same(us, them.kv_connector_output)


NOT_YET = "no worker has an output"
runner_steps = st.lists(
    st.tuples(
        st.one_of(st.just(NOT_YET), st.lists(outputs, min_size=3, max_size=3)), st.integers(0, 2)
    ),
    max_size=6,
)


@differential
@given(st.integers(1, 3), runner_steps)
def test_aggregator_takes_vllms_outputs_as_vllms_does(count: int, steps: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    both = (aggregate.KVOutputAggregator(count), KVOutputAggregator(count))
    for step, rank in steps:
        answers = []
        for aggregator in both:
            given_outputs = (
                [None] * 3
                if step == NOT_YET
                else [runner_output(output, i) for i, output in enumerate(step)]
            )
            answer = aggregator.aggregate(given_outputs, output_rank=rank)
            assert answer is given_outputs[rank]
            answers.append(answer)
        if step == NOT_YET:
            continue
        us, them = answers
        assert us.req_ids == them.req_ids == [f"of worker {rank}"]
        assert_the_same(us.kv_connector_output, them.kv_connector_output)


def test_aggregator_answers_with_vllms_class_once_it_has_seen_it() -> None:
    from vllm.v1.outputs import KVConnectorOutput

    aggregator = aggregate.KVOutputAggregator(2)
    said = KVConnectorOutput(finished_sending={"a"})
    for reports in ((said, None), (None, None)):
        outputs = [runner_output(None, i) for i in range(2)]
        for output, kv in zip(outputs, reports, strict=True):
            output.kv_connector_output = kv
        answer = aggregator.aggregate(outputs, 0)
        assert answer is not None
        assert type(answer.kv_connector_output) is KVConnectorOutput


def test_vllms_outputs_and_executors_can_be_served_by_our_aggregator() -> None:
    """The calls that vLLM's executors make, by their parameters' names."""
    import inspect

    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    for name in ("__init__", "from_connector", "aggregate"):
        theirs = inspect.signature(getattr(KVOutputAggregator, name)).parameters
        ours = inspect.signature(getattr(aggregate.KVOutputAggregator, name)).parameters
        assert list(ours) == list(theirs), name
