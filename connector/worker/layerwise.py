"""Moves the blocks of one step layer by layer, beside the forward that needs or makes them.

A load of a step must be in place when the attention of its layer reads it, and a
save can start once that attention has written it. Neither counts before the end
of the forward: a load that turned out late or wrong in one layer has failed, and
what a forward has written is saved if it came to its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from connector import metrics
from connector.copiers.base import KVCopier, Ready
from connector.limits import FORWARD_TIMEOUT_S, Clock
from connector.messages import LoadBlock, SaveJob
from connector.worker.transfers import Load, Save, Views, scatter_all
from kvstore import MissReason
from kvstore.spi import in_batches


class LayerPlace(NamedTuple):
    """Says where a layer is among an engine's KV cache groups."""

    group: int
    layer: int
    """Its number within the group."""


class StepLoads:
    """Carries the loads of one step into one KV cache group. The engine's thread waits, one other
    copies."""

    def __init__(
        self, tasks: Sequence[Load], layers: int, deadline: float, ready: Ready | None, clock: Clock
    ) -> None:
        """`ready` stands for all work on the device that still uses the blocks."""
        self.tasks = tasks
        self._layers = layers
        self._deadline = deadline
        self._ready = ready
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_place = 0
        """Number of leading layers that are in place in every block that may still succeed."""
        self._awaited: set[int] = set()
        self._over = False
        """Whether nothing more will be copied, or would be too late."""
        self._late = False
        self._good = [len(task.job.blocks) for task in tasks]
        """Number of leading blocks of each task that have not failed."""
        self._copied = False
        self.in_place_at = float("-inf")
        """Time at which the last layer so far was in place."""

    @property
    def hangs(self) -> bool:
        """Return whether it was too late and the copying thread is still busy with it."""
        return self._late and not self._copied

    def left_s(self) -> float:
        return self._deadline - self._clock()

    # The engine's thread

    def wait(self, layer: int) -> None:
        """Return when `layer` is in place, or will not be: `end` then tells which blocks failed."""
        with self._lock:
            self._awaited.add(layer)
            while self._in_place <= layer and not self._over:
                left_s = self.left_s()
                if left_s <= 0:
                    self._late = self._over = True
                    return
                self._changed.wait(left_s)

    def end(self, timeout_s: float) -> None:
        """Set `loaded` of every task, after the forward; nothing is written after this.

        A layer that nobody has waited for may have been read before it was
        there, so without a `wait` for each of them nothing counts as loaded.
        Raises `InternalError` when a copy hangs for
        `timeout_s`.
        """
        with self._lock:
            self._over = True
            all_awaited = len(self._awaited) == self._layers
            whole = all_awaited and not self._late and self._in_place == self._layers
        for task, good in zip(self.tasks, self._good, strict=True):
            task.guard.end(timeout_s)
            task.loaded = good if whole else 0
            if not all_awaited:
                task.why = metrics.INCOMPLETE

    # The copying thread

    def give_up(self, why: str = "") -> None:
        """Say that what is not in place will not come: the copying thread is done with it."""
        with self._lock:
            self._copied = self._over = True
            for task in self.tasks if why else ():
                task.why = why
            self._changed.notify_all()

    def copy(
        self,
        blocks: KVCopier,
        windows: Sequence[Sequence[LoadBlock]],
        views_of: Callable[[Sequence[LoadBlock]], Iterator[Views | None]],
    ) -> bool:
        """Copy all tasks' blocks; each copy is checked before anybody may read it.

        `windows` are the blocks in their order, in parts whose views may be
        open at the same time; the last of them is copied layer by layer, those
        before it in whole blocks. True when something of a task is in place.
        """
        blocks.wait_ready(self._ready)
        places = iter(
            [(n, i) for n, task in enumerate(self.tasks) for i in range(len(task.job.blocks))]
        )
        for number, window in enumerate(windows):
            opened = [(*next(places), views) for views in views_of(window)]
            last = number == len(windows) - 1
            for layer in range(self._layers) if last else (None,):
                for batch in in_batches(opened, blocks.batch_blocks):
                    self._copy_blocks(batch, blocks, layer)
                if self._over or not any(self._good):
                    return False
                if layer is not None:
                    with self._lock:
                        self._in_place = layer + 1
                        self.in_place_at = self._clock()
                        self._changed.notify_all()
        return True

    def _copy_blocks(
        self,
        opened: Sequence[tuple[int, int, Views | None]],
        blocks: KVCopier,
        layer: int | None,
    ) -> None:
        """Copy blocks of (task, position) that may still succeed; those that fail do not."""
        wanted: list[tuple[int, int]] = []
        copies: list[tuple[Load, LoadBlock, Views]] = []
        for number, position, views in opened:
            if position >= self._good[number]:
                continue
            if views is None:
                self._fail(number, position)
                continue
            task = self.tasks[number]
            wanted.append((number, position))
            copies.append((task, task.job.blocks[position], views))
        if self._over:
            return
        for (number, position), right in zip(
            wanted, scatter_all(blocks, copies, layer), strict=True
        ):
            if not right:
                self._fail(number, position)

    def _fail(self, number: int, position: int) -> None:
        if not self._over:
            self.tasks[number].why = MissReason.LOAD_FAILED
        self._good[number] = min(self._good[number], position)


