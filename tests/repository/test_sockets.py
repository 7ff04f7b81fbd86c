"""docs/security.md says of each socket how long it waits: a time-out of one call is no deadline for
what needs many."""

from __future__ import annotations

import re
from pathlib import Path

from test_house import ROOT, tracked

MAKES = re.compile(
    r"\bsocket\.socket\(|\bcreate_server\(|\bsocketpair\(|\.accept\(\)|\bwrap_socket\("
    r"|ontext\.socket\(|\baiohttp\.ClientSession\(|\bAppRunner\(|\bconnect_accepted_socket\("
    r"|\bopen_connection\(|\bstart_server\(|\burlopen\(|\bHTTPConnection\("
    r"|\b(SSL|UnixDomainSocket)Connection\b|\bunix_socket\(\)"
)
"""What makes, accepts or wraps one, in Python's library and in those that are used here."""
ROW = re.compile(r"^\| `((?:kvstore|connector)/[\w/]+\.py)` \|(.*)\|$", re.MULTILINE)
TIME = re.compile(
    r"\b\d+ (s|ms|min)\b|`\w+_(s|ms|S)`|never waits|its caller's deadline|as long as that lives"
)


def makers() -> set[str]:
    return {
        name
        for name in tracked(ROOT, "kvstore", "connector")
        if name.endswith(".py")
        and not name.startswith("kvstore/testing/")
        and MAKES.search((ROOT / name).read_text())
    }


def rows() -> dict[str, str]:
    return dict(ROW.findall((ROOT / "docs" / "security.md").read_text()))


def test_each_file_that_makes_sockets_is_listed_with_its_deadline() -> None:
    told = rows()
    assert told.keys() == makers()
    assert not [name for name, row in told.items() if not TIME.search(row)]


def test_a_file_that_makes_one_is_found(tmp_path: Path) -> None:
    for line in (
        "self._socket = socket.socket()",
        "with socket.create_server(at) as s:",
        "await asyncio.open_connection(host)",
        "tls.wrap_socket(one)",
        "context.socket(zmq.SUB)",
        "aiohttp.ClientSession()",
    ):
        assert MAKES.search(line), line
    assert not MAKES.search("self._sockets = tcp.listen(host)")
