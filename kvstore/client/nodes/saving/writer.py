"""Finds one node of this host, start after start, and asks it for pins, deletions and counters.

What saves to it is `kvstore/client/nodes/saving/link.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from kvstore.batches import in_batches, picked
from kvstore.client.nodes.control import ControlChannel
from kvstore.client.nodes.directory import HERE_BELIEVED_S, NodeDirectory
from kvstore.client.nodes.saving.link import Grants, Holdings, HostSlots, NodeLink, SlotMemory
from kvstore.client.pins import HeldPin, Pin, PinRef, Pins
from kvstore.core.answers import BlockRow, Counters
from kvstore.errors import DeviceError, IndexUnavailableError, NodeUnavailableError, UsageError
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.nodedir import Announcement, NodeDir
from kvstore.protocol.control import Op, join_keys
from kvstore.protocol.control_replies import (
    block_rows,
    counters,
    flags,
    pins,
    reset_number,
    retained,
    whole,
)
from kvstore.record import has_checksum
from kvstore.system.fork import in_each_child
from kvstore.types import Key, Retained

T = TypeVar("T")


class NodeFinder(Protocol):
    """Finds the node of a `Writer`, and opens its memory."""

    nobody: str
    """What to say when there is none."""

    def find(self) -> Sequence[tuple[Announcement, NodeDir]]:
        """Return the starts that may be saved to, the best first. Raises
        `IndexUnavailableError`."""
        ...

    def open(self, announcement: Announcement, directory: NodeDir) -> SlotMemory:
        """Map the memory. Raises `OSError`, `ValueError` and `DeviceError`."""
        ...


class HostFinder:
    """Implements `NodeFinder` by this host's memory: of the node called `name`, or of any."""

    def __init__(self, nodes: NodeDirectory, name: str | None) -> None:
        self.nobody = nobody_here(name)
        self._nodes = nodes
        self._name = name

    def find(self) -> Sequence[tuple[Announcement, NodeDir]]:
        found = self._nodes.writable(self._name)
        return [] if found is None else [found]

    def open(self, announcement: Announcement, directory: NodeDir) -> SlotMemory:
        self._nodes.mapping()
        memory = HostSlots(announcement, self._nodes.machine)
        # Known to be a node of this index: its blocks can be read without asking the index.
        now = self._nodes.machine.monotonic()
        self._nodes.segment(announcement.node_id, announcement.epoch, now)
        return memory


