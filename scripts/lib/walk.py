"""Traces which functions of ours a call visits, in the order in which a reader meets them.

It is for whoever changes the way that a get or a load takes: fewer functions in fewer files, with
fewer climbs back to a file that was left already, is what makes it quicker to understand.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from connector.layout.geometry import GroupLayout, KVGeometry, StoreLayout, splits_of
from connector.layout.topology import TpKVTopology
from connector.messages import LoadBlock, LoadJob, SaveBlock, SaveJob
from connector.scheduler.lazy_store import LazyStore
from connector.worker.worker import WorkerCore
from kvstore import Client, Limits
from kvstore.client.base import BlockRef
from kvstore.index.embedded_redis.server import EmbeddedRedis
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.index import open_index
from kvstore.node import Node, NodeConfig
from kvstore.nodedir import sweep
from kvstore.spi import BlockSession
from kvstore.transport.stream.security import StreamSecurity

HOME = Path(__file__).resolve().parents[2]
NODE_BYTES = 16 << 20
VALUE = bytes(range(256)) * 400
"""More than travels in a request."""
BLOCK_TOKENS = 8
GEOMETRY = KVGeometry(layers=2, heads=2, channel_bytes=16, engine_block_tokens=4)
SECURITY = StreamSecurity(secret=b"a secret that both sides know")
PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=10.0)
JOB_TIMEOUT_S = 30.0


class Place(NamedTuple):
    """Names a function of ours."""

    file: str
    """Relative to the repository."""
    name: str


class Walk(NamedTuple):
    """Lists the functions that one call visited, each where it was met first."""

    name: str
    places: Sequence[Place]

    def stops(self) -> list[tuple[str, list[str]]]:
        """Return the files in the order of the walk, each with what is met for the first time
        there."""
        by_file = groupby(self.places, lambda place: place.file)
        return [(file, [place.name for place in its]) for file, its in by_file]

    @property
    def files(self) -> int:
        return len({place.file for place in self.places})

    @property
    def climbs(self) -> int:
        return len(self.stops()) - self.files


class Tracer:
    """Notes the calls of one thread at a time, while it is told to."""

    def __init__(self) -> None:
        self._thread = ""
        self._places: dict[Place, None] = {}

    def install(self) -> None:
        """Trace this thread and all that are started from now on."""
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    @staticmethod
    def uninstall() -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self._thread:
            return
        code = frame.f_code
        own = code.co_filename.startswith(str(HOME)) and code.co_name[0] != "<"
        if own and threading.current_thread().name == self._thread:
            file = Path(code.co_filename).relative_to(HOME)
            if file.parts[0] in ("kvstore", "connector"):
                self._places[Place(str(file), code.co_qualname)] = None

    def walk(self, name: str, call: Callable[[], object], thread: str = "MainThread") -> Walk:
        self._places, self._thread = {}, thread
        try:
            call()
        finally:
            self._thread = ""
        return Walk(name, list(self._places))


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield what a client on each of two hosts is made with: they share an index and no memory."""
    with tempfile.TemporaryDirectory(prefix="kvw-") as where, contextlib.ExitStack() as ends:
        os.environ.pop("KVSTORE_URL", None)
        server = EmbeddedRedis.acquire(Path(where))
        ends.callback(server.close)
        options: list[dict[str, Any]] = []
        for name in ("here", "there"):
            run_dir = Path(where) / name
            run_dir.mkdir(0o700)
            config = NodeConfig(
                run_dir=run_dir,
                name=name,
                size_bytes=NODE_BYTES,
                listen=("127.0.0.1", 0),
                security=SECURITY,
            )
            node = Node(config, GuardedIndex(open_index(server.url))).start()
            ends.callback(sweep, run_dir, kept=True)
            ends.callback(node.stop)
            options.append(
                {"url": server.url, "run_dir": run_dir, "security": SECURITY, "limits": PATIENT}
            )
        yield options[0], options[1]


def not_touching(session: BlockSession) -> None:
    """Let it not tell nodes what was read: that is done now and then, so one walk would have it and
    another would not."""
    session.writer._touch_at = float("inf")


def client_walks(tracer: Tracer, here: dict[str, Any], there: dict[str, Any]) -> Iterator[Walk]:
    with Client(**here) as client, Client(**there) as other:
        tokens = list(range(client.block_tokens))
        assert client.put("warm", VALUE)
        assert other.put("warm there", VALUE)
        assert None not in client.get_many(["warm", "warm there"])  # connections are there
        not_touching(client.session)
        yield tracer.walk("put", lambda: client.put("k", VALUE))
        yield tracer.walk("get, here", lambda: client.get("k"))
        yield tracer.walk("get, here again", lambda: client.get("k"))
        assert other.put("away", VALUE)
        yield tracer.walk("get, another host", lambda: client.get("away"))
        yield tracer.walk("get, a miss", lambda: client.get("absent"))
        yield tracer.walk("get_many, both", lambda: client.get_many(["k", "away", "absent"]))
        assert client.put_blocks(tokens, [VALUE])[0]
        yield tracer.walk("match_prefix", lambda: client.match_prefix(tokens))


