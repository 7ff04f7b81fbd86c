"""Who may look at a node's page, what it is allowed to do, and what it says."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_parts import EVIL, HOST, Fed, ask, page_node
from redis_servers import RedisServer, wait_until
from stores import NodeProcess

from kvstore.errors import UsageError
from kvstore.node import Node, NodeConfig
from kvstore.node.page.page import PATHS, STATE
from kvstore.testing.ports import held_ports

PASSWORD = b"a password of enough bytes"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with page_node(tmp_path) as node:
        yield node


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Node]:
    with page_node(tmp_path, page_password=PASSWORD) as node:
        yield node


def basic(password: bytes, user: bytes = b"") -> str:
    return "Basic " + base64.b64encode(user + b":" + password).decode()


def test_without_the_switch_there_is_no_page(tmp_path: Path) -> None:
    with page_node(tmp_path, page=False) as node:
        assert {ask(node, path)[0] for path in PATHS} == {404}


def test_every_answer_forbids_what_is_not_the_pages_own(node: Node) -> None:
    for path in PATHS:
        status, headers, body = ask(node, path)
        assert status == 200
        assert body
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert not any(name.startswith("Access-Control") for name in headers)


def test_the_page_has_no_script_and_no_style_inside(node: Node) -> None:
    page = ask(node, "/")[2].decode()
    assert page.count("<script") == page.count("<script src=") == 1
    assert "<style" not in page
    assert " style=" not in page
    assert " on" not in page.lower().replace(" only", "")


def test_it_is_opened_by_this_hosts_name_or_an_address(node: Node) -> None:
    hosts = ("localhost", "localhost:9400", "LOCALHOST:1", "127.0.0.1:80", "10.0.0.7", "[::1]:9400")
    assert [ask(node, STATE, Host=host)[0] for host in hosts] == [200] * len(hosts)


@pytest.mark.parametrize("path", sorted(PATHS))
def test_another_name_that_leads_here_is_refused(node: Node, path: str) -> None:
    """Who may give this host a name may have it change its address after a page was loaded."""
    evil = (
        "",
        "evil.example",
        "evil.example:9400",
        "localhost.evil.example",
        "127.0.0.1.evil",
        "[",
    )
    for host in evil:
        status, _, body = ask(node, path, Host=host)
        assert status == 421, host
        assert b"address" in body


def test_nothing_can_be_asked_for_but_to_look(node: Node) -> None:
    methods = ("POST", "PUT", "DELETE", "OPTIONS")
    assert {ask(node, path, method)[0] for method in methods for path in PATHS} == {405}


def test_with_a_password_nobody_looks_who_does_not_know_it(guarded: Node) -> None:
    wrong = ["", "Basic", "Basic !", basic(b""), basic(PASSWORD[:-1]), basic(PASSWORD + b"x")]
    wrong += [basic(b"", PASSWORD), f"Bearer {PASSWORD.decode()}", basic(PASSWORD).replace("B", "")]
    for path in PATHS:
        for header in wrong:
            status, headers, _ = ask(guarded, path, Authorization=header)
            assert (status, headers.get("WWW-Authenticate", "")[:5]) == (401, "Basic"), header
        assert ask(guarded, path, Authorization=basic(PASSWORD, b"anybody"))[0] == 200


def test_probes_and_prometheus_need_no_password(guarded: Node) -> None:
    assert ask(guarded, "/live")[0] == ask(guarded, "/metrics", Host="any.name")[0] == 200


def test_where_others_reach_it_a_page_needs_a_password(tmp_path: Path) -> None:
    for metrics in (None, ("", 9400), ("0.0.0.0", 9400), ("10.1.2.3", 0), ("a", 1)):
        with pytest.raises(UsageError, match=r"page=.*--page FILE"):
            NodeConfig(run_dir=tmp_path, page=True, metrics=metrics)


def test_on_this_host_alone_it_needs_none(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert NodeConfig(run_dir=tmp_path, page=True, metrics=(host, 0)).page


def test_it_tells_of_nodes_found_and_missed_tokens_ages_namespaces_and_events(node: Node) -> None:
    fed = Fed(node)
    fed.ticks(3, 20)
    fed.dies(3, 20, 1)
    told = json.loads(ask(node, STATE)[2])
    assert [one["state"] for one in told["nodes"]] == ["alive", "gone", "alive"]
    assert told["nodes"][0]["delta"]["hit_tokens"] == 480
    assert told["silent_s"] < 1
    assert len(told["history"]["used_bytes"]) == 20
    assert told["missed"][0] == ["missed_tokens:evicted", 140 * 6 * 20]
    assert told["ages"]["at_most"][-1] == 40 * 6 * 20
    assert [name for name, _ in told["namespaces"]] == [EVIL, "meta-llama/Llama-3.1-8B", "1234"]
    assert [(one["name"], one["what"]) for one in told["events"]] == [("node-1", "died")]


def test_a_real_node_tells_of_itself(node: Node) -> None:
    def told() -> list[str]:
        return [one["name"] for one in json.loads(ask(node, STATE)[2])["nodes"]]

    wait_until(lambda: told() == ["node"], "it has heard of itself", 10)


def test_an_hour_of_a_hundred_nodes_is_a_small_answer(node: Node) -> None:
    Fed(node).ticks(100, 400)
    assert len(ask(node, STATE)[2]) < 300_000


def test_the_command_line_names_the_file_of_the_password(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    secret.write_bytes(PASSWORD + b"\n")
    secret.chmod(0o600)
    with held_ports(1) as (at,):
        options = ("--metrics", f":{at}", "--page", str(secret))
        with NodeProcess(redis_server, options=options):
            request = urllib.request.Request(f"http://{HOST}:{at}/")
            request.add_header("Authorization", basic(PASSWORD))
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert answer.status == 200