class Writer:
    """One node of this host, which it finds when it is first needed, and again when it is gone.
    Thread-safe. Implements `kvstore.client.nodes.saving.link.Keeper`.
    """

    def __init__(
        self,
        nodes: NodeDirectory,
        *,
        name: str | None,
        timeout_s: float,
        checksums: bool,
        introductions: dict[int, bytes] | None = None,
        finder: NodeFinder | None = None,
    ) -> None:
        """`introductions`, where they are shared, are `self.introductions`. Without a `finder` it
        is a node in this host's memory, the one called `name` if that is given."""
        self._finder = HostFinder(nodes, name) if finder is None else finder
        self._machine = nodes.machine
        self._now = self._machine.monotonic
        self.introductions: dict[int, bytes] = {} if introductions is None else introductions
        """Fields of the namespaces that this client saves to, by id."""
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
            self.gone(link)
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
            link.close()
        if self._closed or link is None:
            raise NodeUnavailableError("this client is closed")
        return link

    def _find(self) -> NodeLink:
        now = self._now()
        failure = NodeUnavailableError(self._finder.nobody)
        if now < self._search_at:
            raise failure
        try:
            for found in self._finder.find():
                try:
                    return self._joined(*found)
                except NodeUnavailableError as e:
                    failure = e
        except IndexUnavailableError as e:
            failure = NodeUnavailableError(f"no memory node: the index cannot be asked ({e})")
            failure.__cause__ = e
        self._search_at = now + HERE_BELIEVED_S
        raise failure

    def _joined(self, announcement: Announcement, directory: NodeDir) -> NodeLink:
        held = Holdings()
        control = ControlChannel(
            directory,
            (announcement.node_id, announcement.epoch),
            self._timeout_s,
            held.said,
            machine=self._machine,
        )
        try:
            memory = self._finder.open(announcement, directory)
        except (OSError, ValueError, DeviceError) as e:
            raise NodeUnavailableError(f"segment of node {announcement.name}: {e}") from e
        return NodeLink(announcement, control, held, self, memory, checksums=self._checksums)

    def _ask(self, op: Op, *args: object, accept: Callable[[NodeLink, object], T]) -> T:
        """Ask the node; once more, or another one, when it is gone or the request was not sent."""
        for last in (False, True):
            link, ticket = self.link(), None
            try:
                ticket = link.control.post(op, *args, accept=partial(accept, link))
                answer: T = link.control.collect(ticket)
                return answer
            except NodeUnavailableError:
                self.gone(link)
                if last or (ticket is not None and self.linked is link):
                    raise
            finally:
                if ticket is None or not ticket.done:
                    link.control.doubt()
        raise AssertionError("unreachable")

    def gone(self, link: NodeLink) -> None:
        """The node is gone; what this client holds there can be neither sealed nor read anew."""
        with self._lock:
            if self.linked is not link or link.control.directory.lives_as(link.announcement):
                return
            self.linked = None
            self._former.append(link)
        link.retire()
        self.settle()

    def let_go(self) -> None:
        """Unmap the node if it died; whoever only saves finds out at the next save otherwise."""
        link = self.linked
        if link is not None:
            self.gone(link)

    def _held(self) -> list[Collection[object]]:
        holdings = [link.held for link in self.links()]
        return [*[held.pins for held in holdings], *[held.reserved for held in holdings]]

    def settle(self) -> None:
        """Let the leases of former nodes go when nothing of theirs is in use any more."""
        if not self._former:
            return
        with self._lock:
            over = self._closed
            done = [link for link in self._former if (link.retired or over) and not link.held]
            self._former = [link for link in self._former if link not in done]
        for link in done:
            link.close()

    # --- what links ask ------------------------------------------------------

    def drop_unchecked(self, keys: Sequence[Key], granted: Grants) -> list[int]:
        """See `Keeper.drop_unchecked`."""
        pinned = self.pin_many(keys, granted)
        self.pins.end([pin for pin in pinned if pin])
        which = [i for i, pin in enumerate(pinned) if pin and not has_checksum(pin.record)]
        if which:
            self.drop(picked(keys, which))
        return which

    def tidy(self) -> None:
        """Do for all that is held here what `NodeLink.tidy` does for a start of the node."""
        self.pins.settle()
        for link in self.links():
            link.tidy()
        self.settle()

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
        granted.undo.append(partial(self.pins.end, new))
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
                link.give_up(Op.UNPIN, handles, partial(held.difference_update, batch))
        self.settle()

    def retain(self, keys: Sequence[Key], ttl_s: int, tenant: int) -> list[Retained]:
        """Keep blocks from being evicted for `ttl_s`; what became of each."""
        answers: list[Retained] = []
        for batch in in_batches(keys, BATCH_KEYS_MAX):
            wish = join_keys(batch), ttl_s, tenant
            accept = partial(_retained, len(batch))
            answers += self._ask(Op.RETAIN, *wish, accept=accept)
        return answers

    def touch(
        self,
        read: Sequence[Sequence[Key]],
        saved: Sequence[Sequence[Key]] = (),
        left: Sequence[Sequence[Key]] = (),
    ) -> None:
        """Say that blocks were read, which were saved, and which left, in runs of at most
        `BATCH_KEYS_MAX`: one way, never waits."""
        try:
            link = self.link()
        except NodeUnavailableError:
            return
        said = [(join_keys(run),) for run in read] or [(b"",)]  # so that it is connected
        told = link.control.say_each(Op.TOUCH, said)
        for op, runs in (Op.SAVED, saved), (Op.LEFT, left):
            if told and runs:
                told = link.control.say_each(op, [(join_keys(run),) for run in runs])
        if not told:
            self.gone(link)  # if it is gone: the next one is told of the next touches

    def report(self, counts: Mapping[str, int]) -> bool:
        """Say what an engine has counted: one way, never waits; False when it was not said."""
        return self.link().control.say(Op.REPORT, list(counts), list(counts.values()))

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
                link.close()
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
