"""How connections to Redis are opened: TCP, TLS, a Unix socket, the master that Sentinel names.

Plain sockets and the standard library's TLS: see docs/decisions/0025-start-fast.md.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from time import monotonic

from kvstore.errors import IndexUnavailableError
from kvstore.index.redis_link import FAILURES, Dial, ErrorReply, Link, RefusedError
from kvstore.index.redis_url import Host, Target
from kvstore.index.redis_wire import command

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""An idle connection whose peer vanished is noticed after 45 s, where the system can be told so."""

_VERIFY = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}


def host_dial(target: Target, host: Host) -> Dial:
    """Opens connections to `host` with the user and the TLS options of `target`.

    Resolving a host's name has no time-out of its own: give addresses, or a resolver
    that answers, where that matters.
    """
    hello, replies = _hello(target.username, target.password, target.db)

    def dial(deadline: float) -> tuple[socket.socket, bytes, int]:
        return _open_host(target, host, deadline), hello, replies

    return dial


def unix_dial(target: Target) -> Dial:
    hello, replies = _hello(target.username, target.password, target.db)

    def dial(deadline: float) -> tuple[socket.socket, bytes, int]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_left(deadline))
            sock.connect(target.path)
        except BaseException:
            sock.close()
            raise
        return sock, hello, replies

    return dial


def _hello(username: str, password: str, db: int) -> tuple[bytes, int]:
    requests = []
    if password:
        user = [username.encode()] if username else []
        requests.append(command(b"AUTH", *user, password.encode()))
    if db:
        requests.append(command(b"SELECT", b"%d" % db))
    return b"".join(requests), len(requests)


def _open_host(target: Target, host: Host, deadline: float) -> socket.socket:
    sock = socket.create_connection(host, timeout=_left(deadline))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if not target.tls:
            return sock
        sock.settimeout(_left(deadline))
        return _tls_context(target.tls_options).wrap_socket(sock, server_hostname=host[0])
    except BaseException:
        sock.close()
        raise


def _tls_context(options: Mapping[str, object]) -> ssl.SSLContext:
    """Made for each connection, so that renewed certificates are taken."""

    def text(name: str) -> str | None:
        value = options.get(name)
        return str(value) if value is not None else None

    context = ssl.create_default_context(cafile=text("ssl_ca_certs"), capath=text("ssl_ca_path"))
    verify = _VERIFY[text("ssl_cert_reqs") or "required"]
    context.check_hostname = bool(options["ssl_check_hostname"]) and verify is not ssl.CERT_NONE
    context.verify_mode = verify
    certificate = text("ssl_certfile") or text("ssl_keyfile")
    if certificate is not None:
        context.load_cert_chain(certificate, text("ssl_keyfile"), text("ssl_password"))
    return context


def _left(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class SentinelDial:
    """Asks the sentinels for the master at every connect, the last that knew it first."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._sentinels = list(target.hosts)
        self._hello = _hello(target.username, target.password, target.db)
        self._ask = command(b"SENTINEL", b"get-master-addr-by-name", target.service.encode())

    def __call__(self, deadline: float) -> tuple[socket.socket, bytes, int]:
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

        def dial(deadline: float) -> tuple[socket.socket, bytes, int]:
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
