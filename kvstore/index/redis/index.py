"""Implements the index in Redis: one string key for a block, one MGET for a lookup.

docs/decisions/0003-index-records.md has the figures behind the shape. All calls of the contract
stand together, beside the fallbacks that they share.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from time import monotonic
from typing import TypeVar

from redis.crc import key_slot

from kvstore.errors import IndexUnavailableError, UsageError
from kvstore.index.base import KeyedRecord, KeyRecord, Place, Record
from kvstore.index.checks import check_keys, check_records
from kvstore.index.redis.announcements import RedisNodes
from kvstore.index.redis.connection import FAILURES, Dial, Links, LostReply, RefusedError, Reply
from kvstore.index.redis.identity import identity_of
from kvstore.index.redis.key_space import KeySpace, chunks, command
from kvstore.index.redis.replies import Replies, banned, full, no_script
from kvstore.index.redis.route import (
    Request,
    Route,
    SentinelDial,
    Shard,
    SingleRoute,
    host_dial,
    unix_dial,
)
from kvstore.index.redis.url import Target, parse_url
from kvstore.limits import (
    BATCH_KEYS_MAX,
    LOOKUP_LINKS_MAX,
    PUBLISH_LINKS_MAX,
    REDIS_ARGS_MAX,
)
from kvstore.types import Key

TIMEOUT_S_MAX = 60.0
REMOVE_ATTEMPTS_MAX = 3
"""Attempts of compare-and-delete without scripts, when others write meanwhile."""

_PAIRS_MAX = (REDIS_ARGS_MAX - 3) // 2
"""Pairs of a key and a record in a command, beside the name, the hash and the count of EVALSHA."""
_KEYS_MAX = REDIS_ARGS_MAX - 1

# pcall: a key of another type is not ours, and must not fail the rest.
_REMOVE_SCRIPT = b"""\
local dropped = 0
for i, key in ipairs(KEYS) do
  if redis.pcall('GET', key) == ARGV[i] then dropped = dropped + redis.call('DEL', key) end
