"""What the model of an engine on a GPU is worth: it notices each bug that is planted here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from model_gpu import GpuLane, GpuStream
from vllm_gpu_traps import (
    MakeGpuEngine,
    aborted_while_loading,
    block_is_gone,
    loaded_late,
    preempted_while_saving,
    requests_load,
    step_freed_while_a_step_writes,
    used_again_while_saving,
    written_over_two_steps,
)

from connector.scheduler.scheduler import SchedulerCore
from connector.worker import worker
from connector.worker.copy_guard import CopyGuard
from connector.worker.transfers import Load, Save
from connector.worker.worker import WorkerCore
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
Plant = Callable[[pytest.MonkeyPatch], None]
Trap = Callable[[MakeGpuEngine, MemoryBlockStore], None]

PLANTED: dict[str, tuple[Plant, Trap]] = {}
"""Bugs of a connector by name: what plants one, and the trap that it falls into."""


def planted(trap: Trap) -> Callable[[Plant], Plant]:
    def take(plant: Plant) -> Plant:
        PLANTED[plant.__name__] = (plant, trap)
        return plant

    return take


def _hasty(kind: type) -> type:
    """The same transfer, which waits for nothing."""

    def init(self: Any, job: Any, deadline: float, now: float, ready: Any) -> None:
        kind.__init__(self, job, deadline, now)  # type: ignore[misc]

    return type(kind.__name__, (kind,), {"__init__": init, "__slots__": ()})


@planted(written_over_two_steps)
def a_save_does_not_wait_for_the_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "Save", _hasty(Save))


@planted(step_freed_while_a_step_writes)
def a_load_does_not_wait_for_the_steps_before_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "Load", _hasty(Load))


@planted(requests_load)
def a_load_is_reported_before_it_is_done(patch: pytest.MonkeyPatch) -> None:
    load = WorkerCore._load

    def early(self: WorkerCore, task: Load) -> None:
        task.loaded = len(task.job.blocks)
        self._end(task)
        task.loaded = 0
        time.sleep(0.2)
        load(self, task)

    patch.setattr(WorkerCore, "_load", early)


@planted(requests_load)
def a_copier_does_not_wait_for_its_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GpuStream, "wait", lambda self: None)
    launch = GpuLane.launch

    def later(self: GpuLane, *what: Any) -> None:
        self.kernels.stream.launch(lambda: time.sleep(0.5))
        launch(self, *what)

    patch.setattr(GpuLane, "launch", later)


@planted(used_again_while_saving)
def blocks_are_released_before_their_save_ends(patch: pytest.MonkeyPatch) -> None:
    from connector.adapters.vllm.connector import PoolPins

    patch.setattr(PoolPins, "pin", lambda self, block_ids: None)
    patch.setattr(PoolPins, "unpin", lambda self, block_ids: None)


@planted(used_again_while_saving)
def blocks_stay_pinned_for_ever(patch: pytest.MonkeyPatch) -> None:
    from connector.adapters.vllm.connector import PoolPins

    patch.setattr(PoolPins, "unpin", lambda self, block_ids: None)


@planted(aborted_while_loading)
def an_aborted_load_ends_amid_its_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CopyGuard, "try_end", lambda self: True)


@planted(loaded_late)
def a_late_load_ends_amid_its_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CopyGuard, "try_end", lambda self: True)


@planted(aborted_while_loading)
def an_aborted_load_is_not_reported(patch: pytest.MonkeyPatch) -> None:
    poll, cancel, gone = WorkerCore.poll, WorkerCore.cancel_loads, set[str]()

    def cancel_loads(self: WorkerCore, request_ids: set[str]) -> None:
        gone.update(request_ids)
        cancel(self, request_ids)

    def without(self: WorkerCore, wait_s: float = 0.0) -> Any:
        report = poll(self, wait_s)
        report.finished_loads -= gone
        return report

    patch.setattr(WorkerCore, "cancel_loads", cancel_loads)
    patch.setattr(WorkerCore, "poll", without)


@planted(block_is_gone)
def a_failed_load_is_not_reported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerCore, "_report_failures", lambda self, task, report: None)


@planted(block_is_gone)
def what_failed_is_offered_again(patch: pytest.MonkeyPatch) -> None:
    report = SchedulerCore.report

    def forgetful(self: SchedulerCore, said: Any) -> None:
        said.failed_blocks = {}
        report(self, said)

    patch.setattr(SchedulerCore, "report", forgetful)


@planted(preempted_while_saving)
def a_load_is_reported_twice(patch: pytest.MonkeyPatch) -> None:
    poll, ended = WorkerCore.poll, set[str]()

    def again(self: WorkerCore, wait_s: float = 0.0) -> Any:
        report = poll(self, wait_s)
        report.finished_loads |= ended
        ended.update(report.finished_loads)
        return report

    patch.setattr(WorkerCore, "poll", again)


@pytest.mark.parametrize("name", PLANTED)
def test_the_model_notices_a_planted_bug(
    make_gpu: MakeGpuEngine,
    store: MemoryBlockStore,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    plant, trap = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        trap(make_gpu, store)
    monkeypatch.undo()
