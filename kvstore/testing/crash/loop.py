"""Runs rounds of kills, and checks what must be true after them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from ctypes import c_longlong
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Final

from kvstore import Client, Limits, Namespace
from kvstore.errors import IndexUnavailableError, PeerError
from kvstore.index.base import KeyRecord
from kvstore.index.embedded_redis.server import find_server
from kvstore.index.redis.index import open_index
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.nodedir import Announcement, NodeDir
from kvstore.record import unpack_record
from kvstore.testing.crash import workers
from kvstore.testing.crash.workers import (
    CANCELLED,
    CHILD_HUNG,
    FIELDS,
    FORKS,
    HITS,
    INTERRUPTED,
    MISSES,
    SLOWEST_MS,
    STEPS,
    STORED,
    WRONG_BYTES,
    WorkerPlace,
)
from kvstore.testing.forgery import forge
from kvstore.testing.proxy import FaultyProxy
from kvstore.types import Location

NODE = "node"
NODE_BYTES = 8 << 20
WRITERS, READERS = 2, 1
ROUND_S_MAX = 0.25
"""Between kills: a node that starts takes longer on a busy machine, and dies on the way."""
PAUSE_CHANCE = 0.15
"""Of stopping a writer as well, which goes on a few rounds later as if nothing had been."""
PAUSE_ROUNDS = 3
SILENCE_CHANCE = 0.1
"""Of a node that takes connections and requests for a while, and answers none."""
SILENT_S_MAX = 1.5
"""Longer than the deadline of a request."""
LIE_CHANCE = 0.3
"""Of a round in which the records of all blocks are forged."""
FLIP_CHANCE = 0.5
"""Of a round in which somebody between Redis and the readers changes a bit of each answer."""
LIE_TIMEOUT_S = 1.0
HANG_S = 20.0
"""No step of a worker may take so long; its own deadlines end it within a few seconds."""
SETTLE_S = 60.0
PATIENT = Limits(redis_timeout_s=5.0, publish_timeout_s=5.0, request_timeout_s=10.0)
_context = multiprocessing.get_context("forkserver")


class CrashError(AssertionError):
    """Raised when something was wrong, leaked or hung. The message says what; the seed is with the
    caller."""


class _Worker:
    """Runs a worker's process over its deaths; its counters go on."""

    def __init__(self, kind: str, place: WorkerPlace, rng: random.Random) -> None:
        self.kind = kind
        self.counters = RawArray(c_longlong, FIELDS)
        self._place = place
        self._rng = rng
        self.stopped_until = 0
        """The round in which it goes on; 0: it runs."""
        self.start()

    def start(self) -> None:
        run: Callable[..., None] = getattr(workers, self.kind)
        args = (self._place, self._rng.randrange(1 << 32), self.counters)
        self.process: BaseProcess = _context.Process(target=run, args=args, daemon=True)
        self.process.start()

    def signal(self, number: signal.Signals) -> None:
        self.check()
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.check()
        self.process.kill()
        self.process.join(HANG_S)

    def check(self) -> None:
        code = self.process.exitcode
        if code == WRONG_BYTES:
            raise CrashError(f"a {self.kind} read wrong bytes")
        if code == CHILD_HUNG:
            raise CrashError(f"a child that a {self.kind} had forked hung")
        if code is not None:
            raise CrashError(f"a {self.kind} ended by itself with {code}")
        if self.counters[SLOWEST_MS] > HANG_S * 1e3:
            raise CrashError(f"a {self.kind} hung for {self.counters[SLOWEST_MS]} ms")


