"""Opens sessions for threads of the node's own process, such as those of streams.

The event loop alone changes the core (rule 2); a thread hands it an event and waits.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import overload

from kvstore.core.answers import Answer, ColdBlock, Counters, PutAnswer
from kvstore.core.events import (
    Clear,
    Coldest,
    Commit,
    Event,
    Reply,
    Request,
    Reserve,
    SessionDead,
    Stat,
)
from kvstore.errors import DeadlineError, NodeUnavailableError, PeerError
from kvstore.limits import TOLD_MAX
from kvstore.node.control.liveness import ClientSession, Sessions
from kvstore.types import PutResult

TakeBack = Callable[[Answer], Request]
"""Makes, of an answer that nobody waits for any more, the event that undoes it."""


class LocalSessions:
    """Opens sessions, and hands events to the event loop. Thread-safe."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sessions: Sessions, act: Callable[[Event], None]
    ) -> None:
        self._loop = loop
        self._sessions = sessions
        self._act = act
        self._room = threading.BoundedSemaphore(TOLD_MAX)

    def open(self) -> LocalSession:
        return LocalSession(self)

    def tell(self, event: Event) -> None:
        """Hand over an event that is only a hint: it is passed over while `TOLD_MAX` of them wait.

        Raises `NodeUnavailableError` when the node has ended.
        """
        if self._room.acquire(blocking=False):
            self.call(lambda: self._hear(event))

    def _hear(self, event: Event) -> None:
        self._room.release()
        self._act(event)

    def call(self, what: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError as e:
            raise NodeUnavailableError("the node has ended") from e

    def enter(self, speaker: LocalSession) -> ClientSession:
        return self._sessions.enter_inside(speaker)

    def leave(self, session: ClientSession) -> None:
        self._act(SessionDead(session.number))
        self._sessions.leave_inside(session)

    def act(self, event: Event) -> None:
        self._act(event)


class LocalSession:
    """One thread's session; what it holds is given back by `close`.

    The thread closes it only once it has stopped writing (rule 5).
    """

    def __init__(self, inside: LocalSessions) -> None:
        self._inside = inside
        self._requests = itertools.count(1)
        self._answers: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._late: dict[int, TakeBack | None] = {}
        """Requests whose answers nobody waits for any more, but which are still to come."""
        self._one_way: set[int] = set()
        """Requests whose answers nobody ever waited for."""
        self._session: ClientSession | None = None

    @property
    def busy(self) -> bool:
        """Return whether an answer is late: then so would be that to anything else."""
        return bool(self._late)

    @overload
    def ask(
        self, what: Reserve, deadline: float, take_back: TakeBack | None = None
    ) -> list[PutAnswer]: ...
    @overload
    def ask(
        self, what: Commit, deadline: float, take_back: TakeBack | None = None
    ) -> list[PutResult]: ...
    @overload
    def ask(
        self, what: Coldest, deadline: float, take_back: TakeBack | None = None
    ) -> list[ColdBlock]: ...
    @overload
    def ask(self, what: Clear, deadline: float, take_back: TakeBack | None = None) -> int: ...
    @overload
    def ask(self, what: Stat, deadline: float, take_back: TakeBack | None = None) -> Counters: ...
    @overload
    def ask(self, what: Request, deadline: float, take_back: TakeBack | None = None) -> Answer: ...
    def ask(self, what: Request, deadline: float, take_back: TakeBack | None = None) -> Answer:
        """Return the core's answer; session and number of the request are filled in.

        Raises `NodeUnavailableError` when the node has ended, and `DeadlineError` when no answer
        has come by `deadline` (seconds of `time.monotonic`): what was asked is carried out all the
        same.

        What it then grants to nobody is given back by `take_back` as soon as it is known (rule 5:
        who was told of no slot writes to none); without it, by `close`.
        """
        request = next(self._requests)
        self._inside.call(lambda: self._post(what, request))
        answer: Reply | None = None
        try:
            while answer is None or answer.request != request:
                answer = self._answers.get(timeout=max(deadline - time.monotonic(), 0.001))
        except BaseException as e:
            # An interrupt too: its answer must never be taken for the next one's.
            self._give_up(request, take_back)
            if isinstance(e, queue.Empty):
                raise DeadlineError("timed out: the node did not answer") from e
            raise
        if isinstance(answer.body, PeerError):
            raise answer.body
        return answer.body

    def _give_up(self, request: int, take_back: TakeBack | None) -> None:
        with self._lock:
            if self._answers.empty():
                self._late[request] = take_back
                return
            body = self._answers.get().body  # the one that has come after all
        if take_back is not None:
            self.tell(take_back(body))

    def tell(self, what: Request) -> None:
        """Have `what` carried out, after all that was asked before; its answer is dropped.

        Raises `NodeUnavailableError` when the node has ended.
        """
        request = next(self._requests)
        with self._lock:
            self._one_way.add(request)
        self._inside.call(lambda: self._post(what, request))

    def hint(self, event: Event) -> None:
        """Hand over what has no answer (`LocalSessions.tell`)."""
        self._inside.tell(event)

    def _post(self, what: Request, request: int) -> None:
        if self._session is None:
            self._session = self._inside.enter(self)
        self._inside.act(what._replace(session=self._session.number, request=request))

    def send(self, reply: Reply) -> None:
        """Take what the core answers; called by the event loop."""
        with self._lock:
            if reply.request in self._one_way:
                self._one_way.remove(reply.request)
                return
            if reply.request not in self._late:
                self._answers.put(reply)
                return
            take_back = self._late.pop(reply.request)
        if take_back is not None:
            self.tell(take_back(reply.body))

    def hang_up(self) -> None:
        """Do nothing: the stream server ends its connections itself."""

    def close(self) -> None:
        self._inside.call(self._leave)

    def _leave(self) -> None:
        if self._session is not None:
            self._inside.leave(self._session)
            self._session = None
