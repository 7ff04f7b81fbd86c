"""Keeps the announcements of nodes in Redis: a key each that expires, and a set of all ids.

The set is what readers find the nodes by: no walk over the keys of the database. An id
stays in it when its node dies; whoever announces takes those out now and then. A node
that was taken out though it lives is back with its next heartbeat.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from redis.crc import key_slot

from kvstore.errors import IndexUnavailableError
from kvstore.index.checks import check_announcement, check_node_id
from kvstore.index.redis.connection import LostReply, Reply
from kvstore.index.redis.key_space import KeySpace, command
from kvstore.index.redis.replies import Replies
from kvstore.index.redis.route import Request, Route

NODES_MAX = 4096
SWEPT_EVERY = 60
"""Announcements of one node between two searches for the ids of dead ones."""

_NODE_ID = re.compile(rb"[0-9a-f]{16}")
_VOLATILE = re.compile(rb"maxmemory:[1-9].*maxmemory_policy:(volatile-\w+)", re.DOTALL)
"""The word of INFO for policies that evict only keys that expire; of ours only announcements do."""
_EVICTED = (
    "Redis has maxmemory-policy %s: when full, it evicts the announcements of nodes, and other "
    "hosts find none of their blocks; set allkeys-lru"
)
log = logging.getLogger("kvstore.index")


class RedisNodes:
    """Implements the part of an `Index` that concerns nodes."""

    def __init__(self, space: KeySpace, read: Route, write: Route, replies: Replies) -> None:
        self._space = space
        self._read = read
        self._write = write
        self._replies = replies
        self._announced = 0

    def announce(self, node_id: int, announcement: bytes, ttl_s: float) -> None:
        check_node_id(node_id)
        check_announcement(announcement, ttl_s)
        ttl_ms = b"%d" % max(round(ttl_s * 1e3), 1)
        self._change(node_id, (b"SET", announcement, b"PX", ttl_ms), b"SADD")
        if self._announced % SWEPT_EVERY == 0:
            self._sweep()
        self._announced += 1

    def renew(self, node_id: int, ttl_s: float) -> bool:
        check_node_id(node_id)
        check_announcement(b"", ttl_s)
        key = self._space.node_key(node_id)
        ttl_ms = b"%d" % max(round(ttl_s * 1e3), 1)
        (reply,) = self._write.run([Request(command(b"PEXPIRE", key, ttl_ms), key_slot(key))])
        return self._replies.number(reply) == 1

    def withdraw(self, node_id: int) -> None:
        check_node_id(node_id)
        self._change(node_id, (b"DEL",), b"SREM")

    def node(self, node_id: int) -> bytes | None:
        check_node_id(node_id)
        (reply,) = self._ask(self._read, [node_id])
        return self._replies.records(self._replies.value(reply), 1)[0]

    def all(self) -> dict[int, bytes]:
        """Return all announcements, by node id."""
        found: dict[int, bytes] = {}
        ids = self._ids(self._read)
        for node_id, reply in zip(ids, self._ask(self._read, ids), strict=True):
            (announcement,) = self._replies.records(reply, 1)
            if announcement is not None:
                found[node_id] = announcement
        return found

    def _change(self, node_id: int, own: tuple[bytes, ...], name: bytes) -> None:
        """Change the node's key by the command `own` and its place in the set by `name`, in one
        round trip."""
        key = self._space.node_key(node_id)
        mine, membership = self._write.run(
            [
                Request(command(own[0], key, *own[1:]), key_slot(key)),
                self._of_set(name, b"%016x" % node_id),
            ]
        )
        self._replies.value(mine)
        self._replies.number(membership)

    def _sweep(self) -> None:
        try:
            for (reply,) in self._write.ask_all(lambda shard: command(b"INFO", b"memory"), 1):
                if isinstance(reply, bytes) and (policy := _VOLATILE.search(reply)):
                    log.warning(_EVICTED, policy[1].decode())
            ids = self._ids(self._write)
            answers = zip(ids, self._ask(self._write, ids), strict=True)
            dead = [
                b"%016x" % node_id
                for node_id, reply in answers
                if not isinstance(reply, LostReply) and self._replies.records(reply, 1) == [None]
            ]
            if dead:
                self._write.run([self._of_set(b"SREM", *dead)])
        except IndexUnavailableError:
            pass  # another time

    def _ids(self, route: Route) -> list[int]:
        (reply,) = route.run([self._of_set(b"SMEMBERS")])
        names = self._replies.value(reply)
        if not isinstance(names, list) or len(names) > NODES_MAX:
            raise self._replies.surprised(names)
        return sorted(int(name, 16) for name in names if _is_id(name))

    def _ask(self, route: Route, ids: Iterable[int]) -> list[Reply]:
        keys = map(self._space.node_key, ids)
        # GET would fail on a key of another type.
        requests = [Request(command(b"MGET", key), key_slot(key)) for key in keys]
        return route.run(requests) if requests else []

    def _of_set(self, name: bytes, *args: bytes) -> Request:
        key = self._space.nodes_key
        return Request(command(name, key, *args), key_slot(key))


def _is_id(name: Reply) -> bool:
    return isinstance(name, bytes) and _NODE_ID.fullmatch(name) is not None
