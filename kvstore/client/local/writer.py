"""Saves to one node of this host: reserve, copy, commit; pins and deletions go the same way.

In one file because what a client holds (`Holdings`) must change under the same lock as
the requests that change it (rule 5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from typing import TypeVar, cast

import xxhash

from kvstore.batches import in_batches, picked
from kvstore.client.base import Later, Reservation, ReserveAnswer
from kvstore.client.local.control import Accept, Answer, ControlChannel, Ticket
from kvstore.client.local.link import Granted, GrantedPins, Holdings, NodeLink
from kvstore.client.local.nodes import LocalNodes
from kvstore.client.pins import Memory, Pin, Pins
from kvstore.client.savers import answered
from kvstore.core.answers import BlockRow, Counters, PinAnswer
from kvstore.errors import (
    IndexUnavailableError,
    KVStoreError,
    NodeUnavailableError,
    PeerError,
    UsageError,
)
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
from kvstore.record import has_checksum, slot_of, unpack_record
from kvstore.system.fork import in_each_child
from kvstore.system.interruption import let_through
from kvstore.types import EXISTS, Key, Location, PutResult, Retained

NODE_SEARCH_S = 0.5
"""After a search that found no node, how long none is believed to be there."""
T = TypeVar("T")


class _OvertakenError(Exception):
    """A handler of signals has let go meanwhile of what was to be let go."""


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
        self.pins = Pins(self._unpin_viewed, self._machine)

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
            let_through(e)
            raise NodeUnavailableError(f"segment of node {announcement.name}: {e}") from e
        # Known to be a node of this index: its blocks can be read without asking the index.
        self._nodes.segment(announcement.node_id, announcement.epoch, self._now())
        return link

    def _ask(self, op: Op, *args: object, accept: Callable[[NodeLink, object], T]) -> T:
        """Ask the node; when it is gone, look for another one once."""
        for last in (False, True):
            link = self.link()
            try:
                answer: T = link.control.request(op, *args, accept=partial(accept, link))
                return answer
            except NodeUnavailableError:
                if last:
                    raise
                self._drop(link)
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

    def reserve(self, wants: Wants, namespace_id: int) -> list[ReserveAnswer]:
        """Return a slot, or what became of it, for each of `wants`; one request per
        `BATCH_KEYS_MAX`."""
        answers: list[ReserveAnswer] = []
        try:
            for batch in in_batches(range(len(wants)), BATCH_KEYS_MAX):
                answers += self._reserve(wants.of(batch), namespace_id)
        except BaseException:
            self.abort([answer for answer in answers if isinstance(answer, Reservation)])
            raise
        return answers

    def _reserve(self, wants: Wants, namespace_id: int) -> list[ReserveAnswer]:
        try:
            return self.reserve_later(wants, namespace_id)()
        except NodeUnavailableError:
            if self.linked is not None:  # this start of the node lives: it was asked in vain
                raise
            return self.reserve_later(wants, namespace_id)()

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
        self, wants: Wants, namespace_id: int, *, replaces: bool | None = None
    ) -> Later[ReserveAnswer]:
        """`reserve` in two steps: sent now, answered when called. What one request cannot carry
        is asked and answered at once. Call it, or the slots stay reserved. It `replaces` what has
        no checksum: by default where this client writes them."""
        replaces = self._checksums if replaces is None else replaces
        if len(wants.keys) > BATCH_KEYS_MAX:
            return answered(partial(self.reserve, wants, namespace_id))
        link = self.link()
        arguments = reserve_arguments(wants, namespace_id, checksums=self._checksums)
        granted = Granted()
        accept = partial(self._granted, granted, wants, link)
        ticket = self._post(link, Op.RESERVE, *arguments, accept=accept)
        return partial(self._reserved, granted, link, ticket, wants, namespace_id, replaces)

    def _reserved(
        self,
        granted: Granted,
        link: NodeLink,
        ticket: Ticket,
        wants: Wants,
        namespace_id: int,
        replaces: bool,
    ) -> list[ReserveAnswer]:
        try:
            answers: list[ReserveAnswer] = self._collect(link, ticket)
            if namespace_id not in link.introduced:
                self._register_namespace(namespace_id)
            if replaces and EXISTS in answers:
                self._replace(answers, link, wants, namespace_id)
            return answers
        except BaseException as e:
            self._refuse(granted, e)
            raise

    def _replace(
        self, answers: list[ReserveAnswer], link: NodeLink, wants: Wants, namespace_id: int
    ) -> None:
        """Reserve anew what exists without a checksum: who verifies does not read it."""
        keys = wants.keys
        rest = [i for i, a in enumerate(answers) if a == EXISTS and not link.has_checksum(keys[i])]
        pinned = [(i, r) for i, r in zip(rest, self.pin_many(picked(keys, rest)), strict=True) if r]
        self.unpin_many((keys[i], r) for i, r in pinned)
        which = [i for i, r in pinned if not has_checksum(r)]
        if which:
            self.drop(picked(wants.keys, which))
            again = self.reserve_later(wants.of(which), namespace_id, replaces=False)()
            for i, answer in zip(which, again, strict=True):
                answers[i] = answer

    def _refuse(self, granted: Granted, why: BaseException) -> None:
        """Nobody gets the answer. After an error of ours or the node's the channel connects again
        and says what is held; after an interruption the node has to be told."""
        noted = granted.refuse()
        self._doubt(why)
        if noted and not isinstance(why, KVStoreError):
            for link in self.links():
                items = [handle for held, handle in noted if held is link.held]
                self._give_back(link, Op.ABORT, items)

    def _doubt(self, why: BaseException) -> None:
        """After an interruption the answer may still come, and grant what nobody holds."""
        if not isinstance(why, KVStoreError):
            for link in self.links():
                link.control.doubt()

    def _post(self, link: NodeLink, op: Op, *args: object, accept: Accept) -> Ticket:
        try:
            return link.control.post(op, *args, accept=accept)
        except NodeUnavailableError:
            self._drop(link)
            raise

    def _granted(
        self, granted: Granted, wants: Wants, link: NodeLink, raw: object
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
        buffers = link.buffers(rows, picked(wants.each_size(), which))
        if buffers is None:
            raise InvalidReplyError("a slot outside the segment, whose file may have been cut")
        handles = [(slot, generation) for slot, generation, _ in rows]
        keys = picked(wants.keys, which)
        for i, key, buffer, (slot, generation) in zip(which, keys, buffers, handles, strict=True):
            answers[i] = Reservation(key, buffer, self, node_id, epoch, slot, generation)
        granted.note(link.held, handles)
        return answers

    def _collect(self, link: NodeLink, ticket: Ticket) -> Answer:
        try:
            return link.control.collect(ticket)
        except NodeUnavailableError:
            self._drop(link)
            raise

    def commit(self, reservations: Sequence[Reservation]) -> list[PutResult]:
        """Seal and publish; one request per `BATCH_KEYS_MAX`."""
        results: list[PutResult] = []
        try:
            for batch in in_batches(reservations, BATCH_KEYS_MAX):
                results += self.commit_later(batch)()
        except BaseException:
            self.abort(reservations[len(results) :])
            raise
        return results

    def commit_later(self, reservations: Sequence[Reservation]) -> Later[PutResult]:
        """`commit` in two steps: sent now, answered when called. What one request cannot carry
        is asked and answered at once."""
        if len(reservations) > BATCH_KEYS_MAX:
            return answered(partial(self.commit, reservations))
        sums: Iterable[int] = repeat(0)
        if self._checksums:
            sums = [xxhash.xxh3_64_intdigest(r.buffer) for r in reservations]
        # Whatever becomes of the request: these buffers are not written any more.
        forgotten = self._forget(reservations)
        link = self.link()
        handles = forgotten.get(link, [])
        if len(handles) < len(reservations):
            self.abort(reservations)  # those of this start, which nobody holds any more
            raise NodeUnavailableError("the node that reserved these slots is gone")
        items = [(slot, gen, checksum) for (slot, gen), checksum in zip(handles, sums)]  # noqa: B905
        ticket = self._post(link, Op.COMMIT, items, accept=partial(outcomes, len(items)))
        return partial(self._collect, link, ticket)

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """Give slots back; what cannot be said now is said by the next reconnect."""
        self._forget(reservations)
        link = self.linked
        if link is not None:
            # Of it alone: a slot of a former node may be by now what another thread writes to.
            self._give_back(link, Op.ABORT, _of_node(link, reservations))

    @staticmethod
    def _give_back(link: NodeLink, op: Op, items: Sequence[tuple[int, int]]) -> None:
        with suppress(PeerError):
            for batch in in_batches(items, BATCH_KEYS_MAX):
                link.control.request(op, batch)

    def _forget(self, reservations: Sequence[Reservation]) -> dict[NodeLink, list[tuple[int, int]]]:
        """They are not held any more: (slot, generation) of each, by the start that granted it."""
        handles = {link: _of_node(link, reservations) for link in self.links()}
        for link, its in handles.items():
            link.held.reserved.difference_update(its)
        self._settle()
        return handles

    def links(self) -> list[NodeLink]:
        """Return the link to the node, and those to its former starts while something there is in
        use."""
        link = self.linked
        return [*self._former, link] if link is not None else list(self._former)

    # --- pins, touches, deletions -------------------------------------------

    def pin(self, key: Key) -> bytes | None:
        """Return the record of a block that now stays until `unpin`, or until its `view` is
        gone."""
        granted = GrantedPins()
        try:
            answers = self._ask(Op.PIN, key, accept=partial(self._pinned_now, [key], granted))
        except BaseException as e:  # interrupted: nobody has it
            self._refuse_pins(granted, e)
            raise
        answer = answers[0] if answers else None
        if isinstance(answer, str):
            raise UsageError("pin", key.hex(), answer)
        return answer

    def _pinned_now(
        self, keys: Sequence[Key], granted: GrantedPins, link: NodeLink, raw: object
    ) -> list[PinAnswer]:
        """Return the node's answers as they are; from here on the records among them count as held,
        and are in `granted`, unless that is refused."""
        answers = pins(raw)
        pinned: list[Pin] = [
            (key, record)
            for key, record in zip(keys, answers, strict=False)
            if isinstance(record, bytes)
        ]
        with self._lock:
            handles = [slot_of(record) for _, record in pinned]
            if not granted.refused:
                link.held.pin(handles, partial(granted.noted.extend, pinned))
        return answers

    def _refuse_pins(self, granted: GrantedPins, why: BaseException) -> None:
        """As `_refuse`."""
        with self._lock:
            granted.refused = True
        self._doubt(why)
        self.unpin_many(granted.noted)

    def unpin(self, key: Key, record: bytes) -> None:
        """Let a pin go. When it cannot be said now, the next reconnect or goodbye says it."""
        self.unpin_many([(key, record)])

    def pin_many(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Return the record of each block that now stays until `unpin_many`; None for the
        others."""
        records: list[bytes | None] = []
        granted = GrantedPins()
        try:
            for batch in in_batches(keys, BATCH_KEYS_MAX):
                accept = partial(self._pinned_now, batch, granted)
                answers = self._ask(Op.PIN, join_keys(batch), accept=accept)
                told = [a if isinstance(a, bytes) else None for a in answers[: len(batch)]]
                records += told + [None] * (len(batch) - len(told))
        except BaseException as e:  # also when it was interrupted: nobody has them
            self._refuse_pins(granted, e)
            raise
        return records

    def view(self, pin: Pin, payload: memoryview) -> Memory:
        """Return the memory of what was just pinned (`Pins.hold`): the pin ends with it, whoever
        closes this meanwhile."""
        location = unpack_record(*pin)
        with self._lock:
            link = None if self._closed or location is None else self._link_of(location)
            if location is None or link is None:
                raise NodeUnavailableError("the node that has pinned it is gone")
            handle = (location.slot, location.generation)
            link.held.viewed[handle] = link.held.viewed.get(handle, 0) + 1
        try:
            return self.pins.hold(pin, payload)
        except BaseException:
            self._unpin_viewed(deque([pin]))
            raise

    def unpin_many(self, pinned: Iterable[Pin]) -> None:
        """Let each of these pins go once."""
        ended = deque(pinned)
        try:
            self._unpin(ended, viewed=False)
        except BaseException:  # interrupted: nobody would let the others go
            self._unpin(ended, viewed=False)
            raise

    def _unpin_viewed(self, ended: deque[Pin]) -> None:
        self._unpin(ended, viewed=True)

    def _unpin(self, ended: deque[Pin], *, viewed: bool) -> None:
        """Let go of what is in `ended`. Each leaves it in the step that counts it down: whoever
        interrupts, what is still there is still to be let go."""
        shares: dict[NodeLink, list[Pin]] = {}
        for pin in list(ended):
            location = unpack_record(*pin)
            link = None if location is None else self._link_of(location)
            if link is None:
                ended.remove(pin)
            else:
                shares.setdefault(link, []).append(pin)
        for link, share in shares.items():
            for batch in in_batches(share, BATCH_KEYS_MAX):
                self._let_go(link, batch, ended, viewed)
        self._settle()

    def _let_go(
        self, link: NodeLink, share: Sequence[Pin], ended: deque[Pin], viewed: bool
    ) -> None:
        """Count pins down here and at the node as one: a HELLO in between would say the smaller
        number, and the UNPIN behind it would take a pin that somebody still has."""
        handles = [slot_of(record) for _, record in share]
        forgotten: list[bool] = []

        def forget() -> None:
            leave = chain(map(ended.remove, share), map(forgotten.append, [True]))
            try:
                with self._lock:
                    link.held.unpin(handles, partial(deque, leave, 0), viewed=viewed)
            except ValueError as e:  # they are not in `ended` any more
                raise _OvertakenError from e

        with suppress(_OvertakenError):
            if not link.retired:
                with suppress(PeerError):
                    link.control.request(Op.UNPIN, handles, before=forget)
            if not forgotten:
                forget()

    def _link_of(self, location: Location) -> NodeLink | None:
        """Return the connection to the start of the node that a location is of."""
        node = (location.node_id, location.epoch)
        links = self.links()
        return next(
            (x for x in links if (x.announcement.node_id, x.announcement.epoch) == node), None
        )

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
        """Give back everything but pins that somebody still has a view of: their nodes are told
        so, and the lease stays until the last of them has ended. Safe to call twice."""
        self.pins.settle()
        with self._lock:
            if self._closed:
                return
            links, self._closed = self.links(), True
            self.linked, self._former = None, [link for link in links if link.held.is_viewed]
            kept = list(self._former)
        for link in links:
            if link not in kept:
                link.control.close()
            elif not link.retired:
                link.linger()


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