def worker_over(store: BlockSession, layout: StoreLayout) -> WorkerCore:
    import torch

    shape = (16, GEOMETRY.heads, GEOMETRY.engine_block_tokens, GEOMETRY.channel_bytes // 2)
    core = WorkerCore(
        LazyStore(lambda: store),
        layout,
        rank=0,
        saves=True,
        load_timeout_s=JOB_TIMEOUT_S,
        save_timeout_s=JOB_TIMEOUT_S,
    )
    kv = {f"layer{i}": torch.zeros(shape, dtype=torch.bfloat16) for i in range(GEOMETRY.layers)}
    core.register_kv_caches(kv)
    return core


def job_done(core: WorkerCore) -> None:
    until = time.monotonic() + JOB_TIMEOUT_S
    while time.monotonic() < until:
        report = core.poll(0.01)
        if report.ended_saves or report.finished_loads:
            return
    raise TimeoutError("a job of the connector does not end: the node or Redis is too slow")


def connector_walks(tracer: Tracer, here: dict[str, Any], there: dict[str, Any]) -> Iterator[Walk]:
    """Walk through a worker's own calls: what its threads do with a job, and the lookup before
    it."""
    if importlib.util.find_spec("torch") is None:
        print("walk: no torch, so no connector's walks", file=sys.stderr)
        return
    near, far = BlockSession(**here), BlockSession(**there)
    for session in (near, far):
        not_touching(session)
    splits = splits_of({"model": "m"}, GEOMETRY, TpKVTopology.of(), BLOCK_TOKENS, ())
    group = GroupLayout(geometry=GEOMETRY, topology=TpKVTopology.of(), splits=splits)
    engine_tokens = GEOMETRY.engine_block_tokens
    layout = StoreLayout(
        block_tokens=BLOCK_TOKENS, hash_block_tokens=engine_tokens, groups=(group,)
    )
    namespace = group.namespaces[0]
    keys = [namespace.value_key(str(i)) for i in range(4)]
    block_ids = tuple(range(BLOCK_TOKENS // engine_tokens))

    def saving(core: WorkerCore, key: bytes) -> Callable[[], None]:
        def run() -> None:
            core.start_saves([SaveJob(0, "s", (SaveBlock((key,), block_ids),))])
            job_done(core)

        return run

    def loading(core: WorkerCore, found: BlockRef) -> Callable[[], None]:
        def run() -> None:
            core.start_loads([LoadJob(0, "q", (LoadBlock((found,), 0, block_ids),))])
            job_done(core)

        return run

    one, other = worker_over(near, layout), worker_over(far, layout)
    try:
        for store, key in ((one, keys[0]), (other, keys[1]), (other, keys[2])):
            saving(store, key)()
        for ref in near.match(keys[:2]):  # connections are there
            loading(one, ref)()
        yield tracer.walk("connector: match", lambda: near.match(keys[:3]))
        yield tracer.walk("connector: save", saving(one, keys[3]), "kvstore-save")
        _, _, from_there, from_here = near.match(keys)
        yield tracer.walk("connector: load, here", loading(one, from_here), "kvstore-load")
        yield tracer.walk("connector: load, another host", loading(one, from_there), "kvstore-load")
    finally:
        one.close()
        other.close()


def shown(walk: Walk) -> str:
    lines = [walk.name]
    seen: set[str] = set()
    for file, names in walk.stops():
        lines.append(f"  {'^ ' if file in seen else '  '}{file}: {', '.join(names)}")
        seen.add(file)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/walk")
    parser.add_argument("--only", default="")
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    tracer = Tracer()
    with two_hosts() as hosts:
        tracer.install()
        walks = [*client_walks(tracer, *hosts), *connector_walks(tracer, *hosts)]
        tracer.uninstall()
    walks = [walk for walk in walks if args.only in walk.name]
    if args.markdown:
        print("| walk | functions | files | climbs |\n|---|---|---|---|")
        for walk in walks:
            print(f"| {walk.name} | {len(walk.places)} | {walk.files} | {walk.climbs} |")
        return
    for walk in walks if not args.summary else ():
        print(shown(walk), end="\n\n")
    print(f"{'':30} functions   files  climbs")
    for walk in walks:
        print(f"{walk.name:30} {len(walk.places):9} {walk.files:7} {walk.climbs:7}")


if __name__ == "__main__":
    main()
