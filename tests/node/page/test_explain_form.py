"""What a page with a password explains: prompts of engines that announced themselves, to those who
know it, and nothing that a question could lead elsewhere."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser
from each_input import each
from page_parts import EVIL, HOST, Engine, Fed, ask, page_node, port
from redis_servers import wait_until

from kvstore.node import Node
from kvstore.node.page.asking import QUESTION_BYTES_MAX
from kvstore.node.page.page import STATE

PASSWORD = b"a password of enough bytes"
BASIC = "Basic OmEgcGFzc3dvcmQgb2YgZW5vdWdoIGJ5dGVz"
JSON = {"Content-Type": "application/json"}
HERE = os.getpid()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with page_node(tmp_path, page_password=PASSWORD) as node:
        yield node


@pytest.fixture
def engine(tmp_path: Path, node: Node) -> Iterator[Engine]:
    with Engine(tmp_path) as engine:
        yield engine


def question(kind: str = "prompt", text: str = "hi", engine: object = HERE, **more: str) -> bytes:
    return json.dumps({"engine": engine, "kind": kind, "text": text, **more}).encode()


def explained(node: Node, body: bytes, **headers: str) -> tuple[int, str]:
    given = {**JSON, "Authorization": BASIC, **headers}
    status, told, answer = ask(node, "/explain", "POST", body, **given)
    assert "default-src 'self'" in told["Content-Security-Policy"]
    assert told["Content-Type"] == "text/plain; charset=utf-8"
    return status, answer.decode()


def test_what_an_engine_would_load_is_told_for_each_kind(node: Node, engine: Engine) -> None:
    chat = [{"role": "user", "content": "hi"}]
    for body in (
        question(),
        question("messages", json.dumps(chat)),
        question("tokens", "4 5"),
        question("request-id", "cmpl-1"),
    ):
        assert explained(node, body) == (200, "1 of 2 tokens hit")
    assert engine.posted == [{"prompt": "hi"}, {"messages": chat}]
    assert [one.get("tokens", one) for one in engine.asked] == [  # type: ignore[attr-defined]
        *([1, 2, 3], [1, 2, 3], [4, 5]),
        {"request_id": "cmpl-1"},
    ]


def test_what_the_command_does_not_answer_is_told(node: Node, engine: Engine) -> None:
    status, said = explained(node, question("messages", "{"))
    assert (status, said[:19]) == (200, "kvstore: messages='")
    picture = json.dumps([{"role": "user", "content": [{"type": "image_url"}]}])
    assert explained(node, question("messages", picture))[1].startswith("unknown: ")


@each(
    ("body", "said"),
    [
        (b"{", "not answered: "),
        (b"[]", "not answered: "),
        (b"[" * 9999, "not answered: "),
        (b"\xff", "not answered: "),
        (json.dumps({"engine": HERE, "kind": "prompt", "text": 7}).encode(), "not answered: "),
        (question("request-id", "a\0b"), "not answered: "),
        (question(engine=1), "not answered: engine=1: must be one of"),
        (question(engine=str(HERE)), "not answered: engine="),
        (question(engine=True), "not answered: engine="),
        (question(engine="http://169.254.169.254/"), "not answered: engine="),
        (question("--url"), "not answered: kind='--url'"),
        (question("engine"), "not answered: kind='engine'"),
        (question(["prompt"]), "not answered: kind="),  # type: ignore[arg-type]
        (question(text=" "), "not answered: kind="),
        (question("request-id", "a" * 200_000), "not answered: "),
    ],
)
def test_nothing_but_an_engine_of_this_host_can_be_asked(
    node: Node, engine: Engine, body: bytes, said: str
) -> None:
    status, why = explained(node, body)
    assert status == 200
    assert why.startswith(said)
    assert engine.asked == engine.posted == []


ELSEWHERE = """
import select, socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    print(sys.stdin in select.select([sys.stdin, server], [], [])[0])
"""


def test_a_url_in_a_question_is_not_asked(node: Node, engine: Engine) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        url = f"http://{HOST}:{other.stdout.readline().strip()}"
        bodies = question(url=url), question("request-id", f"--engine={url}")
        for body in (*bodies, question("prompt", f"--engine={url}")):
            assert explained(node, body)[0] == 200
        assert other.communicate("end", timeout=60)[0] == "True\n", "nobody came"
    assert engine.posted == [{"prompt": "hi"}, {"prompt": f"--engine={url}"}]


@each(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": BASIC[:-4]}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Content-Type": "text/plain"}, 415),  # what another site's page may send unasked
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Length": str(QUESTION_BYTES_MAX + 1)}, 413),
        ({"Content-Length": "0"}, 413),
        ({"Content-Length": "-1"}, 413),
        ({"Content-Length": "9" * 20}, 413),
    ],
)
def test_who_may_not_ask_is_refused_before_anything_is_read(
    node: Node, engine: Engine, headers: dict[str, str], status: int
) -> None:
    assert explained(node, b"", **headers)[0] == status
    assert engine.asked == []


def test_without_a_password_nothing_is_explained(tmp_path: Path) -> None:
    with page_node(tmp_path) as node, Engine(tmp_path) as engine:
        status, why = explained(node, question())
        assert status == 403
        assert "--page FILE" in why
        assert json.loads(ask(node, STATE)[2])["engines"] is None
        assert engine.asked == []


def test_without_a_page_there_is_no_form(tmp_path: Path) -> None:
    with page_node(tmp_path, page=False) as node:
        assert ask(node, "/explain", "POST", question(), **JSON)[0] == 404


def test_only_to_ask_is_possible(node: Node) -> None:
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
        assert ask(node, "/explain", method, Authorization=BASIC)[0] == 405


def test_while_an_engine_is_asked_others_are_answered_and_no_second_is_asked(
    node: Node, engine: Engine
) -> None:
    engine.release.clear()
    answers: list[tuple[int, str]] = []
    first = threading.Thread(target=lambda: answers.append(explained(node, question())))
    first.start()
    wait_until(lambda: engine.asked, "the engine was asked", 60)
    began = time.monotonic()
    assert ask(node, "/live")[0] == 200
    assert explained(node, question())[0] == 503
    assert time.monotonic() - began < 5
    engine.release.set()
    first.join(60)
    assert answers == [(200, "1 of 2 tokens hit")]


def test_a_large_prompt_is_asked_about(node: Node, engine: Engine) -> None:
    prompt = "word " * 150_000
    assert explained(node, question(text=prompt)) == (200, "1 of 2 tokens hit")
    assert engine.posted == [{"prompt": prompt}]


def test_a_question_that_does_not_come_whole_holds_up_nobody(node: Node, engine: Engine) -> None:
    head = f"POST /explain HTTP/1.1\r\nHost: localhost\r\nAuthorization: {BASIC}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    with socket.create_connection((HOST, port(node))) as stops:
        stops.sendall(head.encode())
        assert stops.recv(1) == b"", "it hangs up"
    with socket.create_connection((HOST, port(node))) as ends:
        ends.sendall(head.encode())
        ends.shutdown(socket.SHUT_WR)
        assert ends.recv(9) == b"HTTP/1.1 "
    wait_until(lambda: explained(node, question())[0] == 200, "others are answered", 60)


def test_a_prompt_is_no_word_of_a_command_line(node: Node, engine: Engine) -> None:
    engine.release.clear()
    secret = f"secret-{os.urandom(8).hex()}"
    asks = threading.Thread(target=lambda: explained(node, question(text=secret)))
    asks.start()
    wait_until(lambda: engine.asked, "the engine was asked", 60)
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:
            continue
    assert any(b"--engine-pid" in line for line in lines)
    assert not any(secret.encode() in line for line in lines)
    engine.release.set()
    asks.join(60)


def test_engines_that_are_gone_are_not_offered(node: Node, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / f"engine-{2**22 - 1}-aa.sock").touch()
    (tmp_path / "engine-x-aa.sock").touch()
    assert json.loads(ask(node, STATE, Authorization=BASIC)[2])["engines"] == [HERE]


@pytest.mark.browser
@pytest.mark.timeout(180)
def test_the_form_explains_and_shows_what_it_hears_as_text(tmp_path: Path) -> None:
    with (
        page_node(tmp_path, page_password=PASSWORD) as node,
        Engine(tmp_path, EVIL) as engine,
        Browser(width=390) as window,
    ):
        Fed(node).ticks(3, 3)
        window.open(f"http://any:{PASSWORD.decode().replace(' ', '%20')}@{HOST}:{port(node)}/")
        window.until("document.querySelector('#engine').options.length === 1")
        assert window.run("document.querySelector('#engine').value") == str(HERE)
        window.run("document.querySelector('#asked').focus()")
        window.press(*"hi", "tab", "enter")
        window.until(f"document.querySelector('#explained').textContent === {json.dumps(EVIL)}", 60)
        assert engine.posted == [{"prompt": "hi"}]
        assert window.run("document.title") == "kvstore"
        assert window.run("document.querySelectorAll('#explained *').length") == 0
        assert window.run("document.documentElement.scrollWidth") <= 390
        assert window.logged() == []
        assert {url.split("/")[2].split("@")[-1] for url in window.asked_for()} == {
            f"{HOST}:{port(node)}"
        }


@pytest.mark.browser
@pytest.mark.timeout(180)
def test_without_a_password_there_is_no_form_to_see(tmp_path: Path) -> None:
    with page_node(tmp_path) as node, Engine(tmp_path), Browser() as window:
        Fed(node).ticks(3, 3)
        window.open(f"http://{HOST}:{port(node)}/")
        window.until("document.querySelectorAll('#rows tr').length === 3")
        assert window.run("document.querySelector('#explain').offsetHeight") == 0
