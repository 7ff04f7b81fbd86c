"""Passwords, TLS, and what no message says. Who may do what is in test_redis_acl.py."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tls_certificate
from redis_servers import RedisServer, free_port

from kvstore.errors import IndexUnavailableError, UsageError
from kvstore.index.base import KeyRecord
from kvstore.index.redis.acl import AclRole, acl_rules, password_hash
from kvstore.index.redis.index import RedisIndex, open_index

PREFIX = "kv:tenant"
SECRET = "s3cret/:@?&%"
SECRET_IN_URL = "s3cret%2F%3A%40%3F%26%25"
RECORDS = [KeyRecord(bytes([i]) * 32, b"record") for i in range(3)]
KEYS = [key for key, _ in RECORDS]
READER, NODE = (
    acl_rules(role, PREFIX, password_hash(SECRET)) for role in (AclRole.CLIENT, AclRole.NODE)
)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        for name, rules in (("reader", READER), ("node", NODE)):
            set_user(server, name, rules)
        yield server


def set_user(server: RedisServer, name: str, rules: str) -> None:
    server.admin().execute_command("ACL", "SETUSER", name, *rules.split())


def index_of(server: RedisServer, user: str, password: str = SECRET_IN_URL) -> RedisIndex:
    url = f"unix://{user}:{password}@{server.socket}"
    return open_index(url, key_prefix=PREFIX, timeout_s=5, publish_timeout_s=5)


@pytest.mark.parametrize("user", ["reader", "nobody"])
def test_a_wrong_password_is_said_and_no_password_is_shown(server: RedisServer, user: str) -> None:
    index = index_of(server, user, "wr0ng-pw")
    with pytest.raises(IndexUnavailableError, match="wrong user name or password") as raised:
        index.match(KEYS)
    shown = f"{raised.value!r} {raised.value} {index!r} {index._read!r}"
    assert "wr0ng-pw" not in shown
    assert SECRET not in shown


def test_a_missing_password_is_said() -> None:
    with RedisServer("--requirepass", SECRET) as server:
        index = open_index(server.url, timeout_s=5)
        with pytest.raises(IndexUnavailableError, match="a user name or password is needed"):
            index.match(KEYS)
        index.close()
        index = open_index(f"unix://:{SECRET_IN_URL}@{server.socket}?db=3", timeout_s=5)
        assert index.match(KEYS) == []
        index.close()


def test_a_password_that_redis_does_not_want_is_said(server: RedisServer) -> None:
    with pytest.raises(IndexUnavailableError, match="a password was given, but none is set"):
        index_of(server, "").ping()


def test_a_db_is_selected(server: RedisServer) -> None:
    one = open_index(f"{server.url}?db=1", timeout_s=5, publish_timeout_s=5)
    two = open_index(f"{server.url}?db=2", timeout_s=5)
    one.publish(RECORDS)
    assert one.match(KEYS) == [b"record"] * 3
    assert two.match(KEYS) == []
    far = open_index(f"{server.url}?db=999", timeout_s=5)
    with pytest.raises(IndexUnavailableError, match="DB index"):
        far.ping()


def test_compare_and_delete_needs_scripts_or_transactions_and_says_so() -> None:
    with RedisServer() as server:
        set_user(server, "node", NODE.replace("+watch", ""))
        node = index_of(server, "node")
        with pytest.raises(IndexUnavailableError, match=r"lacks a right.*watch"):
            node.remove(RECORDS)
        set_user(server, "node", NODE)
        node = index_of(server, "node")
        node.publish(RECORDS)
        assert node.remove([RECORDS[0], KeyRecord(KEYS[1], b"other")]) == 1
        assert node.lookup(KEYS) == [None, b"record", b"record"]
        node.close()


# TLS: the packaged Redis is built without it, so a terminator stands in front of it.


class TlsFront:
    """Ends TLS and passes bytes on to a Redis."""

    def __init__(
        self, server: RedisServer, certificate: Path, key: Path, *, mutual: bool = False
    ) -> None:
        """With `mutual` a client must show a certificate, too; the same authority vouches."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        if mutual:
            context.load_verify_locations(certificate)
            context.verify_mode = ssl.CERT_REQUIRED
        self.port = free_port()
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._context = context
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        raw.settimeout(10)
        behind = socket.socket(socket.AF_UNIX)
        behind.settimeout(10)
        try:
            with self._context.wrap_socket(raw, server_side=True) as front, behind:
                behind.connect(str(self._server.socket))
                # One request, one reply at a time is all that these tests send.
                while request := front.recv(1 << 16):
                    behind.sendall(request)
                    front.sendall(behind.recv(1 << 16))
        except OSError:
            return

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tls_certificate.certificate(tmp_path_factory.mktemp("tls"), "localhost", "127.0.0.1")


