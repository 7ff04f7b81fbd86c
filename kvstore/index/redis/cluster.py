"""Sends requests to the shards of a Redis Cluster that hold their keys, in one round trip.

A shard that fails is away: its keys are misses and nobody waits for it, until its breaker lets a
request try it again. The slot map says which shard serves a slot; it is fetched again after a
shard has failed or has answered MOVED.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from kvstore.circuit_breaker import Breaker, BreakerState
from kvstore.errors import IndexBreakerOpenError, IndexDeadlineError, IndexUnavailableError
from kvstore.index.base import allowed_s
from kvstore.index.redis.connection import (
    FAILURES,
    ErrorReply,
    Link,
    Links,
    LostReply,
    RefusedError,
    Reply,
    refused,
)
from kvstore.index.redis.key_space import command
from kvstore.index.redis.route import Request, Shard, host_dial
from kvstore.index.redis.url import Host, Target
from kvstore.system.fork import in_each_child

CLUSTER_ATTEMPTS_MAX = 3
"""Attempts of a request after MOVED, each with a new slot map."""
CLUSTER_NODES_MAX = 1000
PORT_DIGITS_MAX = 5
READ_ALREADY_S = 0.002
"""Time to read an answer that has arrived, when another shard used up the time."""

_NOT_SERVING = ("CLUSTERDOWN ", "LOADING ", "MASTERDOWN ")

_Wanted = dict[Links, tuple[bytes, int]]
"""What to send to each shard, and how many replies it gives."""

log = logging.getLogger("kvstore.index.redis.index")


class ClusterRoute:
    """One set of connections a shard, and a slot map that is kept until MOVED says otherwise.

    Masters only. Needs the right to `CLUSTER SLOTS`. A shard that fails is away, behind a
    breaker of its own, while the others go on.
    """

    clustered = True

    def __init__(self, target: Target, *, timeout_s: float, links_max: int) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._links_max = links_max
        self._lock = threading.RLock()
        self._closed = False
        self._shards: dict[Host, Shard] = {}
        self._away: dict[Links, Breaker] = {}
        """A breaker for each shard; a shard whose breaker is not closed is away, and so are its
        keys. The mapping is replaced as a whole, because other threads read it."""
        self._judging = threading.RLock()
        """Guards each look at a breaker and each change: several threads ask one shard."""
        self._owner: list[Links | None] = []
        """The shard of each slot; empty when the slot map must be fetched."""
        in_each_child(self)

    def after_fork_in_child(self) -> None:
        """Make new locks: a thread of the parent may have been fetching the slot map, or judging a
        shard."""
        self._lock = threading.RLock()
        self._judging = threading.RLock()

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        deadline = monotonic() + allowed_s(self._timeout_s)
        replies: list[Reply] = [None] * len(requests)
        todo = list(range(len(requests)))
        for _ in range(CLUSTER_ATTEMPTS_MAX):
            self._run_once(requests, todo, replies, deadline)
            todo = [i for i in todo if _moved(replies[i])]
            if not todo:
                return replies
            self.mistaken()
        return replies

    def run_each(self, requests: Iterator[Request]) -> list[Reply]:
        return self.run(list(requests))

    def links_for(self, slot: int) -> Links:
        return self._links_of(slot, monotonic() + allowed_s(self._timeout_s))

    def shards(self) -> list[Shard]:
        self._slot_map(monotonic() + allowed_s(self._timeout_s))
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
        owner = self._owner or self._slot_map(deadline)
        by_shard: dict[Links | None, list[int]] = {}
        for i in todo:
            by_shard.setdefault(owner[requests[i].slot], []).append(i)
        unserved = by_shard.pop(None, [])
        if unserved:
            self.mistaken()
            why = IndexUnavailableError(f"{self._target.label}: no shard serves some slots")
            for i in unserved:
                replies[i] = LostReply(why)
        wanted = {
            links: (b"".join([requests[i].packed for i in chosen]), len(chosen))
            for links, chosen in by_shard.items()
            if links is not None
        }
        answers = self._ask(wanted, deadline)
        for links, chosen in by_shard.items():
            answer = answers[links] if links is not None else []
            if isinstance(answer, IndexUnavailableError):
                for i in chosen:
                    replies[i] = LostReply(answer)
                continue
            for i, reply in zip(chosen, answer, strict=True):
                replies[i] = self._asked(reply, requests[i], deadline)
        self._raise_when_all_are_away()

    def ask_all(
        self, request: Callable[[Shard], bytes], replies: int, *, even_if_away: bool = False
    ) -> list[list[Reply]]:
        deadline = monotonic() + allowed_s(self._timeout_s)
        shards = self.shards()
        wanted = {shard.links: (request(shard), replies) for shard in shards}
        answers = self._ask(wanted, deadline, even_if_away=even_if_away)
        self._raise_when_all_are_away()
        return [
            [LostReply(answer)] * replies if isinstance(answer, IndexUnavailableError) else answer
            for answer in (answers[shard.links] for shard in shards)
        ]

    def _ask(
        self, wanted: _Wanted, deadline: float, *, even_if_away: bool = False
    ) -> dict[Links, list[Reply] | IndexUnavailableError]:
        """Return what each shard answers, or why it does not; one that is away costs nothing."""
        answers: dict[Links, list[Reply] | IndexUnavailableError] = {}
        asked: _Wanted = {}
        away = self._away
        for links, request in wanted.items():
            if links not in away:  # another thread has fetched a newer map meanwhile
                answers[links] = IndexUnavailableError(f"{links.label} has left the cluster")
            elif self._allows(away[links]) or even_if_away:
                asked[links] = request
            else:
                answers[links] = IndexBreakerOpenError(f"Redis at {links.label} failed lately")
        _scatter(asked, answers, deadline)
        late = False
        for links in asked:
            answer = answers[links] = _or_away(links, answers[links])
            if not isinstance(answer, IndexUnavailableError):
                self._succeeded(away[links])
                continue
            self.mistaken()
            hung = isinstance(answer, IndexDeadlineError)
            # The first one that hangs uses up the time of those that are read after it.
            if not (hung and late):
                self._failed(away[links], answer, hung=hung)
            late = late or hung
        return answers

    def _allows(self, breaker: Breaker) -> bool:
        if breaker.state is BreakerState.CLOSED:  # nearly always
            return True
        with self._judging:
            return breaker.allows(monotonic())

    def _succeeded(self, breaker: Breaker) -> None:
        # Nearly always it says nothing new: then it needs no lock.
        if breaker.failures or breaker.state is not BreakerState.CLOSED:
            with self._judging:
                breaker.succeeded()

    def _failed(self, breaker: Breaker, why: IndexUnavailableError, *, hung: bool) -> None:
        with self._judging:
            before = breaker.state
            breaker.failed(monotonic(), hung=hung)
        if before is BreakerState.CLOSED and breaker.state is BreakerState.OPEN:
            log.warning("a Redis shard does not answer, so its keys are misses: %s", why)

    def _raise_when_all_are_away(self) -> None:
        if all(breaker.state is not BreakerState.CLOSED for breaker in self._away.values()):
            raise IndexUnavailableError(f"Redis Cluster at {self._target.label}: no shard answers")

    def _asked(self, reply: Reply, request: Request, deadline: float) -> Reply:
        """Follow an ASK (the slot is on its way to another shard), once."""
        if not (isinstance(reply, ErrorReply) and str(reply).startswith("ASK ")):
            return reply
        host, _, port = str(reply).rpartition(" ")[2].rpartition(":")
        number = int(port) if port.isdecimal() and len(port) <= PORT_DIGITS_MAX else -1
        shard = self._shards.get((host, number))
        if shard is None:
            self.mistaken()
            return reply
        try:
            return shard.links.run(command(b"ASKING") + request.packed, 2, deadline)[1]
        except IndexUnavailableError as e:
            return LostReply(e)

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
        try:
            if not self._lock.acquire(timeout=max(deadline - monotonic(), 0)):
                raise IndexUnavailableError(f"{self._target.label}: the slot map is being fetched")
            if not self._owner:
                self._owner = self._fetch_slots(deadline)
            return self._owner
        finally:
            try:  # noqa: SIM105  # nothing is called before: a signal could end it there
                self._lock.release()
            except RuntimeError:  # it was never got
                pass

    def _fetch_slots(self, deadline: float) -> list[Links | None]:
        why: Exception | None = None
        hosts = list(dict.fromkeys([*self._present(), *self._target.hosts, *self._shards]))
        del hosts[CLUSTER_NODES_MAX:]
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

    def _present(self) -> list[Host]:
        return [
            host
            for host, shard in self._shards.items()
            if self._away[shard.links].state is BreakerState.CLOSED
        ]

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
        links = [shard.links for shard in self._shards.values()]
        self._away = {one: self._away.get(one) or Breaker() for one in links}
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


def _or_away(
    links: Links, answer: list[Reply] | IndexUnavailableError
) -> list[Reply] | IndexUnavailableError:
    """Return the replies, with a shard that says that it cannot serve (yet) counted as away."""
    if isinstance(answer, list):
        for reply in answer:
            if isinstance(reply, ErrorReply) and str(reply).startswith(_NOT_SERVING):
                return refused(links.label, reply)
    return answer


def _label(links: Links) -> str:
    return links.label


def _scatter(
    wanted: _Wanted,
    answers: dict[Links, list[Reply] | IndexUnavailableError],
    deadline: float,
) -> None:
    """Put the answer of each of `wanted`, or why there is none, into `answers`."""
    taken: list[tuple[Links, Link]] = []
    sent: dict[Links, Link] = {}
    done = False
    try:
        # In one order everywhere: two calls that hold what the other waits for would both
        # wait out their time.
        for links in sorted(wanted, key=_label):
            try:
                link = links.take(deadline)
            except IndexUnavailableError as e:
                answers[links] = e
                continue
            taken.append((links, link))
            try:
                link.send(wanted[links][0], deadline)
                sent[links] = link
            except (RefusedError, *FAILURES):
                continue  # the server closed an idle connection, or it is down: run() tells
        for links, link in sent.items():
            try:
                # Answers that came while another shard was waited for lie in the socket.
                answers[links] = link.receive(
                    wanted[links][1], max(deadline, monotonic() + READ_ALREADY_S)
                )
            except ConnectionError:
                continue
            except FAILURES as e:
                answers[links] = links.unavailable(e)
        done = True
    finally:
        for links, link in taken:
            if not done:
                link.drop()  # its replies were not read
            links.give(link)
    for links, (packed, replies) in wanted.items():
        if links in answers:
            continue
        try:
            answers[links] = links.run(packed, replies, deadline)
        except IndexUnavailableError as e:
            answers[links] = e


def _slot_ranges(reply: Reply, asked: Host) -> list[tuple[int, int, Host]]:
    """Return `CLUSTER SLOTS` as (first, last, master); an empty host is the one that was asked."""
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
