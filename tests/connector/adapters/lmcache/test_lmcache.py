"""LMCache's own loader, objects and benchmark against a real Redis and a real memory node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from lmcache_objects import (
    PATIENCE_S,
    PATIENT,
    ROOT,
    SIZE,
    adapter_of,
    bits,
    fills,
    load,
    look_up,
    object_keys,
    objects,
    spec,
    store,
)
from stores import MIB, NodeProcess

from kvstore import UsageError

if TYPE_CHECKING:
    from redis_servers import RedisServer

pytestmark = pytest.mark.lmcache


@pytest.fixture(autouse=True)
def untracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache reports its use over the network unless told not to."""
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    monkeypatch.setenv("DO_NOT_TRACK", "1")


@pytest.fixture
def adapter(node: NodeProcess) -> Iterator[Any]:
    made = adapter_of(node)
    yield made
    made.close()


@pytest.mark.covers("full attention", "memory")
def test_objects_come_back_in_another_process_byte_for_byte(
    node: NodeProcess, adapter: Any
) -> None:
    keys = object_keys(5)
    result = store(adapter, keys, objects([1, 2, 3, 4, 5]))
    assert result.is_successful()
    assert result.bytes_transferred() == 5 * SIZE
    other = adapter_of(node)
    asked = [keys[0], *object_keys(1), *keys[1:]]
    assert look_up(other, asked) == [True, False, True, True, True, True]
    targets = objects([0] * 5)
    assert load(other, keys, targets) == [True] * 5
    assert fills(targets) == [1, 2, 3, 4, 5]
    other.submit_unlock(keys)
    other.close()


def test_the_three_event_descriptors_are_distinct(node: NodeProcess, adapter: Any) -> None:
    other = adapter_of(node)
    descriptors = {
        getattr(each, f"get_{name}_event_fd")()
        for each in (adapter, other)
        for name in ("store", "lookup_and_lock", "load")
    }
    assert len(descriptors) == 6
    other.close()


def test_a_key_that_exists_is_stored_without_a_transfer(adapter: Any) -> None:
    keys = object_keys(2)
    assert store(adapter, keys, objects([1, 2])).bytes_transferred() == 2 * SIZE
    again = store(adapter, keys, objects([1, 2]))
    assert again.is_successful()
    assert again.bytes_transferred() == 0


def test_what_was_never_looked_up_can_be_loaded(adapter: Any) -> None:
    keys = object_keys(2)
    store(adapter, keys, objects([7, 8]))
    targets = objects([0, 0, 0])
    assert load(adapter, [keys[1], *object_keys(1), keys[0]], targets) == [True, False, True]
    assert fills(targets) == [8, 0, 7]


def test_locked_objects_stay_while_others_are_evicted(redis_server: RedisServer) -> None:
    with NodeProcess(redis_server, size=8 * MIB) as small:
        adapter = adapter_of(small)
        keys = object_keys(4)
        store(adapter, keys, objects([1, 2, 3, 4]))
        assert look_up(adapter, keys[:2]) == [True, True]
        for _ in range(20):  # three times as much as the node holds
            assert store(adapter, object_keys(20), objects([9] * 20)).is_successful()
        targets = objects([0] * 4)
        assert load(adapter, keys, targets) == [True, True, False, False]
        assert fills(targets[:2]) == [1, 2]
        adapter.submit_unlock(keys[:2])
        for _ in range(20):
            store(adapter, object_keys(20), objects([9] * 20))
        assert load(adapter, keys, objects([0] * 4)) == [False] * 4
        adapter.close()


@pytest.mark.parametrize(
    "change",
    [{"model_name": "n"}, {"kv_rank": 1}, {"object_group_id": 1}, {"cache_salt": "s"}],
    ids=str,
)
def test_trap_every_part_of_the_object_key_counts(adapter: Any, change: dict[str, Any]) -> None:
    from dataclasses import replace

    (key,) = object_keys(1)
    store(adapter, [key], objects([1]))
    assert look_up(adapter, [key, replace(key, **change)]) == [True, False]