end
return dropped
"""
_REMOVE_SHA = hashlib.sha1(_REMOVE_SCRIPT, usedforsecurity=False).hexdigest().encode()
_LOAD_SCRIPT = command(b"SCRIPT", b"LOAD", _REMOVE_SCRIPT)

_T = TypeVar("_T")


def open_index(
    url: str,
    *,
    key_prefix: str = "kv:default",
    timeout_s: float = 0.05,
    publish_timeout_s: float = 0.5,
    lookup_links_max: int = LOOKUP_LINKS_MAX,
) -> RedisIndex:
    """Return the index in the Redis at `url` (see url.py for the forms); connects at first use.

    Times are in seconds. Raises `UsageError` that names the argument that is wrong.
    """
    return RedisIndex(
        parse_url(url),
        key_prefix=key_prefix,
        timeout_s=timeout_s,
        publish_timeout_s=publish_timeout_s,
        lookup_links_max=lookup_links_max,
    )


def open_route(target: Target, *, timeout_s: float, links_max: int) -> Route:
    """Return the route to `target`; connects to nothing yet."""
    if target.kind == "cluster":
        from kvstore.index.redis.cluster import ClusterRoute

        return ClusterRoute(target, timeout_s=timeout_s, links_max=links_max)
    if target.kind == "sentinel":
        dial: Dial = SentinelDial(target)
    elif target.path:
        dial = unix_dial(target)
    else:
        dial = host_dial(target, target.hosts[0])
    return SingleRoute(Links(dial, target.label, timeout_s=timeout_s, links_max=links_max))


class RedisIndex:
    """An `Index` in Redis, Valkey, either behind Sentinel, or a Redis Cluster.

    Reading calls (`match`, `lookup`, `node`, `ping`) end within `timeout_s`,
    writing ones within `publish_timeout_s`, `nodes` within twice `timeout_s`; connecting
    counts. They have connections of their own, so that a slow publish delays no lookup.
    """

    def __init__(
        self,
        target: Target,
        *,
        key_prefix: str = "kv:default",
        timeout_s: float = 0.05,
        publish_timeout_s: float = 0.5,
        lookup_links_max: int = LOOKUP_LINKS_MAX,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("publish_timeout_s", publish_timeout_s)):
            if not 0 < value <= TIMEOUT_S_MAX:
                raise UsageError(name, value, f"above 0, at most {TIMEOUT_S_MAX:.0f} seconds")
        if not 1 <= lookup_links_max <= 1024:
            raise UsageError("lookup_links_max", lookup_links_max, "from 1 to 1024")
        self._target = target
        self._label = target.label
        self._timeout_s = timeout_s
        self._space = KeySpace(key_prefix)
        self._key_prefix = key_prefix
        self._read = open_route(target, timeout_s=timeout_s, links_max=lookup_links_max)
        self._write = open_route(target, timeout_s=publish_timeout_s, links_max=PUBLISH_LINKS_MAX)
        self._clustered = self._read.clustered
        self._only = None if self._clustered else self._read.links_for(0)
        """The connections for look-ups, where one server has all keys."""
        self._replies = Replies(target.label, self._mistaken)
        self._nodes = RedisNodes(self._space, self._read, self._write, self._replies)
        self._scripts_banned = False
        self._incarnations: dict[str, str] = {}
        """Incarnations by shard, of those that have answered."""

    def __repr__(self) -> str:
        return f"RedisIndex({self._label!r}, key_prefix={self._key_prefix!r})"

    def match(self, keys: Sequence[Key]) -> list[Record]:
        run: list[Record] = []
        for records in self._mget(keys):
            if None not in records:
                run += records  # type: ignore[arg-type]  # no None among them
                continue
            run += records[: records.index(None)]  # type: ignore[arg-type]
            break
        return run

    def lookup(self, keys: Sequence[Key]) -> list[Record | None]:
        return list(chain.from_iterable(self._mget(keys)))

    def publish(self, records: Sequence[KeyedRecord]) -> Sequence[KeyedRecord]:
        check_records(records)
        batches, replies = self._batches(self._write, records, _PAIRS_MAX, self._space.set_request)
        lost: list[KeyedRecord] = []
        for batch, reply in zip(batches, replies, strict=True):
            if isinstance(reply, LostReply):
                lost += batch
            else:
                self._replies.value(reply)
        return lost

    def remove(self, records: Sequence[KeyedRecord]) -> int:
        check_records(records)
        if not self._scripts_banned:
            replies, again = self._evalsha(records)
            if again is None:
                return sum(replies)
            self._scripts_banned = True
        return sum(
            self._remove_watched(batch)
            for batch in chunks(records, _PAIRS_MAX, by_tag=self._clustered)
        )

    def announce(self, node_id: int, announcement: bytes, ttl_s: float) -> None:
        self._nodes.announce(node_id, announcement, ttl_s)

    def renew(self, node_id: int, ttl_s: float) -> bool:
        return self._nodes.renew(node_id, ttl_s)

    def withdraw(self, node_id: int) -> None:
        self._nodes.withdraw(node_id)

    def node(self, node_id: int) -> bytes | None:
        return self._nodes.node(node_id)

    def nodes(self) -> dict[int, bytes]:
        return self._nodes.all()

    def scan(self, place: Place) -> tuple[Place, list[KeyRecord]]:
        part, cursor = place
        shards = self._write.shards()
        if part >= len(shards):  # the cluster has become smaller
            return (0, 0), []
        (reply,) = shards[part].links.run(self._space.scan_request(cursor))
        reply = self._replies.value(reply)
        try:
            after, names = int(reply[0]), reply[1][:BATCH_KEYS_MAX]
            keys = [key for key in map(self._space.key_of, names) if key is not None]
        except (TypeError, ValueError, IndexError):
            raise self._replies.surprised(reply) from None
        pairs = zip(keys, self.lookup(keys), strict=True)
        found = [KeyRecord(key, record) for key, record in pairs if record is not None]
        if not after:
            part = (part + 1) % len(shards)
        return (part, after), found

    def ping(self) -> None:
        for (reply,) in self._read.ask_all(_ping, 1, even_if_away=True):
            if not isinstance(reply, LostReply) and self._replies.value(reply) != b"PONG":
                raise self._replies.surprised(reply)

    def identity(self) -> str:
        return identity_of(self._target)

    def incarnation(self) -> str:
        """Name the life of the data, shard by shard: the server's run id, and a random value that a
        flush takes away.

        For a shard that is away it is the last known value. When the shard comes back, it has that
        value or another one.
        """
        shards: list[Shard] = []
        """A function, because the cluster may change at any time."""

        def request(shard: Shard) -> bytes:
            shards.append(shard)
            return self._incarnation_request(shard)

        for shard, replies in zip(shards, self._write.ask_all(request, 3), strict=True):
            if not isinstance(replies[0], LostReply):
                self._incarnations[shard.links.label] = self._shard_incarnation(replies)
        return ",".join([self._incarnations.get(shard.links.label, "") for shard in shards])

    def close(self) -> None:
        self._read.close()
        self._write.close()

    def _mistaken(self) -> None:
        self._read.mistaken()
        self._write.mistaken()

    # Reading

    def _mget(self, keys: Sequence[Key]) -> list[list[Record | None]]:
        check_keys(keys)
        if not keys:
            return []
        if self._only is not None and len(keys) <= _KEYS_MAX:  # nearly always
            (reply,) = self._only.run(self._space.keys_request(b"MGET", keys))
            return [self._replies.records(reply, len(keys))]
        batches, replies = self._batches(
            self._read, keys, _KEYS_MAX, lambda batch: self._space.keys_request(b"MGET", batch)
        )
        return [
            self._replies.records(reply, len(batch))
            for batch, reply in zip(batches, replies, strict=True)
        ]

    # Writing

    def _batches(
        self, route: Route, items: Sequence[_T], size: int, pack: Callable[[Sequence[_T]], bytes]
    ) -> tuple[list[Sequence[_T]], list[Reply]]:
        """Send `items` in as few commands as may be, in one go."""
        batches = chunks(items, size, by_tag=self._clustered)
        if not batches:
            return [], []
        if not self._clustered:
            if len(batches) == 1:
                return batches, route.run([Request(pack(batches[0]))])
            return batches, route.run_each(Request(pack(batch)) for batch in batches)
        slot = self._space.slot
        return batches, route.run(
            [Request(pack(b), slot(b[0] if isinstance(b[0], bytes) else b[0][0])) for b in batches]
        )

    def _evalsha(self, records: Sequence[KeyedRecord]) -> tuple[list[int], Reply]:
        """Return how many keys each batch dropped, and the reply that says that scripts are banned,
        if they are."""

        def pack(batch: Sequence[KeyedRecord]) -> bytes:
            return self._space.script_request(_REMOVE_SHA, batch)

        _, replies = self._batches(self._write, records, _PAIRS_MAX, pack)
        if any(map(no_script, replies)):
            for (loaded,) in self._write.ask_all(lambda shard: _LOAD_SCRIPT, 1):
                if banned(loaded):
                    return [], loaded
                if not isinstance(loaded, LostReply):
                    self._replies.value(loaded)
            _, replies = self._batches(self._write, records, _PAIRS_MAX, pack)
        refusal = next(filter(banned, replies), None)
        if refusal is not None:
            return [], refusal
        return [self._replies.number(reply) for reply in replies], None

    def _remove_watched(self, batch: Sequence[KeyedRecord]) -> int:
        """Compare and delete in a transaction, where scripts are banned."""
        names = [self._space.redis_key(key) for key, _ in batch]
        links = self._write.links_for(self._space.slot(batch[0][0]))
        deadline = monotonic() + links.timeout_s
        read = command(b"WATCH", *names) + command(b"MGET", *names)
        link = links.take(deadline)
        try:
            for _ in range(REMOVE_ATTEMPTS_MAX):
                watched, values = link.run(read, 2, deadline)
                self._replies.value(watched)
                held = self._replies.records(values, len(names))
                mine = [n for n, h, (_, r) in zip(names, held, batch, strict=True) if h == r]
                if not mine:
                    link.run(command(b"UNWATCH"), 1, deadline)
                    return 0
                delete = command(b"DEL", *mine)
                together = command(b"MULTI") + delete + command(b"EXEC")
                replies = link.run_here(together, 3, deadline)
                if full(replies[1]):
                    # Redis 7 queues nothing while it is full; nor does it take another record.
                    replies = link.run_here(delete, 1, deadline)
                *_, done = map(self._replies.value, replies)
                if done is not None:
                    return self._replies.number(
                        done[0] if isinstance(done, list) and done else done
                    )
        except (RefusedError, *FAILURES) as e:
            raise links.unavailable(e) from e
        except BaseException:
            link.drop()  # it may still watch
            raise
        finally:
            links.give(link)
        raise IndexUnavailableError(f"Redis at {self._label}: records changed while removed")

    def _incarnation_request(self, shard: Shard) -> bytes:
        key = self._epoch_key(shard)
        return (
            command(b"INFO", b"server")
            + command(b"SET", key, secrets.token_hex(8).encode(), b"NX")
            + command(b"GET", key)
        )

    def _shard_incarnation(self, replies: list[Reply]) -> str:
        info, epoch = map(self._replies.value, replies[::2])
        # A full server keeps the epoch that it has.
        made = None if full(replies[1]) and epoch else self._replies.value(replies[1])
        run_ids = [
            line.removeprefix(b"run_id:")
            for line in (info.splitlines() if isinstance(info, bytes) else ())
            if line.startswith(b"run_id:")
        ]
        if len(run_ids) != 1 or made not in (b"OK", None) or not isinstance(epoch, bytes):
            raise self._replies.surprised([info, made, epoch])
        return f"{run_ids[0].decode('latin-1')}:{epoch.decode('latin-1')}"

    def _epoch_key(self, shard: Shard) -> bytes:
        """Return the first numbered epoch key that lies on this shard; without a cluster, the epoch
        key."""
        if not shard.slots:
            return self._space.epoch_key
        slots = set(shard.slots)
        names: Iterable[bytes] = (self._space.epoch_key + b":%d" % i for i in count())
        return next(name for name in names if key_slot(name) in slots)


def _ping(shard: Shard) -> bytes:
    return command(b"PING")
