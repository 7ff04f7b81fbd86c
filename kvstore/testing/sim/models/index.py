"""Wraps the model of an index so that it fails, forgets, lags, falls back and lies on request."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from kvstore.errors import IndexDeadlineError, IndexRefusedError, IndexUnavailableError
from kvstore.index.base import KeyedRecord, KeyRecord, Place, Record
from kvstore.index.memory import MemoryIndex
from kvstore.record import pack_record, unpack_record
from kvstore.types import Key

if TYPE_CHECKING:
    from kvstore.testing.sim.world import World

HISTORY_MAX = 4
LAG_MAX_S = 0.5
_T = TypeVar("_T")


class SimServer(MemoryIndex):
    """Models the index itself: one primary, one replica that is behind."""

    def __init__(self, world: World) -> None:
        super().__init__(now=lambda: world.now)
        self._world = world
        self._rng: random.Random = world.rng
        self._fresh_incarnation()
        self.down: bool = False
        self.slow = self.lying = self.forged = self.lagging = self.shard_away = False
        self.full = False
        """It has no memory for what is written; that is set by tests, no weather draws it."""
        self.lied_at = 0.0
        self.replica: dict[Key, Record] = {}
        self.late: set[KeyedRecord] = set()
        """Written by calls that had given up: nobody can know that they must go."""
        self.last_seen: dict[Key, float] = {}
        """Until when a key was there for readers; infinity while it is."""
        self._history: dict[Key, list[Record]] = {}

    def _fresh_incarnation(self) -> None:
        self._incarnation = f"{self._rng.getrandbits(64):016x}"

    def announce(self, node_id: int, announcement: bytes, ttl_s: float) -> None:
        self._take_in()
        super().announce(node_id, announcement, ttl_s)

    def publish(self, records: Sequence[KeyedRecord]) -> Sequence[KeyedRecord]:
        self._take_in()
        lost = [item for item in records if self.away(item[0])]
        records = [item for item in records if not self.away(item[0])]
        super().publish(records)
        for key, record in records:
            self.last_seen[key] = float("inf")
            kept = self._history.setdefault(key, [])
            kept.append(record)
            del kept[:-HISTORY_MAX]
        self._replicate(dict(records))
        return lost

    def _take_in(self) -> None:
        if self.full:
            self._world.count("index_full")
            raise IndexRefusedError("simulated")

    def remove(self, records: Sequence[KeyedRecord]) -> int:
        if any(self.away(key) for key, _ in records):
            raise IndexUnavailableError("simulated: a shard is away")
        gone: dict[Key, Record | None] = {k: None for k, r in records if self._records.get(k) == r}
        dropped = super().remove(records)
        for key in gone:
            self._gone(key)
        self._replicate(gone)
        return dropped

    def _gone(self, key: Key) -> None:
        # The replica may show it until then.
        self.last_seen[key] = self._world.now + LAG_MAX_S

    def _replicate(self, changes: Mapping[Key, Record | None]) -> None:
        if not changes:
            return

        era = self._incarnation

        def apply() -> None:
            if era != self._incarnation:
                return  # the link of those days is gone
            for key, record in changes.items():
                if record is None:
                    self.replica.pop(key, None)
                else:
                    self.replica[key] = record

        self._world.replicate(self._rng.random() * LAG_MAX_S, apply)

    def lose_everything(self) -> None:
        super().lose_everything()
        self._fresh_incarnation()
        self.replica = {}
        for key in self.last_seen:
            self._gone(key)

    def fail_over(self) -> None:
        """Let the replica take over: what it has not heard of is lost, and what it has not
        heard the end of is back."""
        self._records = dict(self.replica)
        self._nodes.clear()
        self._fresh_incarnation()
        for key in self.last_seen:
            self._gone(key)
        for key in self._records:
            self.last_seen[key] = float("inf")

    def away(self, key: Key) -> bool:
        """Tell whether the shard that has this key cannot be reached."""
        return self.shard_away and key[10] % 2 == 0

    def readable(self) -> Mapping[Key, Record]:
        if self.shard_away:
            return {key: record for key, record in self._records.items() if not self.away(key)}
        return self.replica if self.lagging and self._rng.random() < 0.5 else self._records

    def truth(self) -> dict[Key, Record]:
        return self._records

    def lie(self, key: Key, truth: Record | None) -> Record | None:
        rng = self._rng
        kind = rng.randrange(7)
        if kind == 0:
            return None
        if kind == 1 and self._history:
            return rng.choice(rng.choice(list(self._history.values())))
        if kind == 2 and key in self._history:
            return rng.choice(self._history[key])
        if kind == 3 and truth is not None:
            damaged = bytearray(truth)
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            return bytes(damaged)
        if kind == 4:
            return rng.randbytes(rng.choice((0, 7, 44, 44, 200)))
        return truth

    @property
    def doubtful(self) -> bool:
        return self.lying or self.forged

    def answer(self, key: Key, truth: Record | None) -> Record | None:
        """Return the record that a reader gets to see."""
        if self.lying:
            return self.lie(key, truth)
        return self._forge(key, truth) if self.forged else truth

    def _forge(self, key: Key, truth: Record | None) -> Record | None:
        """Make a record whose CRC is right."""
        rng = self._rng
        known = [one for one in ((key, truth), *self._some_blocks()) if one[1] is not None]
        if not known or rng.random() < 0.3:
            return truth
        of, record = rng.choice(known)
        real = unpack_record(of, record or b"")
        if real is None:
            return truth
        forged = {
            "node_id": rng.choice([real.node_id, *self._nodes]),
            "epoch": real.epoch + rng.choice((-1, 1)),
            "segment": 1,
            "slot": rng.choice((real.slot + 1, rng.randrange(64), (1 << 32) - 1)),
            "generation": max(real.generation + rng.choice((-1, 1, 1 << 40)), 0),
            "granule": rng.randrange(256),
            "length": rng.choice((0, 1, real.length - 1, real.length + 1, (1 << 32) - 1)),
            "checksum": rng.getrandbits(64),
        }
        changed = rng.sample([*forged], rng.randrange(3))
        return pack_record(key, real._replace(**{name: forged[name] for name in changed}))

    def _some_blocks(self) -> list[KeyedRecord]:
        some = self._rng.sample([*self._records], min(3, len(self._records)))
        return [(key, self._records[key]) for key in some]

    def said(self, raw: bytes | None) -> bytes | None:
        """Return an announcement as a reader gets to see it."""
        rng = self._rng
        if not self.forged or raw is None or rng.random() < 0.5:
            return raw
        changed = bytearray(raw)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return rng.choice([bytes(changed), raw[: rng.randrange(len(raw))], b"[]", *self._words()])

    def _words(self) -> list[bytes]:
        return list(super().nodes().values())


class SimIndex:
    """Leads one process to the index (`kvstore.index.base.Index`)."""

    def __init__(self, world: World, timeout_s: float) -> None:
        self._world = world
        self._server = world.index
        self._timeout_s = timeout_s

    def _call(self, act: Callable[[], _T], late: Callable[[], object] | None = None) -> _T:
        world, server = self._world, self._server
        world.pause()
        if self._is_down():
            # An error after the command was carried out looks the same to the caller.
            if late is not None and world.rng.random() < 0.3:
                act()
            raise IndexUnavailableError("simulated")
        if server.slow:
            self._too_late(late)
        answer = act()
        world.pause()
        if self._is_down() and world.rng.random() < 0.5:
            raise IndexUnavailableError("simulated")
        return answer

    def _is_down(self) -> bool:
        return self._server.down

    def _too_late(self, late: Callable[[], object] | None) -> None:
        world = self._world
        if late is not None and world.rng.random() < 0.5:

            def anyhow() -> None:
                with suppress(IndexUnavailableError):
                    late()

            world.after(world.rng.random() * 4 * self._timeout_s, anyhow)
        world.wait(world.now + self._timeout_s)
        raise IndexDeadlineError("simulated")

    def match(self, keys: Sequence[Key]) -> list[Record]:
        if self._server.doubtful:
            run: list[Record] = []
            for record in self.lookup(keys):
                if record is None:
                    break
                run.append(record)
            return run

        def act() -> list[Record]:
            records = self._server.readable()
            found: list[Record] = []
            for key in keys:
                record = records.get(key)
                if record is None:
                    break
                found.append(record)
            return found

        return self._call(act)

    def lookup(self, keys: Sequence[Key]) -> list[Record | None]:
        server = self._server

        def act() -> list[Record | None]:
            records = list(map(server.readable().get, keys))
            if server.doubtful:
                return [server.answer(k, r) for k, r in zip(keys, records, strict=True)]
            return records

        return self._call(act)

    def publish(self, records: Sequence[KeyedRecord]) -> Sequence[KeyedRecord]:
        def late() -> None:
            self._server.late.update(records)
            self._server.publish(records)

        self._world.checks.published(records)
        self._world.note("publish", [key for key, _ in records])
        return self._call(lambda: self._server.publish(records), late)

    def remove(self, records: Sequence[KeyedRecord]) -> int:
        def act() -> int:
            self._world.checks.before_removal(records)
            dropped = self._server.remove(records)
            self._world.checks.after_removal()
            return dropped

        self._world.note("remove", [key for key, _ in records])
        return self._call(act, act)

    def announce(self, node_id: int, announcement: bytes, ttl_s: float) -> None:
        self._call(lambda: self._server.announce(node_id, announcement, ttl_s))

    def renew(self, node_id: int, ttl_s: float) -> bool:
        return self._call(lambda: self._server.renew(node_id, ttl_s))

    def withdraw(self, node_id: int) -> None:
        self._call(lambda: self._server.withdraw(node_id))

    def node(self, node_id: int) -> bytes | None:
        return self._call(lambda: self._server.said(self._server.node(node_id)))

    def nodes(self) -> dict[int, bytes]:
        def act() -> dict[int, bytes]:
            said = {
                node_id: self._server.said(raw) for node_id, raw in self._server.nodes().items()
            }
            return {node_id: raw for node_id, raw in said.items() if raw is not None}

        return self._call(act)

    def scan(self, place: Place) -> tuple[Place, list[KeyRecord]]:
        return self._call(lambda: self._server.scan(place))

    def ping(self) -> None:
        self._call(self._server.ping)

    def identity(self) -> str:
        return ""

    def incarnation(self) -> str:
        return self._call(self._server.incarnation)

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""
