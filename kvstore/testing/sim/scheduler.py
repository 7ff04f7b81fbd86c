"""Schedules simulated threads one at a time, over a clock that jumps, and kills processes.

All code under simulation is ordinary blocking code in a thread of its own, and
only the holder of the baton runs. Whoever reaches a point where another
process could get in between calls `pause` or `wait`; one random number
generator picks who goes on. So a seed replays exactly.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from typing import NoReturn

from kvstore.testing.sim.trace import Trace

STEP_S = 1e-3
"""Mean simulated time that a step takes."""
FOREVER = float("inf")
STEPS_MAX = 80_000
CHECK_EVERY_STEPS = 32


class ViolationError(AssertionError):
    """Raised when a rule of the design does not hold. The message carries the seed."""


class KilledError(BaseException):
    """Unwinds a thread whose process is dead. Nothing may catch it."""


class HandlerError(BaseException):
    """Stands for what a handler of signals raises: as KeyboardInterrupt, no peer's failure."""


class Process:
    """Names what is killed, stopped and continued as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.resume_at = 0.0
        self.stopped_s = 0.0
        """For how long it was stopped (SIGSTOP), all in all."""
        self.children: list[Process] = []
        """They have its open files, and what it may write to."""

    @property
    def gone(self) -> bool:
        """Whether nobody has its open files any more."""
        return self.dead and all(child.gone for child in self.children)


class Actor:
    """Runs one thread of a process."""

    __slots__ = ("baton", "interrupted", "name", "process", "thread", "wake_at")

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.baton = threading.Lock()
        self.baton.acquire()
        self.wake_at = 0.0
        self.interrupted = False
        """A handler of signals raises where this thread goes on."""
        self.thread: threading.Thread | None = None

    def notify(self) -> None:
        """Wake this thread: what it waits for has come."""
        self.wake_at = 0.0


class Scheduler:
    """Lets one actor run at a time. The thread that makes it is the first actor, the director."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.trace = Trace()
        self.now = 1000.0
        self.jumped_s = 0.0
        """By how much the clock has jumped, all in all."""
        self.step = 0
        self.stickiness = self.rng.choice((0.0, 0.3, 0.6, 0.8))
        """Chance that whoever runs goes on running."""
        self.director = Actor(Process("director"), "director")
        self.current = self.director
        self.actors: list[Actor] = [self.director]
        self.on_check: Callable[[], None] = lambda: None
        self.on_step: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._timer_count = 0
        self._failure: BaseException | None = None
        self._over = False

    # --- what simulated code calls ------------------------------------------

    def pause(self) -> None:
        """Let others run here."""
        self.current.wake_at = 0.0
        self._switch()

    def wait(self, until: float) -> None:
        """Sleep until then, or until somebody calls `notify`."""
        self.current.wake_at = until
        self._switch()

    def note(self, *what: object) -> None:
        self.trace.add(self.step, self.now, self.current.name, what)

    def fail(self, rule: str) -> NoReturn:
        error = ViolationError(f"seed {self.seed}, step {self.step}: {rule}")
        self._broken(error)  # whoever catches it on its way up
        raise error

    # --- what the world does -------------------------------------------------

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Do `action` then, in whoever's thread; it may not pause."""
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, action))

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        self.at(self.now + delay_s, action)

    def spawn(self, process: Process, name: str, body: Callable[[], object]) -> Actor:
        actor = Actor(process, name)
        actor.thread = threading.Thread(target=self._run, args=(actor, body), daemon=True)
        self.actors.append(actor)
        actor.thread.start()
        return actor

    def stop(self, process: Process, for_s: float) -> None:
        """Stop a process for a while, as SIGSTOP and then SIGCONT do.

        One that is stopped already goes on at the later of the two ends: stops that added up would
        keep it away for longer than any fault is meant to last.
        """
        stopped_until = max(process.resume_at, self.now)
        process.resume_at = max(stopped_until, self.now + for_s)
        process.stopped_s += process.resume_at - stopped_until

    def kill(self, process: Process) -> None:
        process.dead = True
        process.resume_at = 0.0
        for actor in self.actors:
            if actor.process is process:
                actor.wake_at = 0.0

    def end(self) -> None:
        """Unwind everybody; the director's last call."""
        self._over = True
        for actor in list(self.actors):
            if actor is not self.director:
                self.current = actor
                actor.baton.release()
                assert actor.thread is not None
                actor.thread.join()
        self.current = self.director

    # --- inside ---------------------------------------------------------------

    def _run(self, actor: Actor, body: Callable[[], object]) -> None:
        actor.baton.acquire()
        try:
            if not (actor.process.dead or self._over):
                body()
        except KilledError:
            pass
        except BaseException as e:
            self._broken(e)
        self.actors.remove(actor)
        if not self._over:
            self._pass_on(self._chosen())

    def _broken(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error

    def _switch(self) -> None:
        me = self.current
        if me.process.dead or self._over:
            raise KilledError
        chosen = self._chosen()
        if chosen is not me:
            self._pass_on(chosen)
            me.baton.acquire()
        if me is self.director:
            if self._failure is not None:
                raise self._failure
        elif me.process.dead or self._over:
            raise KilledError
        elif me.interrupted:
            me.interrupted = False
            raise HandlerError

    def _pass_on(self, chosen: Actor) -> None:
        self.current = chosen
        chosen.baton.release()

    def _chosen(self) -> Actor:
        if self._failure is None:
            try:
                return self._next()
            except BaseException as e:
                self._broken(e)
        return self.director

    def _next(self) -> Actor:
        self.step += 1
        if self.step > STEPS_MAX:
            self.fail(f"rule 8: still busy after {STEPS_MAX} steps")
        random_ = self.rng.random
        self.now += random_() * (2 * STEP_S)
        if self.step % CHECK_EVERY_STEPS == 0:
            self.on_check()
        if self.step in self.on_step:
            self.on_step[self.step]()
        timers, me = self._timers, self.current
        while True:
            while timers and timers[0][0] <= self.now:
                heapq.heappop(timers)[2]()
            now = self.now
            if me.wake_at <= now and random_() < self.stickiness and me in self.actors:
                return me
            ready = [a for a in self.actors if a.wake_at <= now and a.process.resume_at <= now]
            if ready:
                return ready[int(random_() * len(ready))]
            self.now = min(max(a.wake_at, a.process.resume_at) for a in self.actors)
            if timers:
                self.now = min(self.now, timers[0][0])
            if self.now == FOREVER:
                self.fail("rule 8: everybody waits for ever")
