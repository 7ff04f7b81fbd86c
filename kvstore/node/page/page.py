"""Answers browsers: the page's files, what they show as JSON, and with a password what a prompt
would load in an engine (asking.py). Nothing can be changed.

Who may look: anybody on this host; with a password, whoever knows it. A name in the Host header
that is none of this host's is refused, so that no other site's name can be made to lead here (DNS
rebinding). The page is allowed nothing but its own files, and no other site may read or frame it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from kvstore.core.node import NodeCore
from kvstore.core.outgoing.watched import AGE_BOUNDS_S
from kvstore.core.report import SPACE_BYTES
from kvstore.node.config import NodeConfig
from kvstore.node.page.asking import QUESTION_BYTES_MAX, Asking
from kvstore.node.page.history import COUNTED, SHOWN, TICK_S, History
from kvstore.node.page.watch import Watch, WatchedNode
from kvstore.nodedir import Announcement

FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.svg": ("page.svg", "image/svg+xml"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
STATE = "/page.json"
EXPLAIN = "/explain"
PATHS = {*FILES, STATE}
HEADERS = (
    ("Content-Security-Policy", "default-src 'self'; base-uri 'none'; frame-ancestors 'none'"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
)
EVENTS_SHOWN = 50
NAMESPACES_SHOWN = 12
State: TypeAlias = dict[str, object]
Answer: TypeAlias = tuple[str, list[tuple[str, str]], bytes]
"""Status, headers and body."""


class Page:
    """The page of one node. The loop's thread feeds it, that of HTTP asks."""

    def __init__(self, config: NodeConfig, core: NodeCore, now: Callable[[], float]) -> None:
        self._password = config.page_password
        assert config.metrics is not None
        self._names = {"localhost", socket.gethostname().lower(), config.metrics[0].lower()} - {""}
        self._name = config.name
        self._core = core
        self.now = now
        self._asking = Asking(config.run_dir, config.key_prefix)
        self.watch = Watch(TICK_S)
        self._history = History()
        self._heard_at: float | None = None

    def hear(self, announcements: Iterable[Announcement]) -> None:
        """Take note of all nodes that the index knows of; of none, when it cannot be asked."""
        words = list(announcements)
        if words:
            self._heard_at = self.now()
            if self.watch.hear(words, self._heard_at):
                self._history.note(self.watch)

    def state(self) -> State:
        """Return all that the page shows. For the loop's thread."""
        now, wall, watch, history = self.now(), time.time(), self.watch, self._history
        heard_at = self._heard_at
        return {
            "name": self._name,
            "at": wall,
            "tick_s": TICK_S,
            "silent_s": None if heard_at is None else now - heard_at,
            "nodes": [self._node(one, now) for one in watch.all()],
            "history": {name: history.series(name) for name in SHOWN},
            "missed": history.missed().most_common(),
            "ages": {"bounds_s": AGE_BOUNDS_S, "at_most": history.ages()},
            "namespaces": self._namespaces(),
            "events": [
                {**one._asdict(), "at": wall - (now - one.at)}
                for one in [*watch.events][-EVENTS_SHOWN:]
            ],
        }

    def _node(self, one: WatchedNode, now: float) -> dict[str, object]:
        word = one.announcement
        return {
            "name": word.name,
            "host": word.host,
            "state": one.state(now),
            "tier": one.tier,
            "size": word.size_bytes,
            "used": one.used_bytes,
            "up_s": word.up_s,
            "delta": {name: one.delta.get(name, 0) for name in COUNTED},
            "fill": self._history.fill(word.node_id),
        }

    def _namespaces(self) -> list[tuple[str, int]]:
        """Return names and bytes of the largest namespaces, as far as nodes tell of them, and the
        bytes of all others together."""
        sizes, all_bytes = Counter[str](), 0
        for one in self.watch.living():
            sizes.update({n: c for n, c in one.counts.items() if n.startswith(SPACE_BYTES)})
            all_bytes += one.counts.get("block_bytes", 0)
        spaces = self._core.namespaces.all()
        named = {f"{SPACE_BYTES}{space.id:x}": space.fields for space in spaces}
        shown = sizes.most_common(NAMESPACES_SHOWN)
        rows = [(_label(name, named.get(name, {})), size) for name, size in shown]
        others = all_bytes - sum(size for _, size in shown)
        return [*rows, ("all others", others)] if others > 0 else rows

    def answer(self, path: str, environ: Mapping[str, str], state: Callable[[], State]) -> Answer:
        """Answer a request for one of `PATHS`, or for `EXPLAIN` where none is taken. `state` asks
        the loop for `state`."""
        refusal = self._refusal(path, environ)
        if refusal is not None:
            return refusal
        if path == EXPLAIN:
            return _refused(
                "503 Service Unavailable", "another prompt is being explained: try again"
            )
        if path == STATE:
            engines = None if self._password is None else self._asking.engines()
            body, kind = json.dumps({**state(), "engines": engines}).encode(), "application/json"
        else:
            file, kind = FILES[path]
            body = Path(__file__).with_name(file).read_bytes()
        return "200 OK", [("Content-Type", kind), *HEADERS], body

    def takes(self, environ: Mapping[str, str]) -> bool:
        """Return whether a request to explain a prompt is answered, by `explain`, which must be
        called then."""
        fits = self._refusal(EXPLAIN, environ) is None
        return fits and self._asking.busy.acquire(blocking=False)

    def explain(self, guest: socket.socket, begun: bytes, environ: Mapping[str, str]) -> None:
        """Answer a request, of whose body `begun` has come, on a thread of its own."""
        plain = [("Content-Type", "text/plain; charset=utf-8"), *HEADERS]
        length = int(environ["HTTP_CONTENT_LENGTH"])
        self._asking.begin(guest, begun, length, lambda s: rendered("200 OK", plain, s.encode()))

    def _refusal(self, path: str, environ: Mapping[str, str]) -> Answer | None:
        if environ["REQUEST_METHOD"] not in (("POST",) if path == EXPLAIN else ("GET", "HEAD")):
            return _refused("405 Method Not Allowed", "this page is read-only")
        if not self._is_ours(environ.get("HTTP_HOST", "")):
            why = "open the page by this host's name or address"
            return _refused("421 Misdirected Request", why)
        if not self._may_look(environ.get("HTTP_AUTHORIZATION", "")):
            ask = ("WWW-Authenticate", 'Basic realm="kvstore", charset="UTF-8"')
            return _refused("401 Unauthorized", "the password of --page, for any user", ask)
        if path != EXPLAIN:
            return None
        if self._password is None:
            return _refused("403 Forbidden", "prompts are explained with a password: --page FILE")
        # Of another site's page a browser asks first whether it may send that, and may not.
        if environ.get("HTTP_CONTENT_TYPE") != "application/json":
            return _refused("415 Unsupported Media Type", "send application/json")
        length = environ.get("HTTP_CONTENT_LENGTH", "")
        if re.fullmatch("[0-9]{1,9}", length) and 0 < int(length) <= QUESTION_BYTES_MAX:
            return None
        return _refused("413 Content Too Large", f"send 1 to {QUESTION_BYTES_MAX} bytes")

    def _is_ours(self, host: str) -> bool:
        """Return whether it is a name of this host. An address is nobody's name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _may_look(self, header: str) -> bool:
        if self._password is None:
            return True
        kind, _, given = header.partition(" ")
        try:
            password = base64.b64decode(given, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
        return kind.lower() == "basic" and hmac.compare_digest(password, self._password)


def _label(name: str, fields: Mapping[str, object]) -> str:
    known = fields.get("name") or fields.get("model")
    rank = f" rank {fields['tp_rank']}" if "tp_rank" in fields else ""
    return f"{known}{rank}" if known else name.partition(":")[2]


def rendered(
    status: str, headers: Iterable[tuple[str, str]], body: bytes, *, is_head: bool = False
) -> bytes:
    """Return an answer as HTTP has it; the connection ends with it."""
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)]
    lines += f"Content-Length: {len(body)}", "Connection: close", "", ""
    return "\r\n".join(lines).encode("latin-1") + (b"" if is_head else body)


def _refused(status: str, why: str, *headers: tuple[str, str]) -> Answer:
    plain = ("Content-Type", "text/plain; charset=utf-8")
    return status, [plain, *HEADERS, *headers], f"{why}\n".encode()
