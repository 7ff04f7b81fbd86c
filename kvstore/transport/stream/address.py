"""Parses where a node serves: `tcp://HOST:PORT`, or `tls://HOST:PORT` with a certificate."""

from __future__ import annotations

import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from kvstore.errors import UsageError

WILDCARDS = ("", "0.0.0.0", "::")
_ANYWHERE = (socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")
"""Documentation addresses: nothing is sent there, only the way towards them is looked up."""


class Address(NamedTuple):
    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse(url: str) -> Address:
    """The address that `url` names. Raises `UsageError` unless it is `tcp://HOST:PORT` or
    `tls://HOST:PORT`."""
    try:
        parts = urlsplit(url)
        address = Address(parts.scheme, parts.hostname or "", parts.port or 0)
    except ValueError as e:
        raise UsageError("address", url, str(e)) from e
    if address.scheme not in ("tcp", "tls") or not address.host or not address.port:
        raise UsageError("address", url, "must be tcp://HOST:PORT or tls://HOST:PORT")
    return address


def parse_listen(text: str, field: str = "listen") -> tuple[str, int]:
    """(host, port) of `HOST:PORT`, `[V6]:PORT` or `:PORT`; port 0 takes a free one.

    Raises `UsageError`, which names `field`.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(field, text, "must be HOST:PORT, with port 0 for a free one")
    return host.removeprefix("[").removesuffix("]"), int(port)


def own_address(*, v6: bool = False) -> str:
    """The address of this host from which it would reach others, of IPv6 only with `v6`; loopback
    when there is none."""
    for family, there in _ANYWHERE[: 1 + v6]:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((there, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