def test_trap_objects_of_equal_size_and_another_dtype_or_of_other_weights_are_misses(
    node: NodeProcess, adapter: Any
) -> None:
    keys = object_keys(1)
    store(adapter, keys, objects([1], dtype="bfloat16"))
    assert load(adapter, keys, objects([0], dtype="float16")) == [False]
    assert load(adapter, keys, objects([0], size=SIZE // 2, dtype="bfloat16")) == [False]
    assert load(adapter, keys, objects([0], dtype="bfloat16")) == [True]
    other = adapter_of(node, weights_id="r2")
    assert look_up(other, keys) == [False]
    other.close()


def test_the_weights_must_be_named(node: NodeProcess) -> None:
    with pytest.raises(UsageError, match="weights_id"):
        adapter_of(node, weights_id=None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_dies_or_hangs_is_misses_and_no_waiting(
    node: NodeProcess, adapter: Any, number: signal.Signals
) -> None:
    keys = object_keys(2)
    store(adapter, keys, objects([1, 2]))
    assert look_up(adapter, keys) == [True, True]
    node.signal(number)
    if number is signal.SIGKILL:
        node.process.wait(10)
    started = time.monotonic()
    assert not store(adapter, object_keys(2), objects([3, 4])).is_successful()
    assert look_up(adapter, object_keys(2)) == [False, False]
    loaded = load(adapter, keys, objects([0, 0]))
    if number is signal.SIGSTOP:  # memory of a dead node may be read until its death is noticed
        assert loaded == [True, True], "reads need no living node, only its memory"
    adapter.submit_unlock(keys)
    assert time.monotonic() - started < PATIENCE_S
    assert adapter.report_status()["is_healthy"]


def test_an_object_that_is_locked_all_the_time_and_lost_is_stored_and_loaded_again(
    node: NodeProcess, adapter: Any
) -> None:
    keys = object_keys(1)
    store(adapter, keys, objects([1]))
    assert look_up(adapter, keys) == [True]  # by a request that goes on
    node.kill()
    node.forget()
    node.start()
    deadline = time.monotonic() + PATIENCE_S
    while load(adapter, keys, objects([0])) != [False]:  # until its death is noticed
        assert time.monotonic() < deadline
    while not store(adapter, keys, objects([2])).is_successful():
        assert time.monotonic() < deadline
    assert look_up(adapter, keys) == [True]
    targets = objects([0])
    assert load(adapter, keys, targets) == [True]
    assert fills(targets) == [2]


def test_closing_ends_what_waits_and_is_safe_twice(node: NodeProcess) -> None:
    adapter = adapter_of(node)
    for _ in range(10):
        adapter.submit_store_task(object_keys(8), objects([1] * 8))
    adapter.close()
    adapter.close()
    assert not adapter.report_status()["is_healthy"]
    number = adapter.submit_lookup_and_lock_task(object_keys(1), {})
    assert bits(adapter.query_lookup_and_lock_result(number), 1) == [False]


def test_wrong_settings_are_refused_when_lmcache_starts(node: NodeProcess) -> None:
    for wrong in (
        {"block_tokens": 16},
        {"max_capacity_gb": -1},
        {"max_capacity_gb": "1"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            adapter_of(node, **wrong)


@pytest.mark.timeout(400)
def test_lmcaches_own_benchmark_verifies_what_it_loads(redis_server: RedisServer) -> None:
    with NodeProcess(redis_server, size=128 * MIB) as large:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "lmcache.cli.main", "bench", "l2"),
                *("--l2-adapter", json.dumps(spec(large, limits=PATIENT))),
                *("--no-skip-verify", "--num-keys", "32", "--in-flight", "4"),
                *("--data-size-kb", "64", "--rounds", "3", "--lookup-max-hit-rate", "0.5"),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 128 keys data verified OK." in done.stdout
