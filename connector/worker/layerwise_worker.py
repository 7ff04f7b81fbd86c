"""Runs a worker side whose transfers go beside the forward of their own step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from connector import metrics
from connector.copiers.base import Ready
from connector.layout.shard_reads import found_in, windows
from connector.limits import LOAD_STAGING_BYTES, STEP_LOAD_BYTES
from connector.messages import LoadBlock, LoadJob, SaveJob, WorkerReport
from connector.worker import transfers
from connector.worker.layerwise import LayerPlace, StepLoads, StepSaves
from connector.worker.transfers import Load, Reserved, Save, Views, block_views, gather_all
from connector.worker.worker import WorkerCore
from kvstore import KVStoreError, MissReason
from kvstore.spi import AnyReservation, Tier

if TYPE_CHECKING:
    import torch

log = logging.getLogger(f"kvstore.{__name__}")


class LayerwiseWorker(WorkerCore):
    """Implements a worker side whose loads are part of a step and whose saves start within one."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._places: dict[str, LayerPlace] = {}
        self._step_loads: StepLoads | None = None
        """Loads of the step until its `poll`."""
        self._hanging_loads: StepLoads | None = None
        self._step_saves: StepSaves | None = None
        """Saves of the step from the first layer until the end of the forward."""

    def register_kv_caches(self, *groups: Mapping[str, torch.Tensor]) -> None:
        self._places = {
            name: LayerPlace(group, layer)
            for group, kv_caches in enumerate(groups)
            for layer, name in enumerate(kv_caches)
        }
        super().register_kv_caches(*groups)

    # Called by the engine's thread

    def start_loads(self, jobs: Sequence[LoadJob], ready: Ready | None = None) -> None:
        """Start loads that the forward after this call waits for."""
        if not jobs:
            return
        now = self._clock()
        deadline = now + max(map(self._timeout_of, jobs))
        tasks = [Load(job, deadline, now) for job in jobs]
        layers = self._groups[0].geometry.layers
        ready = self.mark_ready() if ready is None else ready
        step = StepLoads(tasks, layers, deadline, ready, self._clock)
        if self._hanging_loads is not None and not self._hanging_loads.hangs:
            self._hanging_loads = None
        self._step_loads = step
        # A thread that hangs in an earlier step cost that step its deadline; it costs no other.
        if not self._blocks or self._hanging_loads is not None or not self._loading.put(step):
            step.give_up(MissReason.TOO_BUSY)

    def wait_layer_load(self, layer_name: str) -> None:
        place = self._places.get(layer_name)
        if self._step_loads is not None and place is not None:
            self._step_loads.wait(place.layer)

    def poll(self, wait_s: float = 0.0) -> WorkerReport:
        """Report what ended, after the forward: the loads of the step are among it, late or not."""
        report = super().poll(wait_s)
        step, self._step_loads = self._step_loads, None
        if step is not None:
            step.end(self._load_timeout_s)
            if step.tasks[0].why == metrics.INCOMPLETE:
                names = transfers.names(task.job for task in step.tasks)
                text = "loads of requests %s dropped: the forward did not wait for every layer"
                log.warning(text, names)
            if step.hangs:
                self._hanging_loads = step
            for task in step.tasks:
                report.ended_loads[task.job.job_id] = 1
                self._report_failures(task, report)
                duration_s = step.in_place_at - task.started_at
                transfers.count(task, self._counts, duration_s, self._groups)
        return report

    def layer_written(self, layer_name: str, jobs: Sequence[SaveJob]) -> None:
        place = self._places.get(layer_name)
        if not jobs or place is None or not self._saves:
            return
        if self._step_saves is not None and self._step_saves.jobs is not jobs:
            self._step_saves.give_up(metrics.INCOMPLETE)  # of a step whose forward broke off
            self._step_saves = None
        if self._step_saves is None:
            self._step_saves = self._begin_saves(jobs)
        self._step_saves.layer_written(place, self.mark_ready())

    def start_saves(self, jobs: Sequence[SaveJob]) -> None:
        """Save what the layers have begun, or everything from here on, because the forward is
        done."""
        step, self._step_saves = self._step_saves, None
        if not self._saves:
            super().start_saves(jobs)
        elif jobs or step is not None:
            step = step or self._begin_saves(jobs)
            if not step.forward_done(self._save_timeout_s, self.mark_ready()):
                self._say_dropped(jobs, "the forward did not write each layer once")

    def _begin_saves(self, jobs: Sequence[SaveJob]) -> StepSaves:
        step = StepSaves(jobs, list(self._places.values()), self._clock)
        with self._lock:
            self._active.update(dict.fromkeys(step.tasks))
        if not (self._blocks and self._saving.put(step)):
            step.give_up(MissReason.TOO_BUSY)
            self._end_all(step.tasks)
        return step

    def _end_all(self, tasks: Sequence[Save]) -> None:
        for task in tasks:
            self._end(task)

    def close(self) -> None:
        for step in (self._step_loads, self._step_saves):
            if step is not None:
                step.give_up(metrics.ABORTED)
        super().close()

    # The loading thread

    def _load(self, step: StepLoads) -> None:
        why = ""
        try:
            why = self._run_loads(step)
        except Exception:
            why = metrics.ERROR
            log.exception(
                "loads of requests %s failed", transfers.names(task.job for task in step.tasks)
            )
        finally:
            step.give_up(why)

    def _run_loads(self, step: StepLoads) -> str:
        """Return why none of them was made; empty when they were, as far as each could be."""
        store = self._store.get()
        if store is None:
            return MissReason.NO_STORE

        blocks = [block for task in step.tasks for block in task.job.blocks]
        # Those not in memory here arrive where it is page-locked; a window is copied before the
        # next.
        tiers = store.tiers(found_in(self._groups, blocks))
        far = Tier.OTHER_HOST in tiers or Tier.DISK in tiers
        staging, room = (self._staging, LOAD_STAGING_BYTES) if far else (None, STEP_LOAD_BYTES)

        def views_of(window: Sequence[LoadBlock]) -> Iterator[Views | None]:
            views = store.views(found_in(self._groups, window), staging, step.left_s())
            return (block_views(self._groups, block, views) for block in window)

        parts = list(windows(self._groups, blocks, room)) or [blocks]
        began = self._clock()
        copied = step.copy(self._blocks[0], parts, views_of)
        if copied or step.left_s() <= 0:
            loaded = len(blocks) if copied else 0
            self._paces.measured(store, self._groups, blocks, loaded, self._clock() - began)
        if copied:
            for task in step.tasks:
                self._touch(task, store)
        return ""

    # The saving thread

    def _save(self, step: StepSaves) -> None:
        try:
            self._run_step_saves(step)
        except KVStoreError as e:
            step.give_up(transfers.why_of(e))
            self._say_dropped([task.job for task in step.tasks], e)
        except Exception as e:
            step.give_up(transfers.why_of(e))
            log.exception(
                "saves dropped, of requests %s", transfers.names(task.job for task in step.tasks)
            )
        finally:
            self._end_all(step.tasks)

    def _run_step_saves(self, step: StepSaves) -> None:
        """Reserve at once, copy what is written, commit when all of it is."""
        store = self._store.get()
        if store is None:
            step.give_up(MissReason.NO_STORE)
            return
        unused: list[AnyReservation] = []
        try:
            reserved: list[Reserved] = []
            for group, blocks in self._batches(step.tasks):
                reserved += self._reserve(store, group, blocks)
                unused = [entry.reservation for entry in reserved]
            filled = self._gather(step, reserved)
            while filled and step.whole():
                batch, filled = filled[: self._batch_blocks], filled[self._batch_blocks :]
                committed = {id(entry.reservation) for entry in batch}
                unused = [r for r in unused if id(r) not in committed]
                self._commit(store, batch, step.tasks)
        finally:
            if unused:
                store.abort(unused)
        self._touch_runs(step.tasks, store)

    def _gather(self, step: StepSaves, reserved: Sequence[Reserved]) -> list[Reserved]:
        """Return those that hold every layer, once the last one is written."""
        filling = list(reserved)
        for place, ready in step.written() if filling else ():
            self._blocks[place.group].wait_ready(ready)
            mine = [entry for entry in filling if entry.block.group == place.group]
            copied = {
                id(e)
                for e in gather_all(self._blocks, self._groups, mine, self._clock, place.layer)
            }
            filling = [e for e in filling if e.block.group != place.group or id(e) in copied]
        return filling
