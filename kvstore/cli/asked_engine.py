"""Asks a running vLLM engine of this host what a prompt would load (`kvstore explain --engine`).

The engine's HTTP server makes tokens of a prompt; its connector, at a Unix socket of the run
directory, says what of them is found.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from kvstore.client.engine_socket import engine_pid
from kvstore.errors import NodeUnavailableError, PeerError, UsageError
from kvstore.rundir import engine_sockets
from kvstore.system.small_json import JsonObject

HTTP_TIMEOUT_S = 30.0
"""Time for one request to the engine's HTTP server, its answer included."""
PROBE_TIMEOUT_S = 2.0
"""The same, to find out which of its ports that is."""
ANSWER_BYTES_MAX = 48 << 20
"""Bytes of the server's answer: about 4 million tokens."""
PARENTS_MAX = 4
"""Generations between the process that listens for HTTP and that of the engine."""
API_KEY = "VLLM_API_KEY"
"""vLLM's own variable."""
TOLD = frozenset(
    {"messages", "model", "tools", "chat_template", "chat_template_kwargs"}
    | {"add_generation_prompt", "continue_final_message", "add_special_tokens"}
)
"""Fields of a chat request that /tokenize takes too."""
NO_MATTER = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "max_tokens", "stream"}
    | {"max_completion_tokens", "min_tokens", "stream_options", "logprobs", "top_logprobs"}
    | {"logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "user"}
    | {"metadata", "store", "ignore_eos", "priority", "request_id", "cache_salt", "stop_token_ids"}
)
"""Fields that do not shape the prompt."""
TEXTS = frozenset({"text", "refusal"})
"""Types of the parts of a message that are tokens alone."""


class Unknown(Exception):  # noqa: N818  # an answer, no error
    """What would be loaded cannot be told, and why."""


class Prompt(NamedTuple):
    """A prompt as the engine's own server is asked for its tokens."""

    fields: JsonObject
    model: str | None = None
    cache_salt: str | None = None


def chat(text: str) -> Prompt:
    """Return the prompt of a chat: its messages, or the body of a request. Raises `UsageError`, and
    `Unknown` for what its tokens alone do not tell."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, list):
        body = {"messages": body}
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise UsageError("messages", text[:40], "must be JSON: messages, or a body that has them")
    assert isinstance(body, dict)
    salt, model = body.get("cache_salt"), body.get("model")
    if not isinstance(salt, str | None) or not isinstance(model, str | None):
        raise UsageError("messages", [salt, model], "cache_salt and model must be text")
    for name, value in body.items():
        if value is not None and name not in TOLD | NO_MATTER:
            raise Unknown(f"{name} may shape what is loaded, and /tokenize does not take it")
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, str) and not _is_text(part):
                what = part.get("type", "part") if isinstance(part, dict) else "part"
                raise Unknown(f"the messages have a part that is no text ({what})")
    return Prompt({k: v for k, v in body.items() if k in TOLD - {"model"}}, model, salt)


def _is_text(part: object) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type", "text") in TEXTS and part.keys() <= {"type", *TEXTS}


class EngineServer:
    """The HTTP server of a vLLM engine. Each call raises `PeerError` where it fails."""

    def __init__(self, url: str, timeout_s: float = HTTP_TIMEOUT_S) -> None:
        """Raises `UsageError` for what is no URL."""
        self._timeout_s = timeout_s
        try:
            parts = urlsplit(url)
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise UsageError("engine", url, "must be http://HOST:PORT")
        self._url = url
        self._host = parts.hostname
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    def models(self) -> dict[str, str]:
        """Return the names that requests may give, and the path of each that is an adapter."""
        cards = self._call("GET", "/v1/models").get("data")
        found: dict[str, str] = {}
        for card in cards if isinstance(cards, list) else ():
            if isinstance(card, dict):
                found[str(card.get("id"))] = str(card.get("root")) if card.get("parent") else ""
        return found

    def tokens(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt, its chat template applied by the server."""
        fields = {**prompt.fields, **({"model": prompt.model} if prompt.model else {})}
        tokens = self._call("POST", "/tokenize", fields).get("tokens")
        if not isinstance(tokens, list):
            raise PeerError(f"{self._url}/tokenize gave no tokens: is it vLLM?")
        return tokens

    def _call(self, method: str, path: str, fields: JsonObject | None = None) -> JsonObject:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        key = os.environ.get(API_KEY)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        connection = self._kind(self._host, self._port, timeout=self._timeout_s)
        timer = threading.Timer(self._timeout_s, _end, [connection])
        timer.daemon = True
        timer.start()
        try:
            body = None if fields is None else json.dumps(fields)
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
            raw = response.read(ANSWER_BYTES_MAX + 1)
            if len(raw) > ANSWER_BYTES_MAX:
                raise PeerError(f"{self._url}{path} answered with over {ANSWER_BYTES_MAX} bytes")
            if response.status != 200:
                said = raw[:300].decode(errors="replace")
                raise PeerError(f"{self._url}{path} answered {response.status}: {said}")
            answer = json.loads(raw)
        except (OSError, HTTPException, ValueError, RecursionError) as e:
            raise PeerError(f"{self._url}{path} did not answer: {e}") from e
        finally:
            timer.cancel()
            connection.close()
        return answer if isinstance(answer, dict) else {}

    def has(self, pid: int) -> bool:
        """Return whether it is the HTTP server of the engine that is process `pid`."""
        wanted = {inode for inode, port in _listening() if port == self._port}
        return self._is_here() and any(wanted & inodes for inodes in _open(pid))

    def _is_here(self) -> bool:
        """Return whether the server's address is one of this host."""
        with suppress(OSError):
            for family, _, _, _, address in socket.getaddrinfo(self._host, self._port):
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.bind((address[0], 0))  # only an address of this host can be bound
                    return True
        return False