@pytest.fixture
def tls_port(server: RedisServer, certificate: tuple[Path, Path]) -> Iterator[int]:
    front = TlsFront(server, *certificate)
    yield front.port
    front.close()


def test_tls_with_the_right_authority_works(tls_port: int, certificate: tuple[Path, Path]) -> None:
    url = f"rediss://node:{SECRET_IN_URL}@localhost:{tls_port}?ssl_ca_certs={certificate[0]}"
    index = open_index(url, key_prefix=PREFIX, timeout_s=5, publish_timeout_s=5)
    index.publish(RECORDS)
    for _ in range(3):
        assert index.match(KEYS) == [b"record"] * 3
    index.close()


def test_tls_refuses_a_certificate_that_nobody_vouches_for(tls_port: int) -> None:
    index = open_index(f"rediss://localhost:{tls_port}", timeout_s=5)
    with pytest.raises(IndexUnavailableError, match="certificate"):
        index.ping()


def test_a_certificate_for_another_name_is_refused(
    server: RedisServer, certificate: tuple[Path, Path]
) -> None:
    other = tls_certificate.certificate(certificate[0].parent / "other", "elsewhere.example")
    front = TlsFront(server, *other)
    where = f"localhost:{front.port}?ssl_ca_certs={other[0]}"
    index = open_index(f"rediss://{where}", timeout_s=5)
    with pytest.raises(IndexUnavailableError, match="certificate"):
        index.ping()
    index.close()
    unchecked = f"rediss://node:{SECRET_IN_URL}@{where}&ssl_check_hostname=no"
    index = open_index(unchecked, timeout_s=5)
    index.ping()
    index.close()
    front.close()


def test_a_client_shows_its_certificate_where_one_is_asked_for(
    server: RedisServer, certificate: tuple[Path, Path]
) -> None:
    front = TlsFront(server, *certificate, mutual=True)
    where = f"node:{SECRET_IN_URL}@localhost:{front.port}?ssl_ca_certs={certificate[0]}"
    index = open_index(f"rediss://{where}", timeout_s=5)
    with pytest.raises(IndexUnavailableError):
        index.ping()
    index.close()
    ours = f"&ssl_certfile={certificate[0]}&ssl_keyfile={certificate[1]}"
    index = open_index(f"rediss://{where}{ours}", timeout_s=5)
    index.ping()
    index.close()
    front.close()


def test_tls_can_be_told_not_to_check(tls_port: int) -> None:
    url = f"rediss://node:{SECRET_IN_URL}@127.0.0.1:{tls_port}?ssl_cert_reqs=none"
    index = open_index(url, key_prefix=PREFIX, timeout_s=5)
    index.ping()
    index.close()


def test_plain_text_to_a_tls_port_fails_in_time(tls_port: int) -> None:
    index = open_index(f"redis://localhost:{tls_port}", timeout_s=2)
    with pytest.raises(IndexUnavailableError):
        index.ping()


def test_a_missing_authority_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ssl_ca_certs=.*no such file"):
        open_index(f"rediss://localhost?ssl_ca_certs={tmp_path}/none.pem")
