"""What an operator may write for where a node is reached, and what of it is announced."""

from __future__ import annotations

import pytest

from kvstore.errors import UsageError
from kvstore.transport.stream.address import Address, parse, parse_advertise


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