def _end(connection: HTTPConnection) -> None:
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def sockets_of(home: Path, url: str | None, pid: int | None) -> list[Path]:
    """Return where engines answer: those whose server is at `url`, or that which is process `pid`.

    Raises `NodeUnavailableError` where that cannot be told: the answer of another engine would
    be a wrong one.
    """
    server, there = None if url is None else EngineServer(url), dict[Path, int]()
    for path in engine_sockets(home):
        with suppress(OSError):
            there[path] = engine_pid(path)
    meant = {
        its for its in there.values() if its == pid or (not pid and server and server.has(its))
    }
    if meant:
        return [path for path, its in there.items() if its in meant]
    pids = ", ".join(map(str, there.values()))
    known = f"engines here: process {pids}" if there else "no engine answers here"
    raise NodeUnavailableError(
        f"{url or f'process {pid}'} is of no engine that answers in {home} ({known}): ask on the "
        "engine's host, as its user, with its --run-dir; behind a proxy or in a container "
        "name it by --engine-pid"
    )


def server_of(pid: int) -> EngineServer:
    """Return the HTTP server of the engine that is process `pid`: what answers as one at a port
    of that process, else of one that started it, the nearest first. Raises `NodeUnavailableError`
    where none does."""
    listening = _listening()
    for inodes in _open(pid):
        for port in sorted({port for inode, port in listening if inode in inodes}):
            for url in (f"http://localhost:{port}", f"http://{socket.gethostname()}:{port}"):
                with suppress(PeerError):
                    if EngineServer(url, PROBE_TIMEOUT_S).models():
                        return EngineServer(url)
    must = "add --engine URL, or ask about --tokens or --request-id, which need none"
    raise NodeUnavailableError(f"process {pid} has no HTTP server that was found: {must}")


def _listening() -> list[tuple[str, int]]:
    """Return the sockets of this host that listen, each as /proc names it, and its port."""
    found: list[tuple[str, int]] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            rows = (line.split() for line in Path(table).read_text().splitlines()[1:])
            found += [
                (f"socket:[{row[9]}]", int(row[1].rpartition(":")[2], 16))
                for row in rows
                if row[3] == "0A"
            ]
    return found


def _open(pid: int) -> Iterator[set[str]]:
    """Yield the sockets that a process has open, then those of each that started it."""
    for _ in range(PARENTS_MAX):
        if pid <= 1:
            return
        found = set[str]()
        with suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    found.add(os.readlink(fd))  # noqa: PTH115  # it is no path
        yield found
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        parent = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
        pid = int(parent[1]) if parent else 0
