"""A node with a page, and clusters of nodes that there are not for it to show."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stores import MIB, announcement

from kvstore.client.engine_socket import EngineSocket
from kvstore.core.outgoing.watched import AGE_BOUNDS_S
from kvstore.index.memory import MemoryIndex
from kvstore.keys import Namespace
from kvstore.node import Node, NodeConfig
from kvstore.node.page.history import TICK_S
from kvstore.nodedir import Announcement

HOST = "127.0.0.1"
GIB = 1 << 30
EVIL = "<script>document.title='broken'</script>"
SPACES = (Namespace({"model": "meta-llama/Llama-3.1-8B"}), Namespace.named(EVIL))


@contextmanager
def page_node(tmp_path: Path, **changes: Any) -> Iterator[Node]:
    """A node that answers browsers, in a thread of this process."""
    shm = tmp_path / "shm"
    shm.mkdir(exist_ok=True)
    fields = {"metrics": (HOST, 0), "page": True, "size_bytes": 4 * MIB, **changes}
    with Node(NodeConfig(run_dir=tmp_path, shm_dir=shm, **fields), MemoryIndex()) as node:
        yield node


def port(node: Node) -> int:
    metrics = node._metrics
    assert metrics is not None
    return metrics.port


def ask(
    node: Node, path: str, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body."""
    with closing(http.client.HTTPConnection(HOST, port(node), timeout=60)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def cluster(count: int, tick: float, gone: Collection[int] = ()) -> list[Announcement]:
    """What so many nodes announce at that tick."""
    return [
        announcement(
            node_id=i + 1,
            name=f"node-{i}",
            host=f"host-{i // 2:02}",
            size_bytes=64 * GIB,
            free_bytes=int(64 * GIB * (0.8 - 0.04 * (i % 15) - tick / 3000)),
            up_s=int(1000 + tick * TICK_S),
            counts=_counts(int(tick * (1 + i % 5))),
        )
        for i in range(count)
        if i not in gone
    ]


def _counts(steps: int) -> dict[str, int]:
    parts = {300: 10, 900: 33}
    return {
        "stored_bytes": steps * GIB // 3,
        "served_bytes": steps * 90 * MIB,
        "evicted": steps * 40,
        "asked_tokens": steps * 1000,
        "engine_tokens": steps * 300,
        "hit_tokens": steps * 480,
        "missed_tokens:evicted": steps * 140,
        "missed_tokens:never-stored": steps * 80,
        "evicted_age": steps * 40,
        **{f"evicted_age_le_{b}": steps * parts.get(b, 0 if b < 300 else 40) for b in AGE_BOUNDS_S},
        f"namespace_bytes:{SPACES[0].id:x}": 30 * steps * MIB + 500,
        f"namespace_bytes:{SPACES[1].id:x}": 3000 * MIB,
        "namespace_bytes:1234": 90 * MIB,
    }


class Fed:
    """Has the page of a node hear of a cluster, in place of what its index says."""

    def __init__(self, node: Node) -> None:
        page = node._page
        assert page is not None
        self._page, self._loop = page, node._loop
        self._now = 0.0
        self._hear = page.hear
        self._do(self._begin)
        for space in SPACES:
            self._do(lambda space=space: node.core.namespaces.told(space))

    def _begin(self) -> None:
        self._page.hear = lambda _: None  # type: ignore[method-assign]
        self._page.now = lambda: self._now
        self._page.watch.__init__(TICK_S)  # type: ignore[misc]

    def _do(self, what: Callable[[], None]) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: done.set_result(what()))
        done.result(20)

    def ticks(self, count: int, ticks: int) -> None:
        """So many nodes live for so many ticks."""

        def live() -> None:
            for tick in range(ticks + 1):
                self._now += TICK_S
                self._hear(cluster(count, tick))

        self._do(live)

    def dies(self, count: int, ticks: int, gone: int) -> None:
        """One of them says nothing any more, until the index forgets it."""

        def die() -> None:
            last = cluster(count, ticks)[gone]
            for i in range(6):
                others = cluster(count, ticks + i / 10, (gone,))
                self._hear(others if i == 5 else [*others, last])
                self._now += 1.0
            self._hear(cluster(count, ticks + 1, (gone,)))

        self._do(die)


class Engine:
    """An engine of this process: its HTTP server, and its socket in a run directory."""

    def __init__(self, run_dir: Path, said: str = "1 of 2 tokens hit") -> None:
        self.posted: list[object] = []
        self.asked: list[object] = []
        self.release = threading.Event()
        """Cleared, it answers once it is set."""
        self.release.set()
        posted = self.posted

        class Server(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say({"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.say({"tokens": [1, 2, 3]})

            def say(self, answer: object) -> None:
                raw = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: object) -> None:
                pass

        def told(question: dict[str, object]) -> dict[str, object]:
            self.asked.append(question)
            assert self.release.wait(60)
            return {"explanations": [{"text": said, "first_missing": None}]}

        self.server = ThreadingHTTPServer((HOST, 0), Server)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self._socket = EngineSocket(run_dir, told)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release.set()
        self._socket.close()
        self.server.shutdown()
        self.server.server_close()
