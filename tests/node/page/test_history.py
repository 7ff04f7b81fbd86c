"""An hour of a cluster, in less than a MiB whatever happens."""

from __future__ import annotations

import gc
import tracemalloc

from page_parts import GIB, cluster
from stores import announcement

from kvstore.core.outgoing.watched import AGE_BOUNDS_S
from kvstore.node.page.history import MINUTES, POINTS, TICK_S, History
from kvstore.node.page.watch import NODES_MAX, Watch


def lived(history: History, ticks: int, count: int = 2) -> Watch:
    watch = Watch(TICK_S)
    for tick in range(ticks + 1):
        if watch.hear(cluster(count, tick), tick * TICK_S):
            history.note(watch)
    return watch


def test_each_tick_is_a_number_of_each_kind_the_latest_last() -> None:
    history = History()
    lived(history, 5)
    assert history.series("nodes") == [2.0] * 5
    assert history.series("asked_tokens") == [3000.0] * 5
    assert history.series("size_bytes") == [128.0 * GIB] * 5
    used = history.series("used_bytes")
    assert used == sorted(used)


def test_after_an_hour_the_oldest_makes_room() -> None:
    history = History()
    lived(history, POINTS + 50)
    assert len(history.series("used_bytes")) == POINTS
    assert history.series("used_bytes") == sorted(history.series("used_bytes"))
    assert len(history.fill(1)) == MINUTES


def test_ages_and_reasons_are_those_of_the_hour() -> None:
    history = History()
    lived(history, 10)
    assert history.missed() == {"missed_tokens:evicted": 4200, "missed_tokens:never-stored": 2400}
    assert history.ages()[-1] == 1200
    assert history.ages()[AGE_BOUNDS_S.index(300)] == 300


def test_an_hour_of_as_many_nodes_as_are_followed_takes_less_than_a_mebibyte() -> None:
    """Of nodes with the longest names, which come and go, and engines that miss for all reasons."""
    watch = Watch(TICK_S)

    def word(i: int, tick: int) -> object:
        reasons = {f"missed_tokens:reason-{tick % 5}-{n}": tick * n for n in range(60)}
        name, host = f"{i:032}", "h" * 200
        return announcement(node_id=i, name=name, host=host, up_s=tick, counts=reasons)

    nodes = [[word(i, tick) for i in range(NODES_MAX)] for tick in (1, 2)]
    watch.hear(nodes[0], 0.0)
    watch.hear(nodes[1], TICK_S)
    tracemalloc.start()
    try:
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        history = History()
        for _tick in range(POINTS + 10):
            watch._ticks.append(watch.last)
            history.note(watch)
        for i in range(300):
            watch.hear(nodes[i % 2][: NODES_MAX // 2 + i % 2], TICK_S + 1e-3 * i)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 20
    assert len(watch.events) == watch.events.maxlen
