"""Finds the nodes of this host that one client writes to, and saves to all as if they were one.

Each has a `Writer` of its own. Where a new block goes is decided in homes.py. What is about a block
that is there (pins, deletions, touches) goes to whoever has it, which costs no search: it is asked
of all.

One class, as it is `Writer` once more, call by call: longer than other files.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice

from kvstore.batches import picked
from kvstore.client.base import ReserveAnswer
from kvstore.client.health import DISK_CLOSED
from kvstore.client.nodes.deadlines import each_within, in_turn, until
from kvstore.client.nodes.directory import HERE_BELIEVED_S, NodeDirectory
from kvstore.client.nodes.saving.homes import Homes
from kvstore.client.nodes.saving.link import Grants, NodeLink
from kvstore.client.nodes.saving.savers import ask_all
from kvstore.client.nodes.saving.touched import Touched
from kvstore.client.nodes.saving.writer import Writer, nobody_here
from kvstore.client.pins import HeldPin, Pin
from kvstore.core.answers import BlockRow
from kvstore.core.memory.listed import place_of
from kvstore.errors import (
    DeadlineError,
    IndexUnavailableError,
    NodeUnavailableError,
    NoSpaceError,
    PeerError,
)
from kvstore.keys import Namespace
from kvstore.limits import FIRST_NODE_WAIT_S, FIRST_QUESTION_WAIT_S, NAMESPACE_BYTES_MAX
from kvstore.nodedir import Announcement, NodeDir
from kvstore.protocol.control_requests import Wants
from kvstore.record import unpack_record
from kvstore.system.fork import in_each_child
from kvstore.types import Key, Retained, rejected

ROUNDS = 3
"""What was meant for a node that turns out to be gone, or hangs, is asked of others: this many
nodes in all."""
START_AGAIN_AFTER_S = 5.0
"""After an embedded node could not be started."""
POLL_S = 0.01
TOUCH_EVERY_S = 0.2
HIGHEST = frozenset({"largest_free_bytes", "oldest_reservation_s", "value_bytes_max"})
"""Counters of nodes that are not added up."""

_GONE = (NodeUnavailableError, DeadlineError)
Share = tuple[NodeLink, Sequence[int]]
"""A node, and the numbers of the blocks that go there."""


class HostWriter:
    """Does for all nodes of this host what a `Writer` does for one. Thread-safe.

    Finds nodes when they are first needed, and others when one is gone. Calls raise
    `NodeUnavailableError` when there is no node on this host.
    """

    def __init__(
        self,
        nodes: NodeDirectory,
        *,
        name: str | None,
        timeout_s: float,
        checksums: bool,
        start_node: Callable[[], None] | None,
    ) -> None:
        """With `name`, only that node is saved to. `start_node` makes one where there is none."""
        self.introductions: dict[int, bytes] = {}
        """Fields of the namespaces that this client saves to, by id."""
        self._nodes = nodes
        self.machine = nodes.machine
        self._now = self.machine.monotonic
        self._name = name
        self.timeout_s = timeout_s
        self._checksums = checksums
        self._start_node = start_node
        self._patient = True
        self._first_wait_s = FIRST_QUESTION_WAIT_S if start_node is None else FIRST_NODE_WAIT_S
        # A handler of signals may close the client at any moment.
        self._lock = self.machine.lock()
        in_each_child(self)
        self._closed = False
        self._by_name: dict[str, Writer] = {}
        """Also of nodes that are gone, while something of theirs is in somebody's hands."""
        self._found: tuple[Writer, ...] = ()
        self._look_at = 0.0
        self._search_at = {False: 0.0, True: 0.0}
        """When who saves, and who only tells nodes something, looks for a node again where there
        was none: telling (connectors do it at their start) holds back no save."""
        self._found_none_because = nobody_here(None)
        """What the last search in vain said."""
        self._not_started: PeerError | None = None
        """Why the embedded node could not be started the last time."""
        self._start_at = 0.0
        self._homes = Homes(nodes)
        self._touched = Touched(), Touched(), Touched()
        """What was read, what was saved, and what was left, since nodes were told."""
        self._touch_at = 0.0

    # --- which nodes there are ----------------------------------------------------

    def writers(self, *, start: bool = False) -> tuple[Writer, ...]:
        """Return one for each living node of this index on this host, by name: at least one.

        With `start`, the embedded node is started when this client may do that.
        """
        found = self._known()
        if found:
            return found
        with self._lock:
            if self._closed:
                raise NodeUnavailableError("this client is closed")
            return self._unless_closed(self._known() or self._look(start))

    def _unless_closed(self, found: tuple[Writer, ...]) -> tuple[Writer, ...]:
        """Return what was just found; a handler of signals may have closed this meanwhile."""
        if self._closed:
            self.close()
            raise NodeUnavailableError("this client is closed")
        return found

    def _known(self) -> tuple[Writer, ...]:
        """Empty when it is time to look around, and when a node has gone."""
        if self._now() < self._look_at and all(w.linked is not None for w in self._found):
            return self._found
        return ()

    def _look(self, start: bool) -> tuple[Writer, ...]:
        now = self._now()
        if now < self._search_at[start]:
            raise NodeUnavailableError(self._found_none_because)
        try:
            words = self._writables(start)
            if start and self._start_node is not None and all(map(_is_ending, words)):
                self._start(self._start_node)
                words = self._writables(start)
        except IndexUnavailableError as e:
            failure = NodeUnavailableError(f"no memory node: the index cannot be asked ({e})")
            self._found_none(start, failure)
            raise failure from e
        joined: list[Writer] = []
        failure = NodeUnavailableError(nobody_here(None))
        for announcement, directory in words:
            writer = self._by_name.get(announcement.name) or self._new(announcement.name)
            try:
                writer.join(announcement, directory)
            except NodeUnavailableError as e:
                failure = e
            else:
                joined.append(writer)
        if not joined:
            others = [f"node {word.name}: {why}" for word, why in self._nodes.others()]
            others += map(str, self._nodes.strangers())
            failure = NodeUnavailableError("; ".join([str(failure), *others]))
        joined += [w for w in self._found if w not in joined and self._lives(w)]
        self._found = tuple(joined)
        self._forget_gone()
        if not joined:
            self._found_none(start, failure)
            raise failure
        self._look_at = now + HERE_BELIEVED_S
        return self._found

    def _found_none(self, start: bool, failure: NodeUnavailableError) -> None:
        self._found_none_because = str(failure)
        search_at = self._now() + HERE_BELIEVED_S
        self._search_at = {False: search_at, True: search_at if start else self._search_at[True]}

    def _start(self, start_node: Callable[[], None]) -> None:
        """Start a node, unless that failed lately: each try may cost a process."""
        now = self._now()
        if self._not_started is None or now >= self._start_at:
            self._not_started = None
            try:
                start_node()
            except (NodeUnavailableError, DeadlineError, NoSpaceError) as e:
                self._not_started, self._start_at = e, self._now() + START_AGAIN_AFTER_S
        if self._not_started is not None:
            raise NodeUnavailableError(str(self._not_started)) from self._not_started

    def _writables(self, start: bool) -> list[tuple[Announcement, NodeDir]]:
        """The first save waits for an index that is slow to say whose the nodes are: where one
        client starts many do, perhaps with their node and its Redis, and the machine is busy."""
        wait_s = self._first_wait_s if start and self._patient else 0.0
        give_up_at = self._now() + wait_s
        while True:
            try:
                found = self._nodes.writables()
            except IndexUnavailableError:
                if self._now() >= give_up_at:
                    self._patient = self._patient and not start
                    raise
                self.machine.sleep(POLL_S)
            else:
                self._patient = self._patient and not found
                return found

    def _new(self, name: str) -> Writer:
        writer = self._by_name[name] = Writer(
            self._nodes,
            name=name,
            timeout_s=self.timeout_s,
            checksums=self._checksums,
            introductions=self.introductions,
        )
        return writer

    @staticmethod
    def _lives(writer: Writer) -> bool:
        """Believed where nobody can look: no file descriptor is left, say."""
        writer.let_go()
        return writer.linked is not None

    def _forget_gone(self) -> None:
        for name, writer in list(self._by_name.items()):
            if writer not in self._found:
                writer.let_go()
                if not writer.links():
                    del self._by_name[name]
                    writer.close()

    def _targets(self, *, start: bool = False) -> list[tuple[Writer, NodeLink]]:
        """Return those that may be saved to."""
        found = [
            (writer, link)
            for writer in self.writers(start=start)
            if (link := writer.linked) is not None and self._name in (None, link.announcement.name)
        ]
        if not found:
            raise NodeUnavailableError(nobody_here(self._name))
        return found

    def _each_s(self) -> float:
        """Return how long a request to save may take, so that there is time to ask another node."""
        if len(self._found) == 1:
            return self.timeout_s
        links = [w.linked for w in self._found if w.linked is not None]
        healthy = sum(
            self._name in (None, link.announcement.name) and not link.control.silent
            for link in links
        )
        return self.timeout_s / max(1, min(ROUNDS, healthy))

    def link(self, *, start: bool = True) -> NodeLink:
        """Return the link to one of the nodes that may be saved to."""
        return self._targets(start=start)[0][1]

    def no_node(self) -> NodeUnavailableError | None:
        """Return why nothing can be saved on this host; None while there is a node."""
        try:
            self._targets(start=True)
        except NodeUnavailableError as e:
            return e
        return None

    def links(self) -> list[NodeLink]:
        """Return all links, those to nodes that are gone too while something is held there."""
        return [link for writer in self._every() for link in writer.links()]

    def _every(self) -> list[Writer]:
        return list(self._by_name.values())

    def let_go(self) -> None:
        """Unmap nodes that died; whoever only saves finds out at the next save otherwise. Give back
        to the others what nobody has any more."""
        for writer in self._every():
            writer.let_go()
            writer.tidy()

    def _of(self, node_id: int) -> Writer | None:
        """That of a node, whichever of its starts."""
        for writer in self._every():
            if any(link.announcement.node_id == node_id for link in writer.links()):
                return writer
        return None

    # --- what goes where --------------------------------------------------------

    def spread(
        self,
        keys: Sequence[Key],
        sizes: Sequence[int],
        ask: Callable[[Sequence[Share]], Mapping[int, PeerError]],
    ) -> Mapping[int, PeerError]:
        """Have `ask` do for each block, of these sizes in bytes, what is to be done at the node
        that takes it; it returns why, of those whose node failed. These go to other nodes, and
        those that are left in the end are returned.

        Raises `NodeUnavailableError` when there is no node: then nothing was asked.
        """
        failed: Mapping[int, PeerError] = {}
        without: set[NodeLink] = set()
        each_s = 0.0
        for _ in range(ROUNDS):
            try:
                shares = self.plan(keys, sizes, without, which=sorted(failed) if failed else None)
            except NodeUnavailableError:
                if not failed:
                    raise
                break
            each_s = each_s or self._each_s()
            with each_within(each_s) if each_s < self.timeout_s else nullcontext():
                failed = ask(shares)
            if not failed:
                break
            without |= {link for link, which in shares if not failed.keys().isdisjoint(which)}
        return failed

    def plan(
        self,
        keys: Sequence[Key],
        sizes: Sequence[int],
        without: Collection[NodeLink] = (),
        *,
        which: Sequence[int] | None = None,
    ) -> list[Share]:
        """Return who takes which of the blocks; `which` are their numbers, None: all. Nodes that do
        not answer, and those `without`, take none while there are others."""
        which = range(len(keys)) if which is None else which
        links = [link for _, link in self._targets(start=True) if link not in without]
        if not links:
            raise NodeUnavailableError(nobody_here(self._name))
        if len(links) > 1:
            links = [link for link in links if not link.control.silent] or links
        if len(links) == 1:
            return [(links[0], which)]
        shares: dict[NodeLink, list[int]] = {link: [] for link in links}
        for i, home in zip(
            which, self._homes.of(picked(keys, which), picked(sizes, which), links), strict=True
        ):
            shares[home].append(i)
        return [(link, numbers) for link, numbers in shares.items() if numbers]

    # --- saving -----------------------------------------------------------------

    def register_namespaces(self, namespaces: Iterable[Namespace]) -> None:
        """Nodes are told of these when something is first saved there."""
        for namespace in namespaces:
            raw = namespace.canonical()
            if len(raw) <= NAMESPACE_BYTES_MAX:
                self.introductions[namespace.id] = raw

    def reserve(self, wants: Wants, namespace_id: int) -> list[ReserveAnswer]:
        """Return a slot, or what became of it, for each of `wants`. Raises `NodeUnavailableError`
        or `DeadlineError` when no node answered: then nothing is reserved."""
        granted, done = Grants(), False
        answers: dict[int, ReserveAnswer] = {}

        def ask(shares: Sequence[Share]) -> dict[int, PeerError]:
            posts = [
                partial(link.reserve_later, wants.of(which), namespace_id, granted)
                for link, which in shares
            ]
            failed: dict[int, PeerError] = {}
            asked = ask_all(posts, self.timeout_s, self._now)
            for (_, which), answer in zip(shares, asked, strict=True):
                if isinstance(answer, PeerError):
                    failed |= dict.fromkeys(which, answer)
                else:
                    answers.update(zip(which, answer, strict=True))
            return failed

        try:
            failed = self.spread(wants.keys, wants.each_size(), ask) if wants.keys else {}
            if failed and not answers:
                raise failed[0]
            answers |= {i: rejected(str(failure)) for i, failure in failed.items()}
            done = True
            return [answers[i] for i in range(len(wants.keys))]
        finally:
            if not done:
                granted.close()

    # --- pins, touches, deletions -------------------------------------------------

    def pin(self, key: Key, granted: Grants) -> HeldPin | None:
        """Return the pin of a block, which now stays as long as anybody has that; None for a
        miss."""
        failures: list[PeerError] = []
        writers = self._likely_first((key,))
        for writer, by in in_turn(writers, self.timeout_s, self._now):
            try:
                with until(by):
                    pin = writer.pin(key, granted)
            except _GONE as e:
                failures.append(e)
            else:
                if pin is not None:
                    return pin
        if len(failures) == len(writers):
            raise failures[0]
        return None

    def _likely_first(self, keys: Sequence[Key]) -> list[Writer]:
        """Nodes with one of `keys` before the others."""
        writers = list(self.writers())
        if len(writers) > 1:
            holding = set(self._homes.holders(keys).values())
            writers.sort(
                key=lambda w: w.linked is None or w.linked.announcement.node_id not in holding
            )
        return writers

    def pin_many(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Return the record of each block that now stays until `unpin_many`; None for the
        others."""
        granted, done = Grants(), False
        try:
            pins = self._pin_many(keys, granted)
            for writer in self._every():
                mine = [(key, one) for key, one in zip(keys, pins, strict=True) if one]
                writer.keep((key, one) for key, one in mine if one.pins is writer.pins)
            records = [one.record if one else None for one in pins]
            done = True
            return records
        finally:
            if not done:
                granted.close()

    def _pin_many(self, keys: Sequence[Key], granted: Grants) -> list[HeldPin | None]:
        pins: list[HeldPin | None] = [None] * len(keys)
        failures: list[PeerError] = []
        writers = self._likely_first(keys)
        for writer, by in in_turn(writers, self.timeout_s, self._now):
            which = [i for i, pin in enumerate(pins) if pin is None]
            try:
                with until(by):
                    pinned = writer.pin_many([keys[i] for i in which], granted)
            except _GONE as e:
                failures.append(e)
            else:
                for i, pin in zip(which, pinned, strict=True):
                    pins[i] = pin
        if len(failures) == len(writers):
            raise failures[0]
        return pins

    def unpin_many(self, pinned: Sequence[Pin]) -> None:
        """Let each of these pins go once."""
        by_node: dict[int, list[Pin]] = {}
        for key, record in pinned:
            location = unpack_record(key, record)
            if location is not None:
                by_node.setdefault(location.node_id, []).append((key, record))
        for (node_id, share), by in in_turn([*by_node.items()], self.timeout_s, self._now):
            writer = self._of(node_id)
            if writer is not None:
                with until(by):
                    writer.unpin_many(share)

    def retain(self, keys: Sequence[Key], ttl_s: int, tenant: int) -> list[Retained]:
        """Keep blocks of this host from being evicted for `ttl_s`; what became of each, where they
        are. Raises what kept nodes from saying of those that no other has."""
        answers = [Retained.ABSENT] * len(keys)
        failure: PeerError | None = None
        for writer, by in in_turn(self._likely_first(keys), self.timeout_s, self._now):
            which = [i for i, answer in enumerate(answers) if answer is Retained.ABSENT]
            try:
                with until(by):
                    found = writer.retain([keys[i] for i in which], ttl_s, tenant)
            except _GONE as e:
                failure = e
            else:
                for i, answer in zip(which, found, strict=True):
                    answers[i] = answer
        if failure is not None and Retained.ABSENT in answers:
            raise failure
        return answers

    def touch(
        self,
        keys: Sequence[Key],
        now: float,
        *,
        at_once: bool = False,
        saved: bool = False,
        left: bool = False,
    ) -> None:
        """Remember that `keys`, in the order of their prefix, were read, or `saved`, or `left`;
        nodes are told now and then (design: the load path), or `at_once`."""
        self._touched[2 if left else saved].add(keys)
        if now < self._touch_at and not at_once:
            return
        used, self._touched = self._touched, (Touched(), Touched(), Touched())
        self._touch_at = now + TOUCH_EVERY_S
        runs = [each.runs() for each in used]
        with suppress(NodeUnavailableError):
            for writer in self.writers():
                writer.touch(*runs)

    def report(self, counts: Mapping[str, int]) -> bool:
        """Tell one node what an engine has counted; False when none was told."""
        with suppress(NodeUnavailableError):
            return self.writers()[0].report(counts)
        return False

    def drop(self, keys: Sequence[Key]) -> list[bool]:
        """Return which of `keys` some node had and has not any more. Raises what kept nodes from
        saying of the others."""
        dropped = [False] * len(keys)
        failure: PeerError | None = None
        for writer, by in in_turn(self.writers(), self.timeout_s, self._now):
            try:
                with until(by):
                    flags = writer.drop(keys)
            except _GONE as e:
                failure = e
            else:
                dropped = [a or b for a, b in zip(dropped, flags, strict=True)]
        if failure is not None and not all(dropped):
            raise failure
        return dropped

    def clear(self, namespace_id: int) -> int:
        """Drop a namespace; how many blocks it had. Raises when a node could not be told: then
        the others have dropped it."""
        dropped, failure = 0, None
        for writer, by in in_turn(self.writers(), self.timeout_s, self._now):
            try:
                with until(by):
                    dropped += writer.clear(namespace_id)
            except _GONE as e:
                failure = e
        if failure is not None:
            raise failure
        return dropped

    def reset(self, number: int, namespace_ids: Sequence[int]) -> int:
        """Tell one node of a reset; the number that it got. The others hear of it from that one."""
        failure: PeerError = NodeUnavailableError(nobody_here(self._name))
        for writer, by in in_turn(self.writers(), self.timeout_s, self._now):
            try:
                with until(by):
                    return writer.reset(number, namespace_ids)
            except _GONE as e:
                failure = e
        raise failure

    # --- telling ------------------------------------------------------------------

    def stats(self) -> dict[str, int | float]:
        """Return the counters of those nodes that this client saves to, added up."""
        total: dict[str, int | float] = {}
        failure: PeerError | None = None
        for (writer, _), by in in_turn(self._targets(), self.timeout_s, self._now):
            try:
                with until(by):
                    counters = writer.stats()
            except _GONE as e:
                failure = e
                continue
            for name, value in counters.items():
                known = total.get(name, 0)
                total[name] = max(known, value) if name in HIGHEST else known + value
        if failure is not None and not total:
            raise failure
        return total

    def health(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return, by name, what is wrong with each node (nothing when it answers and is ready), and
        which nodes have disks that do not work."""
        disks: dict[str, str] = {}
        found = {other.name: str(other) for other in self._nodes.strangers()}
        try:
            # One whose memory cannot be mapped is nobody to write to, and has its reason.
            for word, directory in self._nodes.writables():
                start = word.node_id, word.epoch
                if why_not := directory.why_not_ready():
                    found[directory.name] = why_not
                elif self._nodes.segment(*start, self._now()) is None:
                    found[directory.name] = str(self._nodes.unmapped(*start) or "")
        except IndexUnavailableError:
            pass
        if not found and self._nodes.had and not self._nodes.living():
            found = dict.fromkeys(self._nodes.had, "it has ended, and no other is here")
        try:
            writers = self.writers()
        except NodeUnavailableError:
            return found, disks
        for writer, by in in_turn(writers, self.timeout_s, self._now):
            link = writer.linked
            if link is None:
                continue
            directory = link.control.directory
            try:
                with until(by):
                    closed = writer.stats().get("disk_closed")
                if closed:
                    disks[directory.name] = DISK_CLOSED % closed
                found[directory.name] = directory.why_not_ready()
            except _GONE as e:
                found[directory.name] = str(e)
        return found, disks

    def listing(self, after: bytes, at_most: int) -> list[BlockRow]:
        """Return a page of at most `LIST_ROWS_MAX` rows of all nodes (core/memory/listed.py)."""
        rows = []
        for writer, by in in_turn(self.writers(), self.timeout_s, self._now):
            with until(by):
                rows.append(writer.listing(after, at_most))
        return list(islice(heapq.merge(*rows, key=lambda row: place_of(row.key)), at_most))

    def after_fork_in_child(self) -> None:
        self._lock = self.machine.lock()  # a thread of the parent may have had it

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._found = ()
        for writer in self._every():
            writer.close()


def _is_ending(node: tuple[Announcement, NodeDir]) -> bool:
    """Return whether the node has unlinked its socket, as it does first; its announcement goes
    last."""
    return not node[1].socket.exists()
