"""Chooses the server for a request: the only one, or the master that Sentinel names.

`Route` is the contract; cluster.py implements it for the shards of a Redis Cluster.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol

from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.retry import Retry

from kvstore.errors import IndexUnavailableError
from kvstore.index.redis.connection import (
    FAILURES,
    Dial,
    ErrorReply,
    Link,
    Links,
    RefusedError,
    Reply,
)
from kvstore.index.redis.key_space import command
from kvstore.index.redis.password import Password
from kvstore.index.redis.url import Host, Target
from kvstore.system import tcp
from kvstore.system.on_failure import on_failure


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
        """Return all replies in order, within one time-out; error replies are values.

        `LostReply` stands for the replies of a shard that is away; raises when no shard is there.
        """
        ...

    def run_each(self, requests: Iterator[Request]) -> list[Reply]:
        """Do as `run`; where one server gets all requests, it works on the first while the next is
        made."""
        ...

    def ask_all(
        self, request: Callable[[Shard], bytes], replies: int, *, even_if_away: bool = False
    ) -> list[list[Reply]]:
        """Return the replies, `replies` of each, of all servers that hold keys, in the order of
        `shards`.

        `LostReply` as in `run`. With `even_if_away` a shard that failed lately is asked all the
        same.
        """
        ...

    def links_for(self, slot: int) -> Links:
        """Return the connections for several round trips with one server."""
        ...

    def shards(self) -> list[Shard]:
        """Return every server that holds keys, in a stable order."""
        ...

    def mistaken(self) -> None:
        """Find out anew at the next call which server is the right one: this one says READONLY."""
        ...

    def close(self) -> None: ...


class SingleRoute:
    """One server for everything."""

    clustered = False

    def __init__(self, links: Links) -> None:
        self._links = links

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        if len(requests) == 1:
            return self._links.run(requests[0].packed)
        return self._links.run(b"".join([r.packed for r in requests]), len(requests))

    def run_each(self, requests: Iterator[Request]) -> list[Reply]:
        return self._links.run_each(request.packed for request in requests)

    def ask_all(
        self, request: Callable[[Shard], bytes], replies: int, *, even_if_away: bool = False
    ) -> list[list[Reply]]:
        return [self._links.run(request(Shard(self._links, ())), replies)]

    def links_for(self, slot: int) -> Links:
        return self._links

    def shards(self) -> list[Shard]:
        return [Shard(self._links, ())]

    def mistaken(self) -> None:
        self._links.drop_idle()

    def close(self) -> None:
        self._links.close()


class _TcpConnection(Connection):
    """Opens a connection with one deadline for the look-up of the name and all its addresses."""

    def _connect(self) -> socket.socket:
        assert self.socket_connect_timeout is not None
        sock = tcp.connect(self.host, self.port, monotonic() + self.socket_connect_timeout)
        sock.settimeout(self.socket_timeout)
        return sock


class _TlsConnection(SSLConnection, _TcpConnection):
    """Adds TLS, for the host's name, to that."""


def _open(make: Callable[..., AbstractConnection], **options: object) -> AbstractConnection:
    """Return a connected socket. `AUTH` and the rest are sent by this module, so that one deadline
    spans them."""
    connection = make(
        **options, retry=Retry(NoBackoff(), 0), redis_connect_func=lambda connection: None
    )
    with on_failure(connection.disconnect):
        connection.connect()  # type: ignore[no-untyped-call]
    return connection


def _hello(username: str, given: Password, db: int, deadline: float) -> tuple[bytes, int]:
    requests = []
    password = given if isinstance(given, str) else given(deadline)
    if password:
        user = [username.encode()] if username else []
        requests.append(command(b"AUTH", *user, password.encode(errors="surrogateescape")))
    if db:
        requests.append(command(b"SELECT", b"%d" % db))
    return b"".join(requests), len(requests)


def host_dial(target: Target, host: Host) -> Dial:
    """Return what opens connections to `host` with the user and the TLS options of `target`."""

    def dial(deadline: float) -> tuple[AbstractConnection, bytes, int]:
        hello = _hello(target.username, target.password, target.db, deadline)
        return _open_host(target, host, deadline), *hello

    return dial


def _open_host(target: Target, host: Host, deadline: float) -> AbstractConnection:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    kind = _TlsConnection if target.tls else _TcpConnection
    options = dict(target.tls_options, host=host[0], port=host[1])
    return _open(kind, socket_timeout=left, socket_connect_timeout=left, **options)


def unix_dial(target: Target) -> Dial:
    def dial(deadline: float) -> tuple[AbstractConnection, bytes, int]:
        hello = _hello(target.username, target.password, target.db, deadline)
        left = max(deadline - monotonic(), 0.001)
        try:
            connection = _open(
                UnixDomainSocketConnection,
                path=target.path,
                socket_timeout=left,
                socket_connect_timeout=left,
            )
        except FAILURES as e:
            from kvstore.index.embedded_redis.supervisor import given_up

            why = given_up(Path(target.path))
            if not why:
                raise
            raise IndexUnavailableError(
                f"the embedded Redis at {target.label} was given up, {why}. The next process that "
                "starts without a URL in this run directory starts it anew; to use one that stays, "
                "set KVSTORE_URL"
            ) from e
        return connection, *hello

    return dial


class SentinelDial:
    """Asks the sentinels for the master at every connect, the last that knew it first."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._sentinels = list(target.hosts)
        self._ask = command(b"SENTINEL", b"get-master-addr-by-name", target.service.encode())

    def __call__(self, deadline: float) -> tuple[AbstractConnection, bytes, int]:
        hello = _hello(self._target.username, self._target.password, self._target.db, deadline)
        return _open_host(self._target, self._master(deadline), deadline), *hello

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

        def dial(deadline: float) -> tuple[AbstractConnection, bytes, int]:
            hello = _hello(target.sentinel_username, target.sentinel_password, 0, deadline)
            return _open_host(target, sentinel, deadline), *hello

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
            raise ValueError(f"invalid answer {str(reply)[:80]!r}")
        return reply[0].decode(), int(reply[1])
