"""Sends requests to a node of this host over one socket, each with a deadline.

Several may be on their way at once, so that the node works while a client copies.
Whoever waits reads the answers of all.

In one file because connecting, sending and reading are done by each caller for all the others,
under one lock.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, TypeAlias

import msgpack

from kvstore.circuit_breaker import Breaker, BreakerState
from kvstore.client.nodes import deadlines
from kvstore.client.nodes.lease import Lease, fresh_id
from kvstore.errors import (
    DeadlineError,
    InternalError,
    NodeUnavailableError,
    PeerError,
    UsageError,
)
from kvstore.machine import REAL, Machine
from kvstore.nodedir import NodeDir
from kvstore.protocol import control
from kvstore.protocol.control import PROTOCOL_VERSION, Op
from kvstore.protocol.control_replies import InvalidReplyError
from kvstore.protocol.unpacking import OTHERS_ANSWER_BYTES_MAX, ShortMessages
from kvstore.system.fork import in_each_child

GOODBYE_TIMEOUT_S = 1.0
SAY_CONNECT_TIMEOUT_S = 0.05
QUEUE_POLL_S = 0.002
"""Between two tries to get a place in a full queue of connections."""
RECV_BYTES = 1 << 16
FAILURES_TO_OPEN = 1
"""One unanswered request costs a whole deadline: the next ones must not."""
REOPEN_AFTER_S = 1.0
CATCH_UP_TRIES = 5
"""How often in a row an idle client says what it holds to a node that does not answer, before it
does so more and more seldom: each time is a connection in the node's queue."""
PROBE_TIMEOUT_S = 0.1
"""For the HELLO that asks whether a node answers again: it waits for nothing else there, so a
caller need not pay another whole deadline for a node that is stopped.

Also what a node of this host must be given at least, or its caller was hurried: one that runs
answers in microseconds. It is no share of the deadline, as for nodes of other hosts
(`HURRIED_SHARE`), which count hurried callers too: here one request opens the breaker, and a
caller with half a second each time would wait for a stopped node each time."""
FIRST_ANSWER_TIMEOUT_S = 5.0
"""For the first HELLO of a client, where only this node is asked: clients often start together, on
a machine that is busy with starting them."""
READ_ON_S = 0.1
"""For what has come already when a caller is late itself; a node that sends without end, and not
what was asked for, gets no more of a caller's time."""

Held = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int, int]]]
"""(slot, generation) reserved and (slot, generation, times) pinned by this client right now."""


Answer: TypeAlias = Any
"""What came of a request: a node's answer, as its `Accept` has read it."""
Accept = Callable[[Any], Answer]
"""Reads the body of an answer. Raises `InvalidReplyError`."""


def as_it_is(body: object) -> Answer:
    return body


class Ticket:
    """A request on its way, and its answer once that has come."""

    __slots__ = ("accept", "answer", "done", "error", "give_up_at", "hurried")

    def __init__(self, give_up_at: float, accept: Accept) -> None:
        self.give_up_at = give_up_at
        self.hurried = False
        """Its caller has less time than a node is given: that it came too late tells nothing of
        the node."""
        self.accept = accept
        self.answer: Answer = None
        self.error: Exception | None = None
        self.done = False

    def end(self, answer: Answer, error: Exception | None) -> None:
        self.answer, self.error = answer, error
        self.done = True


