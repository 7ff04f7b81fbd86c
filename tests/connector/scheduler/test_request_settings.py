"""A request decides for itself how much of it is loaded and saved, and cannot stop the engine."""

from __future__ import annotations

from typing import Any

import pytest
from connector_parts import BLOCK, FakeRequest, Side, prompt
from each_input import each

from connector.scheduler.request_settings import RequestSettings
from kvstore import MissReason
from kvstore.testing.blockstore import MemoryBlockStore


def asking(blocks: int, **params: Any) -> FakeRequest:
    request = prompt(blocks)
    request.kv_transfer_params = params
    return request


def saved(side: Side, request: FakeRequest) -> int:
    """Store blocks of `request`, all of whose tokens are computed in one step."""
    side.tables[request.request_id] = list(range(101, 200))
    plan = side.step((request, len(request.tokens)))
    return sum(len(job.blocks) for job in plan.saves)


@each(
    ("params", "expected"),
    [
        (None, (None, None)),
        ({}, (None, None)),
        ({"do_remote_decode": True}, (None, None)),
        ({"skip_save": True}, (None, 0)),
        ({"skip_load": True, "max_load_tokens": 100}, (0, None)),
        ({"skip_load": False, "max_load_tokens": 100}, (100, None)),
        ({"max_save_tokens": 7}, (None, 7)),
    ],
)
def test_settings_are_read_from_the_requests_parameters(
    params: dict[str, Any] | None, expected: tuple[int | None, int | None]
) -> None:
    settings = RequestSettings.of("r", params)
    assert (settings.max_load_tokens, settings.max_save_tokens) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("skip_save", "yes"), ("skip_save", 1), ("max_save_tokens", -1), ("max_save_tokens", True)],
)
def test_what_cannot_be_understood_saves_nothing_and_is_named_in_the_log(
    name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert RequestSettings.of("r7", {name: value}) == RequestSettings(None, 0, None)
    assert f"request r7: kv_transfer_params.{name}" in caplog.text
    assert repr(value) in caplog.text


def test_a_request_that_skips_loading_is_not_looked_up(side: Side) -> None:
    request = asking(3, skip_load=True)
    side.put(request, 3)
    side.core.on_new_request(request)
    assert side.match(request) == 0
    explanation = side.core.explain(request.request_id)
    assert explanation is not None
    assert explanation.first_missing is not None
    assert explanation.first_missing.reason is MissReason.SKIPPED


@pytest.mark.parametrize(
    ("most", "computed", "offered"),
    [
        (2 * BLOCK, 0, 2 * BLOCK),
        (2 * BLOCK + 1, 0, 2 * BLOCK),
        (BLOCK - 1, 0, 0),
        (9 * BLOCK, 0, 4 * BLOCK),
        (BLOCK, 2 * BLOCK, BLOCK),
    ],
)
def test_no_more_whole_blocks_are_offered_than_the_request_wants(
    side: Side, most: int, computed: int, offered: int
) -> None:
    request = asking(4, max_load_tokens=most)
    side.put(request, 4)
    assert side.match(request, computed) == offered


def test_why_less_was_loaded_is_the_requests_own_word(side: Side) -> None:
    request = asking(4, max_load_tokens=BLOCK)
    side.put(request, 4)
    side.core.allocated(request, lambda: [list(range(101, 120))], side.match(request))
    side.step()
    side.core.loads_ended([request.request_id])
    explanation = side.core.explain(request.request_id)
    assert explanation is not None
    assert explanation.first_missing is not None
    assert (explanation.hit_tokens, explanation.first_missing.reason) == (
        BLOCK,
        MissReason.SKIPPED,
    )


@pytest.mark.parametrize(
    ("params", "blocks"),
    [
        ({}, 4),
        ({"skip_save": True}, 0),
        ({"max_save_tokens": 2 * BLOCK + 1}, 2),
        ({"max_save_tokens": 0}, 0),
    ],
)
def test_no_more_whole_blocks_are_saved_than_the_request_wants(
    side: Side, params: dict[str, Any], blocks: int
) -> None:
    assert saved(side, asking(4, **params)) == blocks


def test_what_a_limited_load_left_in_the_store_is_not_saved_again(side: Side) -> None:
    request = asking(4, max_load_tokens=BLOCK)
    side.put(request, 4)
    side.core.allocated(request, lambda: [list(range(101, 120))], side.match(request))
    side.step()
    side.core.loads_ended([request.request_id])
    request.num_computed_tokens = BLOCK
    assert saved(side, request) == 0


def test_one_requests_word_is_no_other_requests(store: MemoryBlockStore) -> None:
    side = Side(store)
    try:
        assert saved(side, asking(2, skip_save=True)) == 0
        assert saved(side, prompt(2, seed=1)) == 2
    finally:
        side.core.close()
