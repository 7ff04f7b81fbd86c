"""What an operator may write for where a node is reached, and what of it is announced."""

from __future__ import annotations

import pytest
from each_input import each

from kvstore.errors import UsageError
from kvstore.transport.stream.address import (
    STREAM_PORT,
    Address,
    parse,
    parse_advertise,
    parse_listen,
)


@each(
    ("text", "host", "port"),
    [
        ("node-a", "node-a", None),
        ("node_a.example.org", "node_a.example.org", None),
        ("10.0.0.5", "10.0.0.5", None),
        ("10.0.0.5:7400", "10.0.0.5", 7400),
        ("::1", "::1", None),
        ("[::1]", "::1", None),
        ("[2001:db8::5]:7400", "2001:db8::5", 7400),
    ],
)
def test_an_advertised_address_comes_back_from_its_announcement(
    text: str, host: str, port: int | None
) -> None:
    assert parse_advertise(text) == (host, port)
    announced = str(Address("tcp", host, port or 7600))
    assert parse(announced) == ("tcp", host, port or 7600)


@each(
    "text",
    [
        *("tcp://10.0.0.5", "a b", "", ":7400", "-a", "a/b", "u@h"),
        *("0.0.0.0", "::", "[::]:7400", "300.1.2.3", "10.0.0"),
        *("h:", "h:0", "h:70000", "h:x", "[::1", "[::1]x", "[::1]:", "[::1]:0", "1:2:3"),
        *("h:\u0661", "h" * 300),
    ],
)
def test_what_no_host_could_connect_to_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"^advertise=.*must be HOST, HOST:PORT or \[V6\]:PORT"):
        parse_advertise(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.5", "10.0.0.5", STREAM_PORT),
        ("node-a", "node-a", STREAM_PORT),
        ("[::]", "::", STREAM_PORT),
        ("::1", "::1", STREAM_PORT),
        ("10.0.0.5:7", "10.0.0.5", 7),
        ("[::1]:0", "::1", 0),
        (":7", "", 7),
    ],
)
def test_a_node_that_is_told_no_port_takes_the_usual_one(text: str, host: str, port: int) -> None:
    assert parse_listen(text, "listen", STREAM_PORT) == (host, port)


@pytest.mark.parametrize("text", ["", "h:", "h:x", "h:70000", "7600:", "7600"])
def test_where_a_node_cannot_listen_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"^listen=.*must be HOST:PORT"):
        parse_listen(text, "listen", STREAM_PORT)


def test_without_a_usual_port_one_has_to_be_named() -> None:
    with pytest.raises(UsageError, match=r"^metrics=.*must be HOST:PORT"):
        parse_listen("10.0.0.5", "metrics")