class CrashLoop:
    """Runs one Redis, one node and a few workers, and ends them."""

    def __init__(self, seed: int) -> None:
        _context.set_forkserver_preload([workers.__name__])
        self._rng = random.Random(seed)
        self.directory = Path(tempfile.mkdtemp(prefix="kvx-"))
        run_dir = self.directory / "run"
        run_dir.mkdir(mode=0o700)
        self._socket = self.directory / "redis.sock"
        self.place: Final = WorkerPlace(
            f"unix://{self._socket}", run_dir, f"kv:{self.directory.name}"
        )
        self.killed: dict[str, int] = dict.fromkeys(("writer", "reader", "node", "redis"), 0)
        self.paused = self.silenced = self.forged = self.flipped = 0
        self._round = 0
        self._node_dir = NodeDir(run_dir, NODE)
        self._redis = self._start_redis()
        self._node = self._start_node()
        self._wire = FaultyProxy(self._to_redis)
        host, port = self._wire.address
        far = self.place._replace(url=f"redis://{host}:{port}")
        self._workers = [_Worker("writer", self.place, self._rng) for _ in range(WRITERS)]
        self._workers += [_Worker("reader", far, self._rng) for _ in range(READERS)]

    # --- rounds -----------------------------------------------------------

    def rounds(self, count: int) -> None:
        """Run `count` rounds of one kill or none; who died is started again at once."""
        for _ in range(count):
            self._round += 1
            self._trouble()
            time.sleep(self._rng.uniform(0, ROUND_S_MAX))
            self._wake()
            victim = self._rng.choice(list(self.killed))
            self.killed[victim] += 1
            if victim == "redis":
                self._redis.kill()
                self._redis.wait(HANG_S)
                self._redis = self._start_redis()
            elif victim == "node":
                self._end_node(signal.SIGKILL)
                self._node = self._start_node()
            else:
                worker = self._rng.choice([w for w in self._workers if w.kind == victim])
                worker.kill()
                worker.stopped_until = 0
                worker.start()
            if self._rng.random() < PAUSE_CHANCE:
                self._pause(self._rng.choice(self._workers))
            for worker in self._workers:
                worker.check()

    def _trouble(self) -> None:
        """Cause what the round has besides a kill."""
        rng = self._rng
        self._wire.flip = self._flip if rng.random() < FLIP_CHANCE else None
        if rng.random() < LIE_CHANCE:
            self._lie()
        if rng.random() < SILENCE_CHANCE:
            self._silence(rng.uniform(0, SILENT_S_MAX))

    def _flip(self, chunk: bytearray) -> None:
        """Change a bit, in a thread of the proxy: its draws are not the seed's."""
        chunk[random.randrange(len(chunk))] ^= 1 << random.randrange(8)
        self.flipped += 1

    def _lie(self) -> None:
        """Forge the records of all blocks in Redis, if that can be asked."""
        space = Namespace.named("default")
        keys = [space.value_key(f"k{i}") for i in range(workers.KEYS)]
        prefix = self.place.key_prefix
        index = open_index(self.place.url, key_prefix=prefix, timeout_s=LIE_TIMEOUT_S)
        with contextlib.closing(index), contextlib.suppress(IndexUnavailableError):
            records = zip(keys, index.lookup(keys), strict=True)
            known = [unpack_record(key, record) for key, record in records if record]
            places = [place for place in known if place is not None] + self._made_up()
            lies = [KeyRecord(key, forge(key, self._rng, places)) for key in keys if places]
            index.publish(lies)
            self.forged += len(lies)

    def _made_up(self) -> list[Location]:
        """Return a place of the node, whatever is there."""
        word = self._node_dir.announcement()
        slot = self._rng.randrange(NODE_BYTES // SLOT_BYTES_MIN)
        return [] if word is None else [Location(word.node_id, word.epoch, 0, slot, 1, 0, 600, 0)]

    def _silence(self, for_s: float) -> None:
        if self._node.exitcode is None and self._node.pid is not None:
            os.kill(self._node.pid, signal.SIGSTOP)
            time.sleep(for_s)
            os.kill(self._node.pid, signal.SIGCONT)
            self.silenced += 1

    def _to_redis(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._socket))
        return connection

    def _pause(self, worker: _Worker) -> None:
        worker.signal(signal.SIGSTOP)
        worker.stopped_until = self._round + PAUSE_ROUNDS
        self.paused += 1

    def _wake(self, *, all_of_them: bool = False) -> None:
        for worker in self._workers:
            if worker.stopped_until and (all_of_them or worker.stopped_until <= self._round):
                worker.signal(signal.SIGCONT)
                worker.stopped_until = 0
                worker.counters[SLOWEST_MS] = 0  # the pause was ours

    def _start_redis(self) -> subprocess.Popen[bytes]:
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", ""]
        return subprocess.Popen(
            [str(find_server().path), *options, "--dir", str(self.directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _start_node(self) -> BaseProcess:
        options = ("--name", NODE, "--size", str(NODE_BYTES))
        process = _context.Process(target=workers.node, args=(self.place, options), daemon=True)
        process.start()
        return process

    def _end_node(self, number: signal.Signals) -> None:
        if self._node.exitcode is not None:
            raise CrashError(f"the node ended by itself with {self._node.exitcode}")
        assert self._node.pid is not None
        os.kill(self._node.pid, number)
        self._node.join(SETTLE_S)
        if self._node.exitcode is None:
            raise CrashError(f"the node did not end on signal {number}")

    # --- afterwards ---------------------------------------------------------

    def settle(self) -> None:
        """Kill no more and check that everybody gets on, and that what the dead held comes back."""
        self._wake(all_of_them=True)
        self._wire.flip = None
        before = [list(worker.counters) for worker in self._workers]

        def all_hit() -> bool:
            for worker in self._workers:
                worker.check()
            pairs = zip(self._workers, before, strict=True)
            return all(w.counters[HITS] > b[HITS] + 5 for w, b in pairs)

        self._until(all_hit, "every worker reads and hits again")
        for worker in self._workers:
            worker.kill()
        with self._client() as client:
            empty = ("reserved", "pinned", "quarantined", "unpublished", "removals_pending")

            def nothing_held() -> bool:
                stats = self._stats(client)
                return bool(stats) and not any(stats[what] for what in empty)

            self._until(nothing_held, f"no {', '.join(empty)}", lambda: self._stats(client))
            astray: list[str] = []

            def all_found() -> bool:
                astray[:] = self._astray(client)
                return not astray

            # What was forged is published anew by the node's scrub, in its time.
            self._until(all_found, "every block can be found by the index:", lambda: astray)
            self._check_space(client)

    def _client(self) -> Client:
        place = self.place
        return Client(place.url, run_dir=place.run_dir, key_prefix=place.key_prefix, limits=PATIENT)

    @staticmethod
    def _stats(client: Client) -> dict[str, int | float]:
        with contextlib.suppress(PeerError):
            return dict(client.stats()["node"])
        return {}

    def _astray(self, client: Client) -> list[str]:
        """Return the blocks that are not in the index as they are, or cannot be read from there."""
        rows = client.session.writer.listing(b"", workers.KEYS + 1)
        index = open_index(self.place.url, key_prefix=self.place.key_prefix, timeout_s=5.0)
        announcement = self._node_dir.announcement()
        assert announcement is not None
        start = (announcement.node_id, announcement.epoch)
        try:
            records = index.lookup([key for key, *_ in rows])
        finally:
            index.close()
        astray: list[str] = []
        for (key, *_), record in zip(rows, records, strict=True):
            location = unpack_record(key, record) if record is not None else None
            if location is None or (location.node_id, location.epoch) != start:
                astray.append(f"block {key.hex()[:12]} is not in the index: {location}")
            elif client.session.reader.place(key, record or b"") is None:
                astray.append(f"block {key.hex()[:12]} cannot be read")
        return astray

    def _check_space(self, client: Client) -> None:
        """Check that free + sealed = capacity: a value that takes all of it is stored."""
        result = client.put("all of it", workers.content("all of it", NODE_BYTES))
        if not result:
            raise CrashError(f"capacity has leaked: {result}, {self._stats(client)}")
        if client.get("all of it") != workers.content("all of it", NODE_BYTES):
            raise CrashError("a value of all the capacity cannot be read")

    def finish(self) -> None:
        """End in order and check that nothing is left."""
        announcement = self._node_dir.announcement()
        self._end_node(signal.SIGTERM)
        if self._node.exitcode != 0:
            raise CrashError(f"the node ended with {self._node.exitcode}")
        left = [p for p in self.place.run_dir.rglob("*") if not p.is_dir()]
        left = [path for path in left if path.parent.name != "epochs"]
        left += _segments(announcement)
        if left:
            raise CrashError(f"left behind: {', '.join(map(str, left))}")

    def close(self) -> None:
        """End everything, however it stands."""
        announcement = self._node_dir.announcement()
        for process in (self._node, *(worker.process for worker in self._workers)):
            # The fork server reaps what ended, and then its number may be somebody else's.
            if process.exitcode is None:
                process.kill()
                process.join(HANG_S)
        self._wire.close()
        self._redis.kill()
        self._redis.wait(HANG_S)
        for path in _segments(announcement):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def counts(self) -> dict[str, int]:
        fields = {"steps": STEPS, "hits": HITS, "misses": MISSES, "stored": STORED}
        fields |= {"forks": FORKS, "interrupted": INTERRUPTED, "cancelled": CANCELLED}
        of_all = {
            name: sum(worker.counters[place] for worker in self._workers)
            for name, place in fields.items()
        }
        others = {"silenced": self.silenced, "forged": self.forged, "flipped": self.flipped}
        return of_all | others

    @staticmethod
    def _until(
        condition: Callable[[], bool], what: str, how: Callable[[], object] = lambda: ""
    ) -> None:
        give_up_at = time.monotonic() + SETTLE_S
        while not condition():
            if time.monotonic() > give_up_at:
                raise CrashError(f"not within {SETTLE_S:.0f} s: {what} {how()}")
            time.sleep(0.02)


def _segments(announcement: Announcement | None) -> list[Path]:
    if announcement is None:
        return []
    return list(
        Path(announcement.data_path).parent.glob(f"kvstore-*-{announcement.node_id:016x}-*")
    )
