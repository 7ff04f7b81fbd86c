"""Log lines about a request name it as its engine does, with its trace."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from connector_parts import (
    BLOCK,
    FakeRequest,
    Side,
    Worker,
    load_job,
    prompt,
    save,
    save_job,
)

from connector.layout.block_hashes import BlockHashes
from connector.messages import LoadJob, SaveJob, log_name, trace_id
from connector.scheduler.requests import RequestState
from kvstore import KVStoreError
from kvstore.testing.blockstore import MemoryBlockStore

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
NAME = f"cmpl-7 (trace {TRACE})"


def request(**fields: Any) -> Any:
    return SimpleNamespace(request_id="cmpl-7", **fields)


def test_a_request_is_called_by_its_id_and_its_trace() -> None:
    assert log_name(request(trace_headers=HEADERS)) == NAME


@pytest.mark.parametrize(
    "headers", [None, {}, {"traceparent": ""}, {"traceparent": f"00-{TRACE[:-1]}\n-1-01"}]
)
def test_one_that_is_part_of_no_trace_by_its_id_alone(headers: dict[str, str] | None) -> None:
    assert log_name(request(trace_headers=headers)) == log_name(request()) == "cmpl-7"
    assert trace_id(request(trace_headers=headers)) == ""


def test_a_wrong_parameter_is_logged_with_the_request(caplog: pytest.LogCaptureFixture) -> None:
    asks = request(trace_headers=HEADERS, kv_transfer_params={"skip_load": 7})
    RequestState().own_settings(asks)
    (line,) = caplog.messages
    assert line.startswith(f"request {NAME}: kv_transfer_params.skip_load ")


def test_a_request_that_has_no_hashes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    chain = BlockHashes(4, lambda first, end: object(), lambda tokens: None, NAME)
    assert chain.hashes(range(8), 8) == []
    (line,) = caplog.messages
    assert line.startswith(f"request {NAME} is neither loaded nor saved: ")


def test_a_lookup_that_fails_names_its_request(
    side: Side, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = prompt(2)
    monkeypatch.setattr(side.store, "lookup", lambda *args, **more: 1 / 0)
    with caplog.at_level(logging.ERROR):
        assert side.match(asks) == 0
    assert f"a lookup failed: request {asks.request_id} loads nothing" in caplog.messages


def test_the_line_of_a_request_that_missed_names_its_trace(side: Side) -> None:
    asks = prompt(2)
    asks.trace_headers = HEADERS
    assert side.match(asks) == 0
    found = side.core.explain(asks.request_id)
    assert found is not None
    assert str(found).startswith(f"request {asks.request_id} (trace {TRACE}): 0 of {2 * BLOCK} ")
    assert found.as_dict()["trace_id"] == TRACE
    assert isinstance(asks, FakeRequest)


def test_jobs_tell_workers_the_trace_of_their_request(side: Side) -> None:
    asks, asks_again = prompt(2), FakeRequest("again", prompt(2).tokens)
    asks.trace_headers = asks_again.trace_headers = HEADERS
    side.tables = {asks.request_id: [1, 2, 3, 4, 5], "again": [6, 7, 8, 9, 10]}
    assert side.match(asks) == 0
    jobs: list[LoadJob | SaveJob] = [*side.step((asks, len(asks.tokens))).saves]
    side.put(asks, 2)
    assert side.match(asks_again) == 2 * BLOCK
    side.core.allocated(asks_again, lambda: [side.tables["again"]], 2 * BLOCK)
    jobs += side.step().loads
    assert [type(job) for job in jobs] == [SaveJob, LoadJob]
    assert {job.trace_id for job in jobs} == {TRACE}


@pytest.mark.parametrize("fails", [KVStoreError("no room"), ZeroDivisionError()])
def test_workers_log_a_save_that_failed_with_its_trace(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fails: Exception
) -> None:
    store = MemoryBlockStore()
    worker = Worker(store)
    monkeypatch.setattr(store, "reserve", Mock(side_effect=fails))
    save(worker, save_job(1)._replace(request_id="cmpl-7", trace_id=TRACE))
    assert any("saves dropped" in line or "save jobs" in line for line in caplog.messages)
    assert NAME in caplog.text
    worker.core.close()


def test_workers_log_a_load_that_failed_with_its_trace(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryBlockStore()
    worker = Worker(store)
    monkeypatch.setattr(store, "views", Mock(side_effect=ZeroDivisionError()))
    save(worker, save_job(1))
    worker.core.start_loads([load_job(store, 1, name="cmpl-7")._replace(trace_id=TRACE)])
    worker.until(lambda report: "cmpl-7" in report.finished_loads)
    assert f"a load of request {NAME} failed" in caplog.messages
    worker.core.close()
