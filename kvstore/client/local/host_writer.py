"""Saves to all nodes of this host as if they were one; each has a `Writer` of its own.

Where a new block goes is decided in client/placement.py. What is about a block that is there
(pins, deletions, touches) goes to whoever has it, which costs no search: it is asked of all.

In one file because it is `Writer` once more, call by call.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

from kvstore.batches import picked
from kvstore.client.base import ReserveAnswer
from kvstore.client.local.deadlines import each_within, in_turn, until
from kvstore.client.local.host_writers import ROUNDS, HostWriters
from kvstore.client.local.link import Grants, NodeLink
from kvstore.client.local.touched import Touched
from kvstore.client.local.writer import Writer, nobody_here
from kvstore.client.pins import HeldPin, Pin
from kvstore.client.placement import Home, homes_of
from kvstore.client.savers import ask_all
from kvstore.core.answers import BlockRow
from kvstore.core.memory.listed import place_of
from kvstore.errors import (
    DeadlineError,
    IndexUnavailableError,
    NodeUnavailableError,
    PeerError,
)
from kvstore.keys import Namespace
from kvstore.limits import NAMESPACE_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.protocol.control_requests import Wants
from kvstore.record import unpack_record
from kvstore.segment.header import KEY_PART, fields
from kvstore.types import Key, Retained, rejected

TOUCH_EVERY_S = 0.2
ROOM_MARGIN_BYTES = 512 << 20
"""A node with less room than that is asked before each save: others can fill it while an answer
of `ROOM_BELIEVED_S` ago is believed. One that is full is not: it evicts, which makes no room."""
ROOM_BELIEVED_S = 0.05
"""How long what nodes said of their room is used, less what was sent there since."""
HIGHEST = frozenset({"largest_free_bytes", "oldest_reservation_s", "value_bytes_max"})
"""Counters of nodes that are not added up."""

_GONE = (NodeUnavailableError, DeadlineError)
Share = tuple[Writer, NodeLink, Sequence[int]]
"""A node, and the numbers of the blocks that go there."""


class HostWriter(HostWriters):
    """Does for all nodes of this host what a `Writer` does for one. Thread-safe."""

    # --- what goes where --------------------------------------------------------

    def plan(
        self, keys: Sequence[Key], sizes: Sequence[int], without: Collection[NodeLink] = ()
    ) -> list[Share]:
        """Return who takes which of the blocks, of these sizes in bytes; nodes that do not answer,
        and those `without`, take none while there are others."""
        targets = [one for one in self._targets(start=True) if one[1] not in without]
        if not targets:
            raise NodeUnavailableError(nobody_here(self._name))
        if len(targets) > 1:
            targets = [one for one in targets if not one[1].control.silent] or targets
        if len(targets) == 1:
            writer, link = targets[0]
            return [(writer, link, range(len(keys)))]
        shares: dict[int, tuple[Writer, NodeLink, list[int]]] = {
            link.announcement.node_id: (writer, link, []) for writer, link in targets
        }
        blocks = list(zip(keys, sizes, strict=True))
        holders = self._holders(keys)
        least = min(sizes, default=0)
        homes = homes_of(blocks, holders, self._homes([link for _, link in targets], least))
        sent: dict[NodeLink, int] = {}
        for i, node_id in enumerate(homes):
            _, link, which = shares[node_id]
            which.append(i)
            sent[link] = sent.get(link, 0) + sizes[i]
        for link, size_bytes in sent.items():
            self._free[link] = max(self._free.get(link, 0) - size_bytes, 0)
        return [share for share in shares.values() if share[2]]

    def _homes(self, links: Sequence[NodeLink], least: int) -> list[Home]:
        """Nodes to save to, of blocks of at least `least` bytes."""
        now = self._now()
        if now >= self._free_until or not all(link in self._free for link in links):
            self._free = {link: link.control.directory.room() for link in links}
            self._free_until = now + ROOM_BELIEVED_S
        free = self._free
        for link in links:
            if least <= free.get(link, 0) < ROOM_MARGIN_BYTES:
                # What this client has sent may not have come there yet.
                free[link] = min(free[link], link.control.directory.room())
        return [
            Home(
                link.announcement.node_id,
                link.announcement.size_bytes,
                free.get(link, 0),
                min(link.announcement.size_bytes, VALUE_BYTES_MAX),
            )
            for link in links
        ]

    def _holders(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Ids of the nodes whose tables of hints lead to the block; hints forget some."""
        holders: dict[Key, int] = {}
        for attached in self._nodes.mapped:
            hinted = attached.shm.hinted
            for key in keys:
                image = hinted(key)[1]
                if image[KEY_PART] == key and fields(image) is not None:
                    holders[key] = attached.announcement.node_id
        return holders

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
        try:
            answers = self._reserve(wants, namespace_id, granted)
            done = True
            return answers
        finally:
            if not done:
                granted.close()

    def _reserve(self, wants: Wants, namespace_id: int, granted: Grants) -> list[ReserveAnswer]:
        if not wants.keys:
            return []
        answers: list[ReserveAnswer | None] = [None] * len(wants)
        todo: Sequence[int] = range(len(wants))
        sizes = wants.each_size()
        without: set[NodeLink] = set()
        failure: PeerError | None = None
        each_s = 0.0
        for _ in range(ROUNDS):
            try:
                plan = self.plan(picked(wants.keys, todo), picked(sizes, todo), without)
            except NodeUnavailableError as e:
                failure = failure or e
                break
            shares = [(writer, link, picked(todo, which)) for writer, link, which in plan]
            left: list[int] = []
            each_s = each_s or self.each_s()
            posts = [
                partial(writer.reserve_later, wants.of(which), namespace_id, granted)
                for writer, _, which in shares
            ]
            with each_within(each_s):
                asked = ask_all(posts, self.timeout_s, self._now)
            for (_, link, which), answer in zip(shares, asked, strict=True):
                if not isinstance(answer, PeerError):
                    for i, one in zip(which, answer, strict=True):
                        answers[i] = one
                    continue
                failure = answer
                without.add(link)
                left += which
            if not left:
                break
            todo = sorted(left)
        if failure is not None and all(answer is None for answer in answers):
            raise failure
        return [rejected(str(failure)) if answer is None else answer for answer in answers]

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
            holding = set(self._holders(keys).values())
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

    def touch(self, keys: Sequence[Key], now: float, *, at_once: bool = False) -> None:
        """Remember that `keys`, in the order of their prefix, were used; nodes are told now and
        then (design: the load path), or `at_once`."""
        touched = self._touched
        touched.add(keys)
        if now < self._touched_at + TOUCH_EVERY_S and not at_once:
            return
        self._touched_at, self._touched = now, Touched()
        runs = touched.runs()
        with suppress(NodeUnavailableError):
            for writer in self.writers():
                writer.touch(runs)

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

    def health(self) -> dict[str, str]:
        """Return what is wrong with each node, by name; nothing, when it answers and is ready."""
        found = {other.name: str(other) for other in self._nodes.strangers()}
        try:
            # One whose memory cannot be mapped is nobody to write to, and has its reason.
            for word, directory in self._nodes.writables():
                start = word.node_id, word.epoch
                if why_not := directory.why_not_ready():
                    found[directory.name] = why_not
                elif self._nodes.segment(*start, self._now()) is None:
                    found[directory.name] = str(self._nodes.unmapped_because.get(start, ""))
        except IndexUnavailableError:
            pass
        if not found and self._nodes.had and not self._nodes.living():
            found = dict.fromkeys(self._nodes.had, "it has ended, and no other is here")
        try:
            writers = self.writers()
        except NodeUnavailableError:
            return found
        for writer, by in in_turn(writers, self.timeout_s, self._now):
            link = writer.linked
            if link is None:
                continue
            directory = link.control.directory
            try:
                with until(by):
                    writer.stats()
                found[directory.name] = directory.why_not_ready()
            except _GONE as e:
                found[directory.name] = str(e)
        return found

    def listing(self, after: bytes, at_most: int) -> list[BlockRow]:
        """Return a page of at most `LIST_ROWS_MAX` rows of all nodes (core/memory/listed.py)."""
        rows = []
        for writer, by in in_turn(self.writers(), self.timeout_s, self._now):
            with until(by):
                rows.append(writer.listing(after, at_most))
        return list(islice(heapq.merge(*rows, key=lambda row: place_of(row.key)), at_most))