class ControlChannel:
    """The connection to one node: made when it is needed, and again after a failure, when it says
    what it still holds.

    Thread-safe. Raises `NodeUnavailableError` when the node is not there,
    `DeadlineError` when it does not answer, `UsageError` when it refuses.
    """

    def __init__(
        self,
        directory: NodeDir,
        node: tuple[int, int],
        timeout_s: float,
        held: Callable[[], Held],
        *,
        machine: Machine = REAL,
    ) -> None:
        """`node` is the (node id, epoch) to talk to: a restarted node is another one."""
        self.directory = directory
        self._machine = machine
        self._now = machine.monotonic
        self._node = list(node)
        self._timeout_s = timeout_s
        self._held = held
        # It knows whose it is, so that a handler of signals can raise or close at any moment.
        self._lock = self._machine.lock()
        self._lease: Lease | None = None
        self._client_id = ""
        self._socket: socket.socket | None = None
        self._unpacker: Any = control.unpacker()
        self._numbers = count(1)
        self._pid = os.getpid()
        self._closed = False
        self._retired = False
        self._awaited: dict[int, Ticket] = {}
        self._out_of_step = False
        """Somebody gave up, or the connection was broken, and the node may believe that this client
        holds more than it does: connect again."""
        self._breaker, self._saying = (
            Breaker(failures_max=FAILURES_TO_OPEN, retry_after_s=REOPEN_AFTER_S) for _ in range(2)
        )
        """Of requests, and of what is said in passing: a node that has no processor for a moment
        is late for that, and no reason to reject a put."""
        self._catching_up = Breaker(failures_max=CATCH_UP_TRIES, retry_after_s=REOPEN_AFTER_S)
        self._last_failure = ""
        self._is_new = True
        """No request has been sent, or has failed, yet."""
        in_each_child(self)

    @property
    def silent(self) -> bool:
        """Return whether the node did not answer lately, and is not to be asked yet."""
        breaker = self._breaker
        return breaker.state is not BreakerState.CLOSED and self._now() < breaker.probe_at

    def request(
        self,
        op: Op,
        *args: object,
        accept: Accept = as_it_is,
        before: Callable[[], object] | None = None,
    ) -> Answer:
        """Return the node's answer, as `accept` makes it."""
        return self.collect(self.post(op, *args, accept=accept, before=before))

    def post(
        self,
        op: Op,
        *args: object,
        accept: Accept = as_it_is,
        before: Callable[[], object] | None = None,
    ) -> Ticket:
        """Send a request; `collect` gets its answer, in any order.

        `accept` is called before anyone can connect again: what it notes down as
        held is part of what the next connection says is held (rule 5). `before` is called once
        a connection stands, right before the request: what it takes off what is held was
        part of what that connection said. It is not called when none can be had.
        """
        # Most calls have none, and this is on the path of each.
        bounds = deadlines.in_force() if deadlines.bounds.entries else deadlines.NO_BOUNDS
        timeout_s = min(self._timeout_s, bounds.each_s)
        give_up_at = min(self._now() + timeout_s, bounds.give_up_at)
        least_s = min(timeout_s, PROBE_TIMEOUT_S)
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as `threading.Condition` does
            raise self._busy()  # in a handler of signals: half of a message may be on its way
        try:
            self._acquire(give_up_at)
            now = self._now()
            hurried = give_up_at - now < least_s
            breaker = self._breaker
            if breaker.state is not BreakerState.CLOSED and not breaker.allows(now):
                why = f": {self._last_failure}" if self._last_failure else ""
                raise NodeUnavailableError(f"node {self.directory.name} did not answer lately{why}")
            probes = breaker.state is BreakerState.HALF_OPEN
            try:
                by = min(give_up_at, now + PROBE_TIMEOUT_S) if probes else give_up_at
                if self._is_new:
                    by = max(by, now + FIRST_ANSWER_TIMEOUT_S)
                self._connect(min(by, bounds.give_up_at, bounds.connected_by))
                if self._is_new:  # the node answers: the request has its own time
                    self._is_new = False
                    give_up_at = min(self._now() + timeout_s, bounds.give_up_at)
                if before is not None:
                    before()
                hurried = give_up_at - self._now() < least_s
                ticket = self._send([op, next(self._numbers), *args], give_up_at, accept)
                ticket.hurried = hurried
                return ticket
            except (DeadlineError, NodeUnavailableError) as e:
                self._failed(e, hurried)
                raise
            except BaseException:  # interrupted: half of the message may be on its way
                self._disconnect()
                raise
        finally:
            try:  # noqa: SIM105  # nothing is called before: a signal could end it there
                self._lock.release()
            except RuntimeError:  # it was never got
                pass

    def collect(self, ticket: Ticket) -> Answer:
        """Return the answer to a posted request, within the deadline that began when it was
        posted."""
        if not ticket.done:
            if self._lock._is_owned():  # type: ignore[attr-defined]  # as in `post`
                raise self._busy()
            try:
                self._acquire(ticket.give_up_at)
                try:
                    self._receive(ticket)
                    answered = ticket.error is None or isinstance(ticket.error, InternalError)
                    if answered and (
                        self._breaker.failures or self._breaker.state is not BreakerState.CLOSED
                    ):
                        self._breaker.succeeded()
                except (DeadlineError, NodeUnavailableError) as e:
                    self._failed(e, ticket.hurried)
                    raise
                except BaseException:  # interrupted: nobody would hold what the answer grants
                    self._disconnect()
                    raise
            finally:
                try:  # noqa: SIM105  # as in `post`
                    self._lock.release()
                except RuntimeError:
                    pass
        if ticket.error is not None:
            raise ticket.error
        return ticket.answer

    def _acquire(self, give_up_at: float) -> None:
        """What raises in here may have the lock or not: give it back where it is this thread's."""
        try:
            if self._lock.acquire(blocking=False):
                return
            if self._lock.acquire(timeout=max(give_up_at - self._now(), 0.0)):
                return
        except BaseException:
            self._out_of_step = True
            raise
        raise self._busy()

    def _busy(self) -> DeadlineError:
        # The answer to what was sent may still come and grant what nobody then
        # holds, and what was not sent may be to give something back.
        self._out_of_step = True
        return DeadlineError(f"node {self.directory.name}: busy with this client's other requests")

    def _failed(self, error: Exception, hurried: bool) -> None:
        self._is_new = False
        self._disconnect()
        closed = self._breaker.state is BreakerState.CLOSED
        if hurried and closed and isinstance(error, DeadlineError):
            return
        self._last_failure = str(error)
        self._breaker.failed(self._now())

    def say(self, op: Op, *args: object) -> bool:
        """One way: False when it could not be said now. Waits at most `SAY_CONNECT_TIMEOUT_S`,
        and that only when it is the first to connect."""
        return self.say_each(op, (args,))

    def say_each(self, op: Op, each: Iterable[Sequence[object]]) -> bool:
        """`say`, for the arguments of several messages at once: all of them are said, or none."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as in `post`
            return False
        try:
            if not self._lock.acquire(blocking=False):
                return False
            if self._awaited or not self._connect_to_say():
                return False
            if self._socket is None:  # as in `_send`
                return False
            message = b"".join(control.packed([op, 0, *args]) for args in each)
            try:
                self._socket.settimeout(0.0)
                # A partial write would break the framing for good.
                if self._socket.send(message) != len(message):
                    self._disconnect()
                    return False
            except BlockingIOError:
                return False
            except OSError:
                self._disconnect()
                return False
            except BaseException:  # interrupted: a part of it may have gone
                self._disconnect()
                raise
            return True
        finally:
            try:  # noqa: SIM105  # as in `post`
                self._lock.release()
            except RuntimeError:
                pass

    def _connect_to_say(self) -> bool:
        now = self._now()
        if self._pid != os.getpid():
            return False  # the connection is the parent's, which may be in the middle of a message
        if self._socket is not None:
            return True
        if self._closed or self._retired or not self._saying.allows(now):
            return False
        if not self._breaker.allows(now):
            return False
        try:
            self._connect(now + SAY_CONNECT_TIMEOUT_S)
        except PeerError:
            self._disconnect()
            self._saying.failed(self._now())
            if self._breaker.state is not BreakerState.CLOSED:
                self._breaker.failed(self._now())
            return False
        except BaseException:  # interrupted: the node refuses all that comes before HELLO
            self._disconnect()
            raise
        self._saying.succeeded()
        self._breaker.succeeded()
        return True

    def doubt(self) -> None:
        """Say anew what is held before the next request: the answer to one that was given up may
        grant what nobody then holds."""
        self._out_of_step = True

    def catch_up(self) -> None:
        """Say anew what is held if the node may believe that it is more, as far as nobody has to
        wait for it: for a client that asks nothing. Never raises for a peer's fault."""
        if not self._out_of_step or self._breaker.state is not BreakerState.CLOSED:
            return  # a node that is silent is asked by who needs it
        if self._closed or self._retired or self._pid != os.getpid():
            return
        if not self._catching_up.allows(self._now()):
            return
        if self._lock._is_owned() or not self._lock.acquire(blocking=False):  # type: ignore[attr-defined]  # as in `post`
            return
        try:
            self._connect(self._now() + SAY_CONNECT_TIMEOUT_S)
            self._catching_up.succeeded()
        except PeerError:
            self._disconnect()
            self._catching_up.failed(self._now())
        finally:
            self._lock.release()

    def restate(self) -> None:
        """Say anew what is held: the node takes back the rest. Never raises for a peer's fault;
        the next connection says it then."""
        if self._pid == os.getpid():
            self._out_of_step = True
            with contextlib.suppress(PeerError):
                self.request(Op.STAT)

    def retire(self) -> None:
        """The node is gone for good: no further answer is taken. The lease stays until `close`."""
        with self._lock:
            self._retired = True
            self._disconnect()

    def close(self) -> None:
        """Say goodbye: the node takes back whatever this client held. In a forked child it does
        nothing: the parent may still write, and its lease says so (rule 5)."""
        if self._pid != os.getpid():
            return  # twice as sure: there the socket and the lease's file are closed already
        with self._lock:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.settimeout(GOODBYE_TIMEOUT_S)
                    self._socket.sendall(control.packed([Op.BYE, 0]))
            self._disconnect()
            if self._lease is not None:
                self._lease.release()

    def after_fork_in_child(self) -> None:
        self._lock = self._machine.lock()  # a thread of the parent may have had it
        if self._socket is not None:
            self._socket.close()  # else the node does not hear of the parent's end

    def _connect(self, give_up_at: float) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                "client", self._pid, "was made before a fork: make one in each process"
            )
        if self._retired:
            raise NodeUnavailableError(f"node {self.directory.name} is gone")
        if self._closed:
            # By its user, or by another thread that found the node gone.
            raise NodeUnavailableError(f"node {self.directory.name}: this channel is closed")
        if self._out_of_step:
            self._disconnect()
        if self._socket is not None:
            return
        if not self._client_id:
            # Of another user's node nothing can be held.
            if self.directory.is_ours():
                self._lease = Lease(self.directory.leases, self._machine)
            self._client_id = self._lease.client_id if self._lease else fresh_id(self._machine)
        connection = self._machine.unix_socket()
        try:
            self._dial(connection, give_up_at)
        except OSError as e:
            connection.close()
            raise NodeUnavailableError(f"node {self.directory.name}: {e}") from e
        self._socket = connection
        self._out_of_step = False  # first: who doubts from here on is not in what is said
        reserved, pinned = self._held()
        hello = [Op.HELLO, next(self._numbers), PROTOCOL_VERSION, self._client_id]
        ticket = self._send([*hello, list(reserved), list(pinned)], give_up_at, as_it_is)
        self._receive(ticket)
        if isinstance(ticket.error, UsageError):
            raise NodeUnavailableError(f"node {self.directory.name}: {ticket.error}")
        if ticket.answer != self._node:
            raise NodeUnavailableError(f"node {self.directory.name} was started anew")

    def _dial(self, connection: socket.socket, give_up_at: float) -> None:
        """Wait for a place in the node's queue of connections: a Unix socket whose queue is full
        refuses at once, and many engines may start together."""
        while True:
            connection.settimeout(max(give_up_at - self._now(), 0.001))
            try:
                connection.connect(str(self.directory.socket))
            except BlockingIOError:
                if self._now() >= give_up_at:
                    raise
                self._machine.sleep(QUEUE_POLL_S)
            else:
                break
        owner = self.directory.owner()
        if self._machine.peer_uid(connection) != owner:
            # Its owner can link the socket's name to another socket of this user's.
            raise PermissionError(f"{self.directory.socket} is not of user {owner}")
        ours = owner == os.geteuid()
        self._unpacker = control.unpacker() if ours else ShortMessages(OTHERS_ANSWER_BYTES_MAX)

    def _disconnect(self) -> None:
        """Whoever still waits for an answer will not get it."""
        if self._socket is not None:
            self._out_of_step = True
            self._socket.close()
            self._socket = None
        awaited, self._awaited = self._awaited, {}
        for ticket in awaited.values():
            ticket.end(None, NodeUnavailableError(f"node {self.directory.name}: connection lost"))

    def _send(self, message: list[Any], give_up_at: float, accept: Accept) -> Ticket:
        connection = self._socket
        if connection is None:  # a handler of signals has just closed it
            raise NodeUnavailableError(f"node {self.directory.name}: this channel is closed")
        ticket = Ticket(give_up_at, accept)
        self._awaited[message[1]] = ticket  # first: whoever disconnects ends it
        try:
            connection.settimeout(max(give_up_at - self._now(), 0.001))
            connection.sendall(control.packed(message))
        except TimeoutError as e:
            raise self._too_late() from e
        except OSError as e:
            raise NodeUnavailableError(f"node {self.directory.name}: {e}") from e
        return ticket

    def _receive(self, ticket: Ticket) -> None:
        """Read answers, whosoever they are, until that of `ticket` is there."""
        connection = self._socket
        read_until = self._now() + READ_ON_S
        try:
            while not ticket.done:
                if connection is None:  # a handler of signals interrupted who ended the others
                    raise NodeUnavailableError(f"node {self.directory.name}: connection lost")
                connection.settimeout(max(ticket.give_up_at - self._now(), 0.001))
                if self._now() > max(ticket.give_up_at, read_until):
                    raise TimeoutError
                data = connection.recv(RECV_BYTES)
                if not data:
                    raise NodeUnavailableError(f"node {self.directory.name} closed the connection")
                for number, good, body in self._messages(data):
                    self._accept(number, good, body)
        except TimeoutError as e:
            raise self._too_late() from e
        except OSError as e:
            raise NodeUnavailableError(f"node {self.directory.name}: {e}") from e
        except InvalidReplyError as e:
            raise self._invalid_reply(e) from e

    def _messages(self, data: bytes) -> list[tuple[int, object, object]]:
        """Return the answers that are whole with `data`. Raises `InvalidReplyError`."""
        try:
            self._unpacker.feed(data)
            found = list(self._unpacker)
        except (msgpack.UnpackException, ValueError, TypeError, RecursionError) as e:
            raise InvalidReplyError(str(e)) from e
        if not all(type(one) is list and len(one) == 3 and type(one[0]) is int for one in found):
            raise InvalidReplyError("expected a list of answers")
        return [(number, good, body) for number, good, body in found]

    def _accept(self, number: int, good: object, body: object) -> None:
        ticket = self._awaited.get(number)
        if ticket is None:
            return
        try:
            if good is True:
                ticket.answer, ticket.error = ticket.accept(body), None
            elif good is None:  # it did what it could
                ticket.error = PeerError(str(body))
            else:
                ticket.error = UsageError("request", "refused", str(body))
            ticket.done = True
        except InvalidReplyError as e:  # raised for the one who reads; the ticket may be another's
            ticket.end(None, self._invalid_reply(e))
            raise
        except Exception as e:  # our bug, not the node's: of the ticket, not of who reads
            self._out_of_step = True  # what the answer granted may be held by nobody
            bug = InternalError(f"an answer of node {self.directory.name}: {e!r}")
            bug.__cause__ = e
            ticket.end(None, bug)
        # Only now: whoever interrupts this disconnects, and that ends what is awaited.
        self._awaited.pop(number, None)

    def _invalid_reply(self, error: Exception) -> NodeUnavailableError:
        return NodeUnavailableError(f"node {self.directory.name} sent an invalid answer: {error}")

    def _too_late(self) -> DeadlineError:
        return DeadlineError(f"node {self.directory.name} did not answer in time")
