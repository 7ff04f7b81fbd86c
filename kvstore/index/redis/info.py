"""Asks the servers behind a URL for INFO, for people to read; loads do not ask."""

from __future__ import annotations

from contextlib import closing

from kvstore.errors import IndexUnavailableError
from kvstore.index.redis.connection import ErrorReply, Reply
from kvstore.index.redis.index import open_route
from kvstore.index.redis.key_space import command
from kvstore.index.redis.url import parse_url


def server_info(url: str, timeout_s: float) -> list[dict[str, str]]:
    """Return the fields of INFO, and `maxmemory_policy`, of every server that holds keys.

    Raises `UsageError` for a bad URL, `IndexUnavailableError` for a server that does not answer in
    time or may not be asked.
    """
    with closing(open_route(parse_url(url), timeout_s=timeout_s, links_max=1)) as route:
        found = []
        for shard in route.shards():
            (reply,) = shard.links.run(command(b"INFO"), 1)
            found.append(_fields(reply))
        return found


def _fields(reply: Reply) -> dict[str, str]:
    if isinstance(reply, ErrorReply) or not isinstance(reply, bytes):
        raise IndexUnavailableError(f"Redis refuses INFO: {str(reply)[:80]}")
    pairs = (
        line.split(":", 1)
        for line in reply.decode("utf-8", "replace").splitlines()
        if ":" in line and not line.startswith("#")
    )
    return {pair[0]: pair[1] for pair in pairs}
