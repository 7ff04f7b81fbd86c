"""What vLLM's base class of a tier asks for, on vLLM's own file system tier and on ours.

vLLM's tests of tiers are written for one tier each and look at its files, so the claims are taken
from the base class. The file system tier is the control: a claim that it fails is none of vLLM's.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from test_vllm_tier import CHUNK_BYTES, CHUNKS, PATIENCE_S, config

from connector.limits import RESULTS_MAX

if TYPE_CHECKING:
    from pathlib import Path

    from stores import NodeProcess

pytestmark = pytest.mark.vllm


class Tier:
    """A tier as vLLM's factory makes it, over page-aligned memory of `CHUNKS` chunks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import numpy as np
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        room = mmap.mmap(-1, CHUNKS * CHUNK_BYTES)
        self.memory = np.frombuffer(room, np.uint8).reshape(CHUNKS, CHUNK_BYTES)
        spec = TieringOffloadingSpec(config({}))
        self.manager: Any = SecondaryTierFactory.create_secondary_tier(
            dict(settings), memoryview(self.memory), spec
        )
        self.context = ReqContext(req_id="r")
        self.manager.on_new_request(self.context)
        self.reported: list[Any] = []
        self._number = 0

    def job(self, keys: list[Any], chunks: list[int], *, load: bool = False) -> int:
        import numpy as np
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._number += 1
        job = TransferJob(self._number, keys, np.array(chunks, np.int64), load, self.context)
        (self.manager.submit_load if load else self.manager.submit_store)(job)
        return self._number

    def poll(self) -> None:
        self.reported += self.manager.get_finished_jobs()

    def ended(self, *numbers: int) -> list[Any]:
        """Return the results of these jobs, in order, once all are reported."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not {r.job_id for r in self.reported} >= set(numbers):
            assert time.monotonic() < give_up_at
            self.poll()
            time.sleep(0.002)
        by_number = {result.job_id: result for result in self.reported}
        return [by_number[number] for number in numbers]

    def look_up(self, keys: list[Any], request: str) -> list[str]:
        """Return what a request of its own is told, asked step by step as vLLM does."""
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

        context, give_up_at = ReqContext(req_id=request), time.monotonic() + PATIENCE_S
        self.manager.on_new_request(context)
        while True:
            answers = [self.manager.lookup(key, context) for key in keys]
            if LookupResult.RETRY not in answers:
                self.manager.on_request_finished(context)
                return [answer.name for answer in answers]
            assert time.monotonic() < give_up_at
            self.manager.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.002)

    def fill(self, *chunks: int) -> list[bytes]:
        payloads = [os.urandom(CHUNK_BYTES) for _ in chunks]
        for chunk, payload in zip(chunks, payloads, strict=True):
            self.memory[chunk] = bytearray(payload)
        return payloads

    def bytes_of(self, *chunks: int) -> list[bytes]:
        return [self.memory[chunk].tobytes() for chunk in chunks]


def settings_of(kind: str, node: NodeProcess, tmp_path: Path) -> dict[str, Any]:
    if kind == "fs":
        return {"type": "fs", "root_dir": str(tmp_path)}
    ours = {"type": "KVStoreTier", "module_path": "connector.adapters.vllm.tier"}
    return {**ours, **node.engine_settings, "weights_id": os.urandom(4).hex()}


@pytest.fixture(params=["fs", "ours"])
def settings(request: pytest.FixtureRequest, node: NodeProcess, tmp_path: Path) -> dict[str, Any]:
    return settings_of(request.param, node, tmp_path)


@pytest.fixture
def tier(settings: dict[str, Any]) -> Iterator[Tier]:
    made = Tier(settings)
    yield made
    made.manager.shutdown()


def names(count: int) -> list[Any]:
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(os.urandom(32), 0) for _ in range(count)]


def test_what_was_stored_is_found_and_what_was_not_is_a_miss(tier: Tier) -> None:
    keys = names(3)
    assert tier.look_up(keys, "before") == ["MISS"] * 3
    tier.fill(0, 1)
    (stored,) = tier.ended(tier.job(keys[:2], [0, 1]))
    assert stored.success
    assert tier.look_up(keys, "after") == ["HIT", "HIT", "MISS"]


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.covers("tier of vLLM's own offloading", "memory")
def test_chunks_come_back_in_other_slots_and_no_other_slot_changes(tier: Tier, count: int) -> None:
    source, target = list(range(count)), list(range(CHUNKS - count, CHUNKS))
    keys, payloads = names(count), tier.fill(*source)
    tier.ended(tier.job(keys, source))
    tier.fill(*range(CHUNKS))
    others = [chunk for chunk in range(CHUNKS) if chunk not in target]
    before = tier.bytes_of(*others)
    (loaded,) = tier.ended(tier.job(keys, target, load=True))
    assert loaded.success
    assert tier.bytes_of(*target) == payloads
    assert tier.bytes_of(*others) == before


def test_a_load_of_what_is_missing_fails_and_names_only_what_is_in_place(tier: Tier) -> None:
    keys, payloads = names(3), tier.fill(0, 1)
    tier.ended(tier.job(keys[:2], [0, 1]))
    (failed,) = tier.ended(tier.job(keys, [4, 5, 6], load=True))
    assert not failed.success
    assert set(failed.successful_keys or ()) <= set(keys[:2])
    for key, chunk, payload in zip(keys, (4, 5), payloads, strict=False):
        if key in (failed.successful_keys or ()):
            assert tier.bytes_of(chunk) == [payload]
    assert tier.look_up(keys[:2], "again") == ["HIT", "HIT"]


def test_every_job_is_reported_once(tier: Tier) -> None:
    tier.fill(*range(8))
    numbers = [tier.job(names(1), [chunk]) for chunk in range(8)]
    tier.ended(*numbers)
    for _ in range(20):
        tier.poll()
        time.sleep(0.002)
    assert sorted(result.job_id for result in tier.reported) == numbers


def test_of_very_many_jobs_each_is_reported(node: NodeProcess, tmp_path: Path) -> None:
    """A load of which vLLM never hears the end keeps its request waiting."""
    tier = Tier(settings_of("ours", node, tmp_path))
    numbers = [tier.job([], []) for _ in range(RESULTS_MAX + 10)]
    tier.manager.drain_jobs()
    tier.poll()
    assert sorted(result.job_id for result in tier.reported) == numbers
    tier.manager.shutdown()


def test_after_a_drain_every_job_has_ended_and_nothing_touches_the_memory(tier: Tier) -> None:
    keys = names(8)
    tier.fill(*range(8))
    tier.ended(tier.job(keys, list(range(8))))
    numbers = [tier.job(keys, list(range(8, 16)), load=True) for _ in range(4)]
    tier.manager.drain_jobs()
    tier.poll()
    assert {result.job_id for result in tier.reported} >= set(numbers), "without another poll"
    ours = tier.fill(*range(8, 16))
    time.sleep(0.1)
    assert tier.bytes_of(*range(8, 16)) == ours
    again = tier.ended(tier.job(keys, list(range(8, 16)), load=True))
    assert again[0].success, "what comes after the drain is done"


def test_a_locality_that_is_none_is_refused_when_the_tier_is_made(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="Locality"):
        Tier({**settings, "locality": "near"})
    made = Tier({**settings, "locality": "LOCAL"})
    assert made.manager.locality.name == "LOCAL"
    made.manager.shutdown()


def test_jobs_are_only_left_behind_by_vllms_thread(
    node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that hangs does not hold up who submits: nothing of it runs on that thread."""
    import threading

    tier = Tier(settings_of("ours", node, tmp_path))
    here, threads = threading.get_ident(), set()
    store = tier.manager._store
    for name in ("reserve", "commit", "lookup", "views", "touch"):
        real = getattr(store, name)

        def watched(*args: Any, real: Any = real, **more: Any) -> Any:
            threads.add(threading.get_ident())
            return real(*args, **more)

        monkeypatch.setattr(store, name, watched)
    keys = names(2)
    tier.ended(tier.job(keys, [0, 1]))
    tier.look_up(keys, "r")
    tier.ended(tier.job(keys, [2, 3], load=True))
    assert threads
    assert here not in threads
    tier.manager.shutdown()


