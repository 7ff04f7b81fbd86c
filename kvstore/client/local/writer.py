"""Saves to one node of this host: reserve, copy, commit; pins and deletions go the same way.

In one file because what a client holds (`Holdings`) must change under the same lock as
the requests that change it (rule 5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from typing import TypeVar, cast

import xxhash

from kvstore.batches import in_batches, picked
from kvstore.client.base import Later, Reservation, ReserveAnswer
from kvstore.client.local.control import Accept, Answer, ControlChannel, Ticket, as_it_is
from kvstore.client.local.link import Grants, Holdings, NodeLink
from kvstore.client.local.nodes import LocalNodes
from kvstore.client.pins import Handle, HeldPin, Pin, PinRef, Pins
from kvstore.core.answers import BlockRow, Counters
from kvstore.errors import IndexUnavailableError, NodeUnavailableError, PeerError, UsageError
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.nodedir import Announcement, NodeDir
from kvstore.protocol.control import Op, join_keys
from kvstore.protocol.control_replies import (
    InvalidReplyError,
    block_rows,
    counters,
    flags,
    grants,
    outcomes,
    pins,
    reset_number,
    retained,
    whole,
)
from kvstore.protocol.control_requests import Wants, reserve_arguments
from kvstore.record import has_checksum
from kvstore.system.fork import in_each_child
from kvstore.types import EXISTS, Key, PutResult, Retained

NODE_SEARCH_S = 0.5
"""After a search that found no node, how long none is believed to be there."""
T = TypeVar("T")


class Writer:
    """Saves to one node of this host, which it finds when it is first needed, and again when it is
    gone. Thread-safe.

    Implements `kvstore.client.base.Saver`.
    """

    def __init__(
        self,
        nodes: LocalNodes,
        *,
        name: str | None,
        timeout_s: float,
        checksums: bool,
        introductions: dict[int, bytes] | None = None,
    ) -> None:
        """`introductions`, where they are shared, are `self.introductions`."""
        self._nodes = nodes
        self._machine = nodes.machine
        self._now = self._machine.monotonic
        self.introductions: dict[int, bytes] = {} if introductions is None else introductions
        """Fields of the namespaces that this client saves to, by id."""
        self._name = name
        self._timeout_s = timeout_s
        self._checksums = checksums
        # A handler of signals may close the client at any moment.
        self._lock = self._machine.lock()
        in_each_child(self)
        self.linked: NodeLink | None = None
        """The link, if there is one: nothing is looked for."""
        self._search_at = 0.0
        self._closed = False
        self._former: list[NodeLink] = []
        """Of nodes that are gone, while something of theirs is still in somebody's hands: the
        next start may use the same memory, and the lease keeps it off those slots."""
        self.pins = Pins(self._unpin, self._held, self._machine, tidy=self.tidy)
        self._kept: dict[Pin, list[HeldPin]] = {}
        """Pins that last until `unpin_many`, by what the caller has of each."""

    # --- the link ---------------------------------------------------------

    def link(self) -> NodeLink:
        """Return the link to the node. Raises `NodeUnavailableError` when none of this index runs
        here."""
        link = self.linked
        if link is not None:
            return link
        with self._lock:
            if self._closed:
                raise NodeUnavailableError("this client is closed")
            if self.linked is None:
                self.linked = self._find()
            return self._unless_closed()

    def join(self, announcement: Announcement, directory: NodeDir) -> NodeLink:
        """`link` to this start of the node; one to a former start of it is let go."""
        link = self.linked
        if link is not None and not _is_start(link, announcement):
            self._drop(link)
        with self._lock:
            if self._closed:
                raise NodeUnavailableError("this client is closed")
            if self.linked is None:
                self.linked = self._joined(announcement, directory)
            return self._unless_closed()

    def _unless_closed(self) -> NodeLink:
        """Return the link that was just made; a handler of signals may have closed this
        meanwhile."""
        link = self.linked
        if self._closed and link is not None:
            self.linked = None
            link.control.close()
        if self._closed or link is None:
            raise NodeUnavailableError("this client is closed")
        return link

    def _find(self) -> NodeLink:
        now = self._now()
        if now < self._search_at:
            raise NodeUnavailableError(nobody_here(self._name))
        try:
            found = self._nodes.writable(self._name)
        except IndexUnavailableError as e:
            self._search_at = now + NODE_SEARCH_S
            raise NodeUnavailableError(f"no memory node: the index cannot be asked ({e})") from e
        if found is None:
            self._search_at = now + NODE_SEARCH_S
            raise NodeUnavailableError(nobody_here(self._name))
        return self._joined(*found)

    def _joined(self, announcement: Announcement, directory: NodeDir) -> NodeLink:
        self._nodes.mapping()
        held = Holdings()
        control = ControlChannel(
            directory,
            (announcement.node_id, announcement.epoch),
            self._timeout_s,
            held.said,
            machine=self._machine,
        )
        try:
            link = NodeLink(announcement, control, held, machine=self._machine)
        except (OSError, ValueError) as e:
            raise NodeUnavailableError(f"segment of node {announcement.name}: {e}") from e
        # Known to be a node of this index: its blocks can be read without asking the index.
        self._nodes.segment(announcement.node_id, announcement.epoch, self._now())
        return link

    def _ask(self, op: Op, *args: object, accept: Callable[[NodeLink, object], T]) -> T:
        """Ask the node; once more, or another one, when it is gone or the request was not sent."""
        for last in (False, True):
            link, ticket = self.link(), None
            try:
                ticket = link.control.post(op, *args, accept=partial(accept, link))
                answer: T = link.control.collect(ticket)
                return answer
            except NodeUnavailableError:
                self._drop(link)
                if last or (ticket is not None and self.linked is link):
                    raise
            finally:
                if ticket is None or not ticket.done:
                    link.control.doubt()
        raise AssertionError("unreachable")

    def _drop(self, link: NodeLink) -> None:
        """The node is gone; what this client holds there can be neither sealed nor read anew."""
        with self._lock:
            if self.linked is not link or link.control.directory.lives_as(link.announcement):
                return
            self.linked = None
            self._former.append(link)
        link.retire()
        self._settle()

    def let_go(self) -> None:
        """Unmap the node if it died; whoever only saves finds out at the next save otherwise."""
        link = self.linked
        if link is not None:
            self._drop(link)

    def _held(self) -> list[Collection[object]]:
        holdings = [link.held for link in self.links()]
        return [*[held.pins for held in holdings], *[held.reserved for held in holdings]]

    def _settle(self) -> None:
        """Let the leases of former nodes go when nothing of theirs is in use any more."""
        if not self._former:
            return
        with self._lock:
            over = self._closed
            done = [link for link in self._former if (link.retired or over) and not link.held]
            self._former = [link for link in self._former if link not in done]
        for link in done:
            link.control.close()

    # --- saving -----------------------------------------------------------

    def _register_namespace(self, namespace_id: int) -> None:
        """Tell the node once what the id stands for. After a request: then the channel is open,
        and a node that is slow costs this nothing."""
        link = self.linked
        if link is None or namespace_id in link.introduced:
            return
        raw = self.introductions.get(namespace_id)
        if raw is None or link.control.say(Op.NAMESPACE, namespace_id, raw):
            link.introduced.add(namespace_id)

    def reserve_later(
        self, wants: Wants, namespace_id: int, granted: Grants, *, replaces: bool | None = None
    ) -> Later[ReserveAnswer]:
        """Ask for a slot for each of `wants`, or what becomes of it: sent now, answered when
        called. What is granted is `granted`'s, also when nobody calls. What one request cannot
        carry is asked and answered at once. It `replaces` what has no checksum: by default where
        this client writes them."""
        replaces = self._checksums if replaces is None else replaces
        if len(wants.keys) > BATCH_KEYS_MAX:
            answers: list[ReserveAnswer] = []
            for batch in in_batches(range(len(wants)), BATCH_KEYS_MAX):
                answers += self.reserve_later(wants.of(batch), namespace_id, granted)()
            return lambda: answers
        link = self.link()
        if link.held.lost:
            self.tidy()
        arguments = reserve_arguments(wants, namespace_id, checksums=self._checksums)
        accept = partial(self._granted, granted, wants, link)
        granted.asked.append(link.control)
        ticket = self._post(link, Op.RESERVE, *arguments, accept=accept)
        return partial(self._reserved, granted, link, ticket, wants, namespace_id, replaces)

    def _reserved(
        self,
        granted: Grants,
        link: NodeLink,
        ticket: Ticket,
        wants: Wants,
        namespace_id: int,
        replaces: bool,
    ) -> list[ReserveAnswer]:
        try:
            answers: list[ReserveAnswer] = self._collect(link, ticket)
        finally:
            if ticket.done:
                granted.asked.remove(link.control)
        if namespace_id not in link.introduced:
            self._register_namespace(namespace_id)
        if replaces and EXISTS in answers:
            self._replace(answers, link, wants, namespace_id, granted)
        return answers

    def _replace(
        self,
        answers: list[ReserveAnswer],
        link: NodeLink,
        wants: Wants,
        namespace_id: int,
        granted: Grants,
    ) -> None:
        """Reserve anew what exists without a checksum: who verifies does not read it."""
        keys = wants.keys
        rest = [i for i, a in enumerate(answers) if a == EXISTS and not link.has_checksum(keys[i])]
        pinned = self.pin_many(picked(keys, rest), granted)
        there = [(i, pin) for i, pin in zip(rest, pinned, strict=True) if pin]
        self.pins.end([pin for _, pin in there])
        which = [i for i, pin in there if not has_checksum(pin.record)]
        if which:
            self.drop(picked(wants.keys, which))
            wanted = wants.of(which)
            again = self.reserve_later(wanted, namespace_id, granted, replaces=False)()
            for i, answer in zip(which, again, strict=True):
                answers[i] = answer

    def _post(
        self,
        link: NodeLink,
        op: Op,
        *args: object,
        accept: Accept,
        before: Callable[[], object] | None = None,
    ) -> Ticket:
        try:
            return link.control.post(op, *args, accept=accept, before=before)
        except NodeUnavailableError:
            self._drop(link)
            raise

    def _granted(
        self, granted: Grants, wants: Wants, link: NodeLink, raw: object
    ) -> list[ReserveAnswer]:
        """Return what the node's answer means; from here on the slots count as held."""
        node_id, epoch = link.announcement.node_id, link.announcement.epoch
        if link.shm is None:
            raise InvalidReplyError("an answer of a node that is gone")
        told = grants(len(wants), raw)
        answers = cast("list[ReserveAnswer]", list(told))  # once the grants among them are replaced
        which = [i for i, answer in enumerate(told) if type(answer) is list]
        if not which:
            return answers
        rows = cast("Sequence[list[int]]", picked(told, which))
        found = link.buffers(rows, picked(wants.each_size(), which))
        if found is None:
            raise InvalidReplyError("a slot outside the segment, whose file may have been cut")
        buffers, owner = found
        handles = [(slot, generation) for slot, generation, _ in rows]
        keys = picked(wants.keys, which)
        for i, key, buffer, (slot, generation) in zip(which, keys, buffers, handles, strict=True):
            answers[i] = Reservation(key, buffer, self, node_id, epoch, slot, generation)
        granted.note(partial(self._give_back, link, handles))
        link.held.reserve(handles, owner)
        if granted.over:
            link.held.release(handles)
        return answers

    def _collect(self, link: NodeLink, ticket: Ticket) -> Answer:
        try:
            return link.control.collect(ticket)
        except NodeUnavailableError:
            self._drop(link)
            raise

    def commit_later(self, reservations: Sequence[Reservation]) -> Later[PutResult]:
        """See `Saver.commit_later`. What one request cannot carry is asked and answered at once.
        Who calls this aborts what it leaves reserved when it raises."""
        if len(reservations) > BATCH_KEYS_MAX:
            results: list[PutResult] = []
            for batch in in_batches(reservations, BATCH_KEYS_MAX):
                results += self.commit_later(batch)()
            return lambda: results
        sums: Iterable[int] = repeat(0)
        if self._checksums:
            sums = [xxhash.xxh3_64_intdigest(r.buffer) for r in reservations]
        link = self.link()
        handles = _of_node(link, reservations)
        if len(handles) < len(reservations):
            self.abort(reservations)  # those of this start, which nobody holds any more
            raise NodeUnavailableError("the node that reserved these slots is gone")
        items = [(slot, gen, checksum) for (slot, gen), checksum in zip(handles, sums)]  # noqa: B905
        ticket = self._end(
            link,
            Op.COMMIT,
            items,
            partial(link.held.release, handles),
            accept=partial(outcomes, len(items)),
        )
        return partial(self._collect, link, ticket)

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """Give slots back; what cannot be said now is said by the next reconnect."""
        for link in self.links():
            self._give_back(link, _of_node(link, reservations))
        self._settle()

    def _give_back(self, link: NodeLink, handles: Sequence[Handle]) -> None:
        """Give back those that are still reserved."""
        for batch in in_batches(link.held.still_reserved(handles), BATCH_KEYS_MAX):
            self._told(link, Op.ABORT, batch, partial(link.held.release, batch))

    def _told(
        self, link: NodeLink, op: Op, handles: Sequence[Handle], forget: Callable[[], object]
    ) -> None:
        """End what is held, here and at the node. Never raises for a peer's fault."""
        if link.retired:
            forget()
            return
        with suppress(PeerError):
            self._collect(link, self._end(link, op, handles, forget))

    def _end(
        self,
        link: NodeLink,
        op: Op,
        items: Sequence[object],
        forget: Callable[[], object],
        accept: Accept = as_it_is,
    ) -> Ticket:
        """Send what ends something that is held, and `forget` it, as one: a HELLO in between would
        not name it, and what was behind it take what somebody else has by then. It is forgotten
        when the node cannot be reached, too, and still held when a handler of signals raises
        before it is sent."""
        try:
            return self._post(link, op, items, accept=accept, before=forget)
        except PeerError:
            forget()
            link.control.doubt()
            raise

    def tidy(self) -> None:
        """Give back what nobody has any more, and say anew what is held where a connection was
        broken. Never raises for a peer's fault."""
        self.pins.settle()
        for link in self.links():
            for grant in list(link.held.lost):
                self._give_back(link, grant.handles)
                with suppress(ValueError):  # another thread was here
                    link.held.lost.remove(grant)
            link.control.catch_up()
        self._settle()

    def links(self) -> list[NodeLink]:
        """Return the link to the node, and those to its former starts while something there is in
        use."""
        link = self.linked
        return [*self._former, link] if link is not None else list(self._former)

    # --- pins, touches, deletions -------------------------------------------

    def pin(self, key: Key, granted: Grants) -> HeldPin | None:
        """Return the pin of a block, which now stays as long as anybody has that; None for a
        miss."""
        answers = self._pin([key], granted)
        answer = answers[0] if answers else None
        if isinstance(answer, str):
            raise UsageError("pin", key.hex(), answer)
        return answer

    def pin_many(self, keys: Sequence[Key], granted: Grants) -> list[HeldPin | None]:
        """`pin` for each of `keys`; None for those that cannot be pinned, too."""
        found: list[HeldPin | None] = []
        for batch in in_batches(keys, BATCH_KEYS_MAX):
            answers = self._pin(batch, granted)
            told = [a if isinstance(a, HeldPin) else None for a in answers]
            found += told + [None] * (len(batch) - len(told))
        return found

    def _pin(self, keys: Sequence[Key], granted: Grants) -> list[HeldPin | str | None]:
        return self._ask(Op.PIN, join_keys(keys), accept=partial(self._pinned, len(keys), granted))

    def _pinned(
        self, count: int, granted: Grants, link: NodeLink, raw: object
    ) -> list[HeldPin | str | None]:
        """Return the node's answers; from here on the pins among them count as held."""
        answers = [
            HeldPin(answer, self.pins) if isinstance(answer, bytes) else answer
            for answer in pins(raw)[:count]
        ]
        new = [answer for answer in answers if isinstance(answer, HeldPin)]
        refs = [pin.ref for pin in new]
        granted.note(partial(self.pins.end, new))
        link.held.pins.update(refs)
        if granted.over:
            link.held.pins.difference_update(refs)
        return answers

    def keep(self, pinned: Iterable[tuple[Key, HeldPin]]) -> None:
        """Keep these until `unpin_many`."""
        with self._lock:
            for key, pin in pinned:
                self._kept.setdefault((key, pin.record), []).append(pin)

    def unpin_many(self, pinned: Iterable[Pin]) -> None:
        """Let each of these pins go once, of those that were kept. When it cannot be said now, the
        next reconnect or goodbye says it."""
        with self._lock:
            for pin in pinned:
                kept = self._kept.get(pin, [])
                if kept:
                    kept.pop()
                if not kept:
                    self._kept.pop(pin, None)
        self.pins.settle()

    def _unpin(self, ended: Sequence[PinRef]) -> None:
        for link in self.links():
            held = link.held.pins
            for batch in in_batches([ref for ref in ended if ref in held], BATCH_KEYS_MAX):
                handles = [ref.handle for ref in batch]
                self._told(link, Op.UNPIN, handles, partial(held.difference_update, batch))
        self._settle()

    def retain(self, keys: Sequence[Key], ttl_s: int, tenant: int) -> list[Retained]:
        """Keep blocks from being evicted for `ttl_s`; what became of each."""
        answers: list[Retained] = []
        for batch in in_batches(keys, BATCH_KEYS_MAX):
            wish = join_keys(batch), ttl_s, tenant
            accept = partial(_retained, len(batch))
            answers += self._ask(Op.RETAIN, *wish, accept=accept)
        return answers

    def touch(self, runs: Sequence[Sequence[Key]]) -> None:
        """Say that blocks were used, in runs of at most `BATCH_KEYS_MAX`: one way, never waits."""
        try:
            link = self.link()
        except NodeUnavailableError:
            return
        said = [(join_keys(run),) for run in runs] or [(b"",)]  # so that it is connected
        if not link.control.say_each(Op.TOUCH, said):
            self._drop(link)  # if it is gone: the next one is told of the next touches

    def drop(self, keys: Sequence[Key]) -> list[bool]:
        """Drop the blocks of `keys`; which of them were there."""
        dropped: list[bool] = []
        for batch in in_batches(keys, BATCH_KEYS_MAX):
            dropped += self._ask(Op.DROP, join_keys(batch), accept=lambda _, body: flags(body))
        return dropped

    def clear(self, namespace_id: int) -> int:
        """Drop every block of a namespace; how many there were."""
        return self._ask(Op.CLEAR, namespace_id, accept=lambda _, body: whole(body))

    def reset(self, number: int, namespace_ids: Sequence[int]) -> int:
        """Tell the node of a reset of these namespaces; the number that it got."""
        told = number, list(namespace_ids)
        return self._ask(Op.RESET, *told, accept=lambda _, body: reset_number(body))

    def stats(self) -> Counters:
        """Return the node's counters (core/report.py)."""
        return self._ask(Op.STAT, accept=lambda _, body: counters(body))

    def listing(self, after: bytes, at_most: int) -> list[BlockRow]:
        """Return a page of at most `LIST_ROWS_MAX` (core/memory/listed.py)."""
        return self._ask(Op.LIST, after, at_most, accept=lambda _, body: block_rows(body))

    def after_fork_in_child(self) -> None:
        self._lock = self._machine.lock()  # a thread of the parent may have had it

    def close(self) -> None:
        """Give back everything but pins and reserved memory that somebody still has a view of:
        their nodes are told so, and the lease stays until the last of them has ended. Safe to call
        twice."""
        self.pins.settle()
        with self._lock:
            if self._closed:
                return
            self._kept.clear()
            links, self._closed = self.links(), True
            self.linked, self._former = None, [link for link in links if link.held.is_viewed]
            kept = list(self._former)
        for link in links:
            if link not in kept:
                link.control.close()
            elif not link.retired:
                link.linger()
        if kept:
            self.pins.watch()


def _retained(count: int, _link: NodeLink, raw: object) -> list[Retained]:
    return retained(count, raw)


def nobody_here(name: str | None) -> str:
    """Return why there is no link to the node called `name`, or to any."""
    if name:
        remedy = f"`kvstore node --name {name}` starts it, `kvstore stat` names those that live"
        return f"no memory node named {name!r} on this host: {remedy}"
    return "no memory node on this host: start one with `kvstore node`"


def _is_start(link: NodeLink, announcement: Announcement) -> bool:
    return (link.announcement.node_id, link.announcement.epoch) == (
        announcement.node_id,
        announcement.epoch,
    )


def _of_node(link: NodeLink, reservations: Sequence[Reservation]) -> list[tuple[int, int]]:
    """(slot, generation) of those that this start of this node has granted."""
    node_id, epoch = link.announcement.node_id, link.announcement.epoch
    return [
        (r.slot, r.generation) for r in reservations if r.epoch == epoch and r.node_id == node_id
    ]
