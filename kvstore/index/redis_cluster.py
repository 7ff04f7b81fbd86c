"""Redis Cluster: which shard holds a key, and one round trip to all that are needed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic

from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from kvstore.errors import IndexUnavailableError
from kvstore.index.redis_link import (
    FAILURES,
    ErrorReply,
    Link,
    Links,
    RefusedError,
    Reply,
    refused,
)
from kvstore.index.redis_route import Request, Shard, host_dial
from kvstore.index.redis_url import Host, Target
from kvstore.index.redis_wire import command

CLUSTER_ATTEMPTS_MAX = 3
"""How often a request is sent again after MOVED, each time with a new slot map."""
CLUSTER_NODES_MAX = 1000


class ClusterRoute:
    """One set of connections a shard, and a slot map that is kept until MOVED says otherwise.

    Masters only. Needs the right to `CLUSTER SLOTS`.
    """

    clustered = True

    def __init__(self, target: Target, *, timeout_s: float, links_max: int) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._links_max = links_max
        self._lock = threading.Lock()
        self._closed = False
        self._shards: dict[Host, Shard] = {}
        self._owner: list[Links | None] = []
        """By slot; empty when it must be fetched."""

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        deadline = monotonic() + self._timeout_s
        replies: list[Reply] = [None] * len(requests)
        todo = list(range(len(requests)))
        for _ in range(CLUSTER_ATTEMPTS_MAX):
            self._run_once(requests, todo, replies, deadline)
            todo = [i for i in todo if _moved(replies[i])]
            if not todo:
                return replies
            self.mistaken()
        return replies

    def links_for(self, slot: int) -> Links:
        return self._links_of(slot, monotonic() + self._timeout_s)

    def shards(self) -> list[Shard]:
        self._slot_map(monotonic() + self._timeout_s)
        return [shard for _, shard in sorted(self._shards.items())]

    def mistaken(self) -> None:
        self._owner = []

    def close(self) -> None:
        self._closed = True
        for shard in list(self._shards.values()):
            shard.links.close()

    def _run_once(
        self, requests: Sequence[Request], todo: list[int], replies: list[Reply], deadline: float
    ) -> None:
        """Send to every shard first, then read: the shards work at the same time."""
        by_shard: dict[Links, list[int]] = {}
        for i in todo:
            by_shard.setdefault(self._links_of(requests[i].slot, deadline), []).append(i)
        packed = {
            links: b"".join([requests[i].packed for i in chosen])
            for links, chosen in by_shard.items()
        }
        try:
            if len(by_shard) == 1:
                links, chosen = by_shard.popitem()
                answers = [(chosen, links.run(packed[links], len(chosen), deadline))]
            else:
                answers = _scatter(by_shard, packed, deadline)
        except IndexUnavailableError:
            self.mistaken()
            raise
        for chosen, answer in answers:
            for i, reply in zip(chosen, answer, strict=True):
                replies[i] = self._asked(reply, requests[i], deadline)

    def _asked(self, reply: Reply, request: Request, deadline: float) -> Reply:
        """Follow an ASK (the slot is on its way to another shard), once."""
        if not (isinstance(reply, ErrorReply) and str(reply).startswith("ASK ")):
            return reply
        host, _, port = str(reply).split(" ")[2].rpartition(":")
        shard = self._shards.get((host, int(port)))
        if shard is None:
            self.mistaken()
            return reply
        return shard.links.run(command(b"ASKING") + request.packed, 2, deadline)[1]

    def _links_of(self, slot: int, deadline: float) -> Links:
        owner = self._owner or self._slot_map(deadline)
        links = owner[slot]
        if links is None:
            self.mistaken()
            raise IndexUnavailableError(f"{self._target.label}: no shard serves slot {slot}")
        return links

    def _slot_map(self, deadline: float) -> list[Links | None]:
        if self._closed:
            raise IndexUnavailableError(f"the index at {self._target.label} was closed")
        if not self._lock.acquire(timeout=max(deadline - monotonic(), 0)):
            raise IndexUnavailableError(f"{self._target.label}: the slot map is being fetched")
        try:
            if not self._owner:
                self._owner = self._fetch_slots(deadline)
            return self._owner
        finally:
            self._lock.release()

    def _fetch_slots(self, deadline: float) -> list[Links | None]:
        why: Exception | None = None
        hosts = list(dict.fromkeys([*self._shards, *self._target.hosts]))[:CLUSTER_NODES_MAX]
        for tried, host in enumerate(hosts):
            share = monotonic() + (deadline - monotonic()) / (len(hosts) - tried)
            link = Link(host_dial(self._target, host), max(share - monotonic(), 0.001))
            try:
                (reply,) = link.run(command(b"CLUSTER", b"SLOTS"), 1, share)
                if isinstance(reply, ErrorReply):
                    raise refused(f"{host[0]}:{host[1]}", reply)
                return self._use(_slot_ranges(reply, host))
            except (IndexUnavailableError, RefusedError, *FAILURES) as e:
                why = e
            finally:
                link.drop()
        raise IndexUnavailableError(f"Redis Cluster at {self._target.label}: {why}") from why

    def _use(self, ranges: list[tuple[int, int, Host]]) -> list[Links | None]:
        old, slots = self._shards, dict[Host, list[int]]()
        for first, last, host in ranges:
            slots.setdefault(host, []).extend(range(first, last + 1))
        self._shards = {
            host: Shard(old[host].links if host in old else self._links(host), tuple(numbers))
            for host, numbers in slots.items()
        }
        for host, shard in old.items():
            if host not in slots:
                shard.links.close()
        owner: list[Links | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for shard in self._shards.values():
            for slot in shard.slots:
                owner[slot] = shard.links
        return owner

    def _links(self, host: Host) -> Links:
        return Links(
            host_dial(self._target, host),
            f"{host[0]}:{host[1]}",
            timeout_s=self._timeout_s,
            links_max=self._links_max,
        )


def _moved(reply: Reply) -> bool:
    return isinstance(reply, ErrorReply) and str(reply).startswith("MOVED ")


def _label(links: Links) -> str:
    return links.label


def _scatter(
    by_shard: dict[Links, list[int]], packed: dict[Links, bytes], deadline: float
) -> list[tuple[list[int], list[Reply]]]:
    taken: list[tuple[Links, Link]] = []
    sent: dict[Links, Link] = {}
    answers = []
    try:
        # In one order everywhere: two calls that hold what the other waits for would both
        # wait out their time.
        for links in sorted(by_shard, key=_label):
            link = links.take(deadline)
            taken.append((links, link))
            try:
                link.send(packed[links], deadline)
                sent[links] = link
            except FAILURES:
                continue  # the server closed an idle connection, or it is down: run() tells
        for links, chosen in by_shard.items():
            try:
                reply = sent[links].receive(len(chosen), deadline) if links in sent else None
            except ConnectionError:
                reply = None
            except FAILURES as e:
                raise links.unavailable(e) from e
            answers.append((chosen, reply))
    except BaseException:
        for _, link in taken:
            link.drop()  # its replies were not read
        raise
    finally:
        for links, link in taken:
            links.give(link)
    return [
        (chosen, links.run(packed[links], len(chosen), deadline) if reply is None else reply)
        for (links, chosen), (_, reply) in zip(by_shard.items(), answers, strict=True)
    ]


def _slot_ranges(reply: Reply, asked: Host) -> list[tuple[int, int, Host]]:
    """`CLUSTER SLOTS` as (first, last, master); an empty host is the one that was asked."""
    try:
        ranges = []
        for first, last, master, *_ in reply:
            host = master[0].decode() if master[0] not in (None, b"", b"?") else asked[0]
            if not 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
                raise ValueError(first)
            ranges.append((first, last, (host, int(master[1]))))
    except (TypeError, ValueError, IndexError, AttributeError) as e:
        raise IndexUnavailableError(f"CLUSTER SLOTS cannot be read: {e}") from e
    return ranges