def test_a_drain_that_a_job_holds_up_ends_with_an_error(
    node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for ever, and not as if the memory were vLLM's again."""
    import threading

    from kvstore import InternalError

    tier = Tier(settings_of("ours", node, tmp_path))
    monkeypatch.setattr("connector.adapters.vllm.tier.DRAIN_TIMEOUT_S", 0.05)
    go = threading.Event()

    def held() -> None:
        go.wait(PATIENCE_S)

    tier.manager._tasks.submit(held, go.set)
    with pytest.raises(InternalError, match="not emptied"):
        tier.manager.drain_jobs()
    go.set()
    monkeypatch.setattr("connector.adapters.vllm.tier.DRAIN_TIMEOUT_S", PATIENCE_S)
    tier.manager.drain_jobs()
    tier.manager.shutdown()


def test_every_method_of_vllms_tier_is_known() -> None:
    """From vLLM's own class: one that is new there must be implemented or waived here."""
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from connector.adapters.vllm.tier import KVStoreTier

    inherited = {
        "block_size_bytes",
        "bp_detector",
        "has_pending_work",  # vLLM steps on while a job of it is in flight, and we have no others
        "serve_external_requests",  # other engines ask the store, not this one
        "take_events",  # nodes publish theirs (docs/decisions/0064)
        "build_metric_definitions",
        "get_stats",  # vLLM's manager measures each tier's bytes and times by itself
        "cache_hit_source",
    }
    newest = {  # of 0.33
        "tolerates_off_thread_polling",  # for tiers that others wait for between two steps
        "config_info_keys",
        "config_info",  # labels of a metric: we have none
    }
    public = {name for name in vars(SecondaryTierManager) if not name.startswith("_")}
    ours = {name for name in vars(KVStoreTier) if not name.startswith("_")}
    assert public - ours <= inherited | newest
    assert SecondaryTierManager.__abstractmethods__ <= ours
    assert inherited <= public
