"""Names the Redis that a URL leads to, as far as that can be told without asking it."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from kvstore.index.redis.url import Target

NETWORK = Path("/proc/self/ns/net")


def identity_of(target: Target) -> str:
    """Return a text that is the same for two processes of this host only if their targets are one
    Redis; empty where nothing can be told. It contains no user name, no password and nothing of
    TLS.

    A Unix socket is known by the directory that it is in, which stays while servers come and go,
    and is the same in containers that share it. An address of this host itself is that of its
    network namespace: each container has its own.
    """
    if target.path:
        socket = Path(target.path)
        try:
            there = socket.parent.stat()
        except OSError:
            return ""
        return f"unix:{there.st_dev}:{there.st_ino}/{socket.name}/{target.db}"
    where = ",".join(sorted(f"{host.lower()}:{port}" for host, port in target.hosts))
    if any(map(_is_loopback, (host for host, _ in target.hosts))):
        try:
            network = NETWORK.stat()
        except OSError:
            return ""
        where = f"{network.st_dev}:{network.st_ino}@{where}"
    return f"{target.kind}:{where}/{target.service}/{target.db}"


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
