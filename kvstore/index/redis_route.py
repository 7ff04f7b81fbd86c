"""Which server answers: the one, the master that Sentinel names, or a cluster's shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple, Protocol

from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from redis.retry import Retry

from kvstore.errors import IndexUnavailableError
from kvstore.index.redis_link import (
    FAILURES,
    Dial,
    ErrorReply,
    Link,
    Links,
    RefusedError,
    Reply,
    refused,
)
from kvstore.index.redis_url import Host, Target
from kvstore.index.redis_wire import command

CLUSTER_ATTEMPTS_MAX = 3
"""How often a request is sent again after MOVED, each time with a new slot map."""
CLUSTER_NODES_MAX = 1000


class Request(NamedTuple):
    """One command with one reply."""

    packed: bytes
    slot: int = -1
    """Cluster slot of its keys; -1 where there is no cluster."""


class Shard(NamedTuple):
    links: Links
    slots: tuple[int, ...]
    """The slots it serves; empty where there is no cluster."""


class Route(Protocol):
    """Sends commands to where their keys are."""

    clustered: bool

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """All replies in order, within one time-out; error replies are values."""
        ...

    def links_for(self, slot: int) -> Links:
        """The connections for several round trips with one server."""
        ...

    def shards(self) -> list[Shard]:
        """Every server that holds keys, in a stable order."""
        ...

    def mistaken(self) -> None:
        """The server is not the one for us (READONLY): find out anew at the next call."""
        ...

    def close(self) -> None: ...


def open_route(target: Target, *, timeout_s: float, links_max: int) -> Route:
    """The route to `target`; connects to nothing yet."""
    if target.kind == "cluster":
        return ClusterRoute(target, timeout_s=timeout_s, links_max=links_max)
    if target.kind == "sentinel":
        dial: Dial = SentinelDial(target)
    elif target.path:
        dial = _unix_dial(target)
    else:
        dial = host_dial(target, target.hosts[0])
    return SingleRoute(Links(dial, target.label, timeout_s=timeout_s, links_max=links_max))


class SingleRoute:
    """One server for everything."""

    clustered = False

    def __init__(self, links: Links) -> None:
        self._links = links

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        if len(requests) == 1:
            return self._links.run(requests[0].packed)
        return self._links.run(b"".join([r.packed for r in requests]), len(requests))

    def links_for(self, slot: int) -> Links:
        return self._links

    def shards(self) -> list[Shard]:
        return [Shard(self._links, ())]

    def mistaken(self) -> None:
        self._links.drop_idle()

    def close(self) -> None:
        self._links.close()


def _open(make: Callable[..., AbstractConnection], **options: object) -> AbstractConnection:
    """A connected socket; `AUTH` and the rest are ours, so that one deadline spans them."""
    connection = make(
        **options, retry=Retry(NoBackoff(), 0), redis_connect_func=lambda connection: None
    )
    try:
        connection.connect()  # type: ignore[no-untyped-call]
    except BaseException:
        connection.disconnect()  # type: ignore[no-untyped-call]
        raise
    return connection


def _hello(username: str, password: str, db: int) -> tuple[bytes, int]:
    requests = []
    if password:
        user = [username.encode()] if username else []
        requests.append(command(b"AUTH", *user, password.encode()))
    if db:
        requests.append(command(b"SELECT", b"%d" % db))
    return b"".join(requests), len(requests)


def host_dial(target: Target, host: Host) -> Dial:
    """Opens connections to `host` with the user and the TLS options of `target`.

    Resolving a host's name has no time-out of its own: give addresses, or a resolver
    that answers, where that matters.
    """
    hello, replies = _hello(target.username, target.password, target.db)

    def dial(deadline: float) -> tuple[AbstractConnection, bytes, int]:
        return _open_host(target, host, deadline), hello, replies

    return dial


def _open_host(target: Target, host: Host, deadline: float) -> AbstractConnection:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    kind = SSLConnection if target.tls else Connection
    options = dict(target.tls_options, host=host[0], port=host[1])
    return _open(kind, socket_timeout=left, socket_connect_timeout=left, **options)


def _unix_dial(target: Target) -> Dial:
    hello, replies = _hello(target.username, target.password, target.db)

    def dial(deadline: float) -> tuple[AbstractConnection, bytes, int]:
        left = max(deadline - monotonic(), 0.001)
        connection = _open(
            UnixDomainSocketConnection,
            path=target.path,
            socket_timeout=left,
            socket_connect_timeout=left,
        )
        return connection, hello, replies

    return dial


class SentinelDial:
    """Asks the sentinels for the master at every connect, the last that knew it first."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._sentinels = list(target.hosts)
        self._hello = _hello(target.username, target.password, target.db)
        self._ask = command(b"SENTINEL", b"get-master-addr-by-name", target.service.encode())

    def __call__(self, deadline: float) -> tuple[AbstractConnection, bytes, int]:
        return _open_host(self._target, self._master(deadline), deadline), *self._hello

    def _master(self, deadline: float) -> Host:
        why = "none of them knows the service"
        sentinels = list(self._sentinels)
        for tried, sentinel in enumerate(sentinels):
            # Each gets its share of the time, or one that hangs would use up all of it.
            share = monotonic() + (deadline - monotonic()) / (len(sentinels) - tried + 1)
            try:
                master = self._answer(sentinel, share)
            except (IndexUnavailableError, RefusedError, *FAILURES) as e:
                why = f"{sentinel[0]}:{sentinel[1]}: {e}"
                continue
            if master is not None:
                self._sentinels = [sentinel, *(s for s in sentinels if s != sentinel)]
                return master
        raise IndexUnavailableError(f"Sentinel at {self._target.label}: {why}")

    def _answer(self, sentinel: Host, deadline: float) -> Host | None:
        target = self._target
        hello, replies = _hello(target.sentinel_username, target.sentinel_password, 0)

        def dial(deadline: float) -> tuple[AbstractConnection, bytes, int]:
            return _open_host(target, sentinel, deadline), hello, replies

        link = Link(dial, deadline - monotonic())
        try:
            (reply,) = link.run(self._ask, 1, deadline)
        finally:
            link.drop()
        if isinstance(reply, ErrorReply):
            raise RefusedError(reply)
        if reply is None:
            return None
        if not isinstance(reply, list) or list(map(type, reply)) != [bytes, bytes]:
            raise ValueError(f"odd answer {str(reply)[:80]!r}")
        return reply[0].decode(), int(reply[1])


class ClusterRoute:
    """Redis Cluster: one set of connections a shard, a slot map kept until MOVED says otherwise.

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


def _scatter(
    by_shard: dict[Links, list[int]], packed: dict[Links, bytes], deadline: float
) -> list[tuple[list[int], list[Reply]]]:
    taken: list[tuple[Links, Link]] = []
    sent: dict[Links, Link] = {}
    answers = []
    try:
        for links in by_shard:
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
