"""Parses where a node serves: `tcp://HOST:PORT`, or `tls://HOST:PORT` with a certificate."""

from __future__ import annotations

import ipaddress
import re
import socket
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from kvstore.errors import UsageError

STREAM_PORT = 7600
"""Where a node serves other hosts, unless it is told another."""
ADDRESSES_KEPT_MAX = 1024
"""Addresses that are remembered: each read looks at that of its node."""
WILDCARDS = ("", "0.0.0.0", "::")
_ANYWHERE = (socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")
"""Documentation addresses: nothing is sent there, only the route to them is looked up."""
_NAME = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}")
_ADVERTISED = re.compile(
    r"\[(?P<v6>[^][]*:[^][]*)](:(?P<port_v6>\d{1,5}))?"
    r"|(?P<host>[^][:]+|[^][:]*:[^][]*:[^][]*)(:(?P<port>\d{1,5}))?",
    re.ASCII,
)
_LISTEN_MUST = "must be HOST:PORT, [V6]:PORT or :PORT, with port 0 for a free one"


class Address(NamedTuple):
    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@lru_cache(ADDRESSES_KEPT_MAX)
def parse(url: str) -> Address:
    """Return the address that `url` names. Raises `UsageError` unless it is `tcp://HOST:PORT` or
    `tls://HOST:PORT`."""
    try:
        parts = urlsplit(url)
        address = Address(parts.scheme, parts.hostname or "", parts.port or 0)
    except ValueError as e:
        raise UsageError("address", url, str(e)) from e
    if address.scheme not in ("tcp", "tls") or not address.host or not address.port:
        raise UsageError("address", url, "must be tcp://HOST:PORT or tls://HOST:PORT")
    return address


def parse_listen(
    text: str, field: str = "listen", port_default: int | None = None
) -> tuple[str, int]:
    """Return (host, port) of `HOST:PORT`, `[V6]:PORT` or `:PORT`; port 0 takes a free one. With
    `port_default` also of `HOST`, `V6` or `[V6]`.

    Raises `UsageError`, which names `field`.
    """
    bare = _ADVERTISED.fullmatch(text) if port_default is not None else None
    if port_default and bare and not (bare["port"] or bare["port_v6"] or text.isdecimal()):
        return bare["v6"] or bare["host"], port_default
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(field, text, _LISTEN_MUST)
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse_advertise(text: str) -> tuple[str, int | None]:
    """Return (host, port) of `HOST`, `HOST:PORT`, `V6` or `[V6]:PORT`; the port is None where none
    is named.

    Raises `UsageError` for what no other host could connect to.
    """
    found = _ADVERTISED.fullmatch(text)
    host = (found["v6"] or found["host"]) if found else ""
    port = int(found["port_v6"] or found["port"] or 0) if found else 0
    try:
        reachable = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        # The last part of a name is no number: else it is an address that was mistyped.
        reachable = bool(_NAME.fullmatch(host)) and not host.rpartition(".")[2].isdecimal()
    named = bool(found and (found["port_v6"] or found["port"]))
    if not reachable or (named and not 0 < port <= 65535):
        must = "must be HOST, HOST:PORT or [V6]:PORT, as other hosts reach this node"
        raise UsageError("advertise", text, must)
    return host, port or None


def own_address(*, v6: bool = False) -> str:
    """Return the address of this host from which it would reach others, of IPv6 only with `v6`;
    loopback when there is none."""
    for family, there in _ANYWHERE[: 1 + v6]:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((there, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
