"""`kvstore explain --engine`: which engine it asks, what it asks, and what it does not know."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from each_input import each

from kvstore.cli.asked_engine import server_of
from kvstore.client.engine_socket import EngineSocket

if TYPE_CHECKING:
    from places import Place

CHAT = [{"role": "user", "content": "a"}]
EXPLAINED = {"text": "1 of 2 tokens hit", "first_missing": None}


class Fake:
    """An engine of this process: an HTTP server, and the socket of a connector."""

    def __init__(self, place: Place) -> None:
        fake = self
        self.place = place
        self.posted: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.answer: dict[str, Any] = {"explanations": [EXPLAINED]}
        self.tokens: Any = {"tokens": [1, 2, 3]}

        class Server(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                cards = [{"id": "m"}, {"id": "lora", "parent": "m", "root": "/files"}]
                self.say({"data": cards})

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                fake.posted.append({"path": self.path, **json.loads(raw)})
                self.say(fake.tokens)

            def say(self, answer: Any) -> None:
                raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        place.run_dir.mkdir(mode=0o700, exist_ok=True)
        self.socket = EngineSocket(place.run_dir, self.told)

    def told(self, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(question)
        return self.answer

    def explain(self, *args: str, code: int = 0, url: str = "", stdin: str = "") -> str:
        where = ("--engine", url or self.url)
        ran = self.place.here("explain", *where, *args, stdin=stdin.encode())
        assert ran.returncode == code, ran
        return (ran.stdout or ran.stderr).decode()

    def close(self) -> None:
        self.socket.close()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def fake(place: Place) -> Iterator[Fake]:
    fake = Fake(place)
    yield fake
    fake.close()


@each(
    ("args", "stdin", "posted", "asked"),
    [
        (["--prompt", "hi"], "", {"prompt": "hi"}, {}),
        (["--messages", "-"], json.dumps(CHAT), {"messages": CHAT}, {}),
        (
            ["--messages", "-", "--model", "lora"],
            json.dumps({"messages": CHAT, "tools": [], "cache_salt": "s", "temperature": 1}),
            {"messages": CHAT, "tools": [], "model": "lora"},
            {"cache_salt": "s", "adapter": ["lora", "/files"]},
        ),
        (
            ["--messages", "-", "--cache-salt", "other"],
            json.dumps({"messages": CHAT, "model": "m", "cache_salt": "s", "n": None}),
            {"messages": CHAT, "model": "m"},
            {"cache_salt": "other"},
        ),
    ],
)
def test_the_server_is_asked_for_tokens_and_the_engine_for_what_they_load(
    fake: Fake,
    args: list[str],
    stdin: str,
    posted: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    fake.posted.clear()
    fake.asked.clear()
    assert fake.explain(*args, stdin=stdin) == "1 of 2 tokens hit\n"
    assert fake.posted == [{"path": "/tokenize", **posted}]
    assert fake.asked == [{"tokens": [1, 2, 3], "cache_salt": None, "adapter": None, **asked}]


def test_tokens_of_a_file_and_requests_are_asked_of_the_engine_alone(fake: Fake) -> None:
    fake.explain("--tokens", "-", stdin="4 5")
    fake.explain("--request-id", "cmpl-1", url=f"{fake.url}/v1")
    assert fake.posted == []
    assert fake.asked[0]["tokens"] == [4, 5]
    assert fake.asked[1:] == [{"request_id": "cmpl-1"}]


@each(
    "body",
    [
        *({"messages": CHAT, name: 1} for name in ("documents", "prompt_embeds", "future")),
        {"messages": CHAT, "prompt_logprobs": 1},
        {"messages": CHAT, "kv_transfer_params": {"skip_load": True}},
        *(
            {"messages": [{"role": "user", "content": [part]}]}
            for part in (
                {"type": "image_url", "image_url": {"url": "data:"}},
                {"type": "input_audio", "input_audio": {}},
                {"type": "text", "text": "a", "uuid": "b"},
                {"image": "a"},
                7,
            )
        ),
    ],
)
def test_what_tokens_do_not_tell_is_unknown(fake: Fake, body: dict[str, Any]) -> None:
    said = fake.explain("--messages", "-", stdin=json.dumps(body), code=1)
    assert said.startswith("unknown: ")
    found = fake.explain("--messages", "-", "--json", stdin=json.dumps(body), code=1)
    assert json.loads(found)["unknown"]
    assert fake.asked == []


def test_a_model_that_the_server_does_not_have_is_refused(fake: Fake) -> None:
    for how in (["--tokens", "-"], ["--prompt", "a"]):
        said = fake.explain(*how, "--model", "other", stdin="1", code=2)
        assert said.startswith("kvstore: model='other': the server has m, lora")
    assert fake.asked == []


def test_what_the_engine_does_not_know_is_unknown(fake: Fake) -> None:
    fake.answer = {"explanations": []}
    assert "no request cmpl-1 is remembered" in fake.explain("--request-id", "cmpl-1", code=1)
    fake.answer = {"unknown": "because"}
    assert fake.explain("--prompt", "a", code=1) == "unknown: because\n"
    fake.answer = {"explanations": [EXPLAINED], "note": "but"}
    assert fake.explain("--prompt", "a") == "1 of 2 tokens hit; but\n"


@each("tokens", [b"{", b"[]", {"tokens": "a"}, {}, b"[" * 100_000])
def test_a_server_that_gives_no_tokens_is_told(fake: Fake, tokens: Any) -> None:
    fake.tokens = tokens
    said = fake.explain("--prompt", "a", code=1)
    assert said.startswith(f"kvstore: {fake.url}/tokenize ")
    assert fake.asked == []


def test_an_engine_of_another_server_is_not_asked_unless_it_is_named(fake: Fake) -> None:
    other = f"http://127.0.0.1:{fake.server.server_port + 1}"
    said = fake.explain("--request-id", "a", url=other, code=1)
    assert f"engines here: process {os.getpid()})" in said
    assert fake.asked == []
    fake.explain("--request-id", "a", "--engine-pid", str(os.getpid()), url=other)
    assert len(fake.asked) == 1
    said = fake.explain("--request-id", "a", "--engine-pid", "1", code=1)
    assert "is of no engine" in said


def test_the_server_of_another_host_at_the_same_port_is_not_this_one(fake: Fake) -> None:
    elsewhere = f"http://192.0.2.1:{fake.server.server_port}"
    said = fake.explain("--request-id", "a", url=elsewhere, code=1)
    assert "ask on the engine's host" in said
    assert fake.asked == []


@each(
    ("args", "stdin", "said"),
    [
        (["--engine", "127.0.0.1:8000", "--prompt", "a"], "", "engine='127.0.0.1:8000': must be"),
        (["--engine", "http://", "--prompt", "a"], "", "engine='http://': must be"),
        (["--engine", "http://h:x", "--prompt", "a"], "", "engine='http://h:x': must be"),
        (["--prompt", "a"], "", "prompt='a': needs --engine"),
        (["--key", "k", "--cache-salt", "a"], "", "cache-salt='a': needs --engine"),
        (["--key", "k", "--engine", "http://h"], "", "key='k': is of no engine"),
    ],
)
def test_wrong_use_is_refused_by_its_name(
    place: Place, args: list[str], stdin: str, said: str
) -> None:
    ran = place.here("explain", *args, stdin=stdin.encode())
    assert ran.returncode == 2
    assert ran.stderr.decode().startswith(f"kvstore: {said}")


@each(
    "text", ["{", "7", "{}", '{"messages": 7}', "[7]", '{"messages": [], "model": 7}', "[" * 9999]
)
def test_what_is_no_chat_is_refused(fake: Fake, text: str) -> None:
    assert fake.explain("--messages", "-", stdin=text, code=2).startswith("kvstore: messages=")


def test_an_engine_that_is_named_by_its_process_is_asked_by_its_own_server(fake: Fake) -> None:
    pid = ("--engine-pid", str(os.getpid()))
    ran = fake.place.here("explain", *pid, "--prompt", "-", stdin=b"hi")
    assert (ran.returncode, ran.stdout) == (0, b"1 of 2 tokens hit\n"), ran
    assert fake.posted == [{"path": "/tokenize", "prompt": "hi"}]
    ran = fake.place.here("explain", "--engine-pid", "1", "--prompt", "hi")
    assert ran.stderr.startswith(b"kvstore: process 1 is of no engine")


def test_a_server_is_found_between_ports_where_none_of_a_model_answers(fake: Fake) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, socket.create_server(("127.0.0.1", 0), backlog=0):
        assert server_of(os.getpid()).models() == {"m": "", "lora": "/files"}


def test_a_server_that_listens_at_the_hosts_own_name_is_found(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.server.socket.close()
    fake.server.socket = socket.create_server(("127.0.0.2", fake.server.server_port))
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.2")
    assert server_of(os.getpid()).models() == {"m": "", "lora": "/files"}


def test_without_a_server_tokens_and_requests_can_be_asked_about(fake: Fake) -> None:
    fake.server.shutdown()
    fake.server.server_close()
    place = fake.place
    pid = ("--engine-pid", str(os.getpid()))
    ran = place.here("explain", *pid, "--prompt", "a")
    assert ran.returncode == 1
    assert b"no HTTP server that was found: add --engine URL" in ran.stderr
    for args in (["--tokens", "-"], ["--request-id", "r"]):
        assert place.here("explain", *pid, *args, stdin=b"1 2").returncode == 0
