"""What a watch makes of announcements: rates, the last minute, and who comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from stores import announcement

from kvstore.limits import NODE_TTL_S
from kvstore.node.page.watch import (
    EVENTS_MAX,
    GONE_SHOWN_S,
    NODES_MAX,
    Watch,
    by_age,
    by_reason,
    hit_shares,
)

if TYPE_CHECKING:
    from kvstore.nodedir import Announcement


def node(number: int, up_s: int = 1, epoch: int = 1, **counts: int) -> Announcement:
    return announcement(
        node_id=number, name=f"node-{number}", up_s=up_s, epoch=epoch, counts=counts
    )


def happened(watch: Watch) -> list[str]:
    return [f"{one.name} {one.what}" for one in watch.events]


def test_a_rate_is_what_counters_grew_by_in_the_last_tick() -> None:
    watch = Watch(5.0)
    assert not watch.hear([node(1, stored=100)], 10.0)
    assert not watch.hear([node(1, 2, stored=110)], 12.0)
    assert watch.hear([node(1, 3, stored=130)], 15.0)
    assert watch.nodes[1].delta == {"stored": 30} == watch.last
    watch.hear([node(1, 4, stored=131)], 20.0)
    assert watch.last == {"stored": 1}
    assert watch.minute() == {"stored": 31}


def test_of_what_is_over_for_a_minute_nothing_is_left() -> None:
    watch = Watch(5.0)
    for i in range(14):
        watch.hear([node(1, i, stored=10 if i else 0)], 10.0 + 5 * i)
    assert watch.minute() == {}


def test_a_node_that_starts_anew_counts_anew() -> None:
    watch = Watch(5.0)
    watch.hear([node(1, stored=100)], 0.0)
    watch.hear([node(1, 1, epoch=2, stored=3)], 5.0)
    assert watch.last == {"stored": 3}
    assert happened(watch) == ["node-1 restarted"]


@pytest.mark.parametrize(("silent_s", "what"), [(1.0, "left"), (NODE_TTL_S - 1, "died")])
def test_a_node_that_is_stopped_left_and_one_that_was_silent_before_died(
    silent_s: float, what: str
) -> None:
    watch = Watch(5.0)
    watch.hear([node(1), node(2)], 0.0)
    watch.hear([node(1, 2)], silent_s)
    assert happened(watch) == [f"node-2 {what}"]
    assert [one.announcement.name for one in watch.living()] == ["node-1"]
    watch.hear([node(1, 3), node(2)], silent_s + 1)
    assert happened(watch)[-1] == "node-2 is back"


def test_a_node_that_went_is_shown_for_a_while() -> None:
    watch = Watch(5.0)
    watch.hear([node(1), node(2)], 0.0)
    watch.hear([node(1)], 1.0)
    assert len(watch.all()) == 2
    watch.hear([node(1)], 1.5 + GONE_SHOWN_S)
    assert [one.announcement.name for one in watch.all()] == ["node-1"]


def test_nodes_and_events_are_bounded() -> None:
    watch = Watch(5.0)
    watch.hear([node(i) for i in range(2 * NODES_MAX)], 0.0)
    watch.hear([], 1.0)
    assert len(watch.nodes) == NODES_MAX
    assert len(watch.events) == EVENTS_MAX


def test_shares_add_up_to_one() -> None:
    counts = {"asked_tokens": 8, "engine_tokens": 1, "hit_tokens": 5, "missed_tokens:a": 2}
    assert hit_shares(counts) == (0.125, 0.625, 0.25)
    assert hit_shares({}) is None
    assert by_reason(counts | {"missed_tokens:b": 6}) == [("b", 0.75), ("a", 0.25)]


def test_ages_are_told_from_the_first_bound_that_some_reach_to_the_first_that_all_do() -> None:
    counts = {"evicted_age": 4, "evicted_age_le_10": 1, "evicted_age_le_60": 4}
    assert by_age({**counts, "evicted_age_le_300": 4}, (1, 10, 60, 300)) == [(10, 0.25), (60, 1.0)]
    assert by_age({}, (1, 10)) == []