class StepSaves:
    """Carries the saves of one step. The engine's thread says what is written, one other reads
    it."""

    def __init__(self, jobs: Sequence[SaveJob], places: Sequence[LayerPlace], clock: Clock) -> None:
        self.jobs = jobs
        self._places = places
        self._clock = clock
        now = clock()
        self._deadline = now + FORWARD_TIMEOUT_S
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._written: list[tuple[LayerPlace, Ready | None]] = []
        self._seen: set[LayerPlace] = set()
        self._whole: bool | None = None
        """Whether the forward came to its end; None while it runs."""
        self.tasks = [Save(job, self._deadline, now) for job in jobs]

    # The engine's thread

    def layer_written(self, place: LayerPlace, ready: Ready | None) -> None:
        """Take note that the forward has written `place`; `ready` stands for that work. A layer
        that is written twice was not final the first time: nothing of such a step is saved."""
        with self._lock:
            if place in self._seen:
                self._drop(metrics.INCOMPLETE)
            self._seen.add(place)
            self._written.append((place, ready))
            self._changed.notify_all()

    def forward_done(self, timeout_s: float, ready: Ready | None) -> bool:
        """Note that the forward has ended; what is left to copy has `timeout_s` from here on.

        A forward that has named some of its layers and not others broke off. Then the answer is
        False and nothing is saved. One that named none was whole.
        """
        with self._lock:
            if not self._seen:
                self._written = [(place, ready) for place in self._places]
                self._seen = set(self._places)
            if self._whole is None and len(self._seen) == len(self._places):
                self._whole = True
            elif not self._whole:
                self._drop(metrics.INCOMPLETE)
            now = self._clock()
            self._deadline = now + timeout_s
            for task in self.tasks:
                task.started_at, task.deadline = now, self._deadline
            self._changed.notify_all()
            return self._whole is True

    def give_up(self, why: str) -> None:
        """Say that nothing of this step will be saved."""
        with self._lock:
            self._drop(why)
            self._changed.notify_all()

    # The copying thread

    def written(self) -> Iterator[tuple[LayerPlace, Ready | None]]:
        """Yield layers as the forward writes them; ends early when it breaks off or takes too
        long."""
        for number in range(len(self._places)):
            if not self._wait(lambda number=number: len(self._written) > number):  # type: ignore[misc]
                return
            yield self._written[number]

    def whole(self) -> bool:
        """Wait for the forward to end. Return whether what it wrote may be saved."""
        self._wait(lambda: self._whole is not None)
        return bool(self._whole)

    def _wait(self, happened: Callable[[], bool]) -> bool:
        with self._lock:
            while self._whole is not False and not happened():
                left_s = self._deadline - self._clock()
                if left_s <= 0:
                    self._drop(MissReason.DEADLINE)
                self._changed.wait(max(0.0, left_s))
            return self._whole is not False

    def _drop(self, why: str) -> None:
        self._whole = False
        for task in self.tasks:
            task.why = task.why or why
