"""Secrets and certificates are changed under a running node and running clients."""

from __future__ import annotations

import copy
import pickle
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from each_input import each
from redis_servers import RedisServer, wait_until
from stores import NodeProcess, NodeThread
from tls_certificate import openssl

from kvstore import Client
from kvstore.cli.checks import software
from kvstore.cli.checks.base import Context, Level
from kvstore.errors import PeerError, UsageError
from kvstore.node.stream import server as stream_server
from kvstore.secret import secrets_in
from kvstore.system import renewed
from kvstore.transport.stream.security import StreamSecurity, ending
from kvstore.transport.stream.transport import StreamTransport

OLD, NEW = "the old secret, long enough", "the new secret, long enough"
TAKEN_WITHIN_S = 0.8
"""Twice what a file needs to settle and to be looked at, where that is quick."""
SOON_S = 20.0
"""A look, and a second in which a file settles; and a busy machine."""


def put_file(path: Path, text: str) -> None:
    """As whoever rotates does: others see the old file or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    fresh.replace(path)


class Place:
    """A node, and a client's transport with a file of its own, neither of which starts again."""

    def __init__(self, redis: RedisServer, directory: Path) -> None:
        self.theirs, self.ours = directory / "node-secret", directory / "client-secret"
        put_file(self.theirs, OLD)
        put_file(self.ours, OLD)
        security = StreamSecurity(secret_file=self.theirs)
        self.node = NodeThread(
            redis, listen=("127.0.0.1", 0), security=security, size_bytes=16 << 20
        )
        self.transport = StreamTransport(StreamSecurity(secret_file=self.ours))

    def lets_in(self, transport: StreamTransport | None = None) -> bool:
        """Whether node and client let each other in at a connection that is made now."""
        word = self.node.node.dir.announcement()
        assert word is not None
        pool = (transport or self.transport).pool(word)
        try:
            pool.give(pool.take(time.monotonic() + 10.0), False)
        except PeerError:
            return False
        return True

    def close(self) -> None:
        self.transport.close()
        self.node.__exit__()

    def goes_on(self) -> None:
        """Both sides have looked at what was written, and each still lets the other in."""
        until = time.monotonic() + TAKEN_WITHIN_S
        while time.monotonic() < until:
            assert self.lets_in()
            time.sleep(0.05)


@pytest.fixture
def place(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    for name in ("LOOK_EVERY_S", "SETTLED_S"):
        monkeypatch.setattr(renewed, name, TAKEN_WITHIN_S / 4)
    made = Place(redis_server, tmp_path)
    yield made
    made.close()


def test_a_secret_is_changed_on_both_sides_without_a_miss(place: Place) -> None:
    """First all accept the new one too, then all use it, then the old one goes."""
    assert place.lets_in()
    steps = [f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\n", f"{NEW}\n"]
    for text in steps:
        for file in (place.theirs, place.ours):
            put_file(file, text)
            place.goes_on()
    assert not place.lets_in(StreamTransport(StreamSecurity(secret=OLD.encode())))


def test_a_secret_that_is_half_written_or_gone_leaves_the_old_one(place: Place) -> None:
    assert place.lets_in()
    for spoil in (lambda: put_file(place.theirs, f"{NEW}\nshort"), place.theirs.unlink):
        spoil()
        place.goes_on()
    put_file(place.theirs, NEW)
    put_file(place.ours, NEW)
    wait_until(place.lets_in, "both have the new one", SOON_S)


def test_a_secret_that_is_gone_before_the_first_connection_is_used_all_the_same(
    tmp_path: Path,
) -> None:
    file = tmp_path / "secret"
    put_file(file, OLD)
    security = StreamSecurity(secret_file=file)
    file.unlink()
    assert security.secrets() == (OLD.encode(),)


def test_a_file_that_others_may_read_is_not_taken_later_either(place: Place) -> None:
    assert place.lets_in()
    place.theirs.write_text(NEW)
    place.theirs.chmod(0o644)
    place.goes_on()


@each(
    ("raw", "secrets"),
    [
        (b"x" * 16, (b"x" * 16,)),
        (b"x" * 20 + b"\n" + b"y" * 20, (b"x" * 20, b"y" * 20)),
        (b"x" * 20 + b"\r\n" + b"y" * 20 + b"\n", (b"x" * 20, b"y" * 20)),
        ("ü".encode() * 8 + b"\n" + b"y" * 16, ("ü".encode() * 8, b"y" * 16)),
        (b"\x00" * 20 + b"\n" + b"\xff" * 20, (b"\x00" * 20 + b"\n" + b"\xff" * 20,)),
    ],
)
def test_a_secret_is_one_or_two_lines_of_text_or_any_bytes(
    raw: bytes, secrets: tuple[bytes, ...]
) -> None:
    assert secrets_in("secret", raw) == secrets
    assert StreamSecurity(secret=raw).secrets() == secrets


@pytest.mark.parametrize(
    "raw", [b"x" * 20 + b"\nshort", b"\n".join([b"x" * 20] * 3), b"x" * 20 + b"\n\n" + b"y" * 20]
)
def test_other_lines_are_refused_and_not_shown(raw: bytes) -> None:
    with pytest.raises(UsageError, match="16 to 4096 bytes, in one line or in each of two") as said:
        StreamSecurity(secret=raw)
    assert "xxx" not in str(said.value)


# Certificates


def issue(directory: Path, name: str, *, days: int = 365) -> tuple[Path, Path]:
    """A certificate and its key for 127.0.0.1, signed by the authority in `directory`."""
    authority, key = directory / "ca.pem", directory / "ca.key"
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    if not authority.exists():
        openssl("req", "-x509", *ec, "-keyout", key, "-out", authority, "-subj", "/CN=ca")
    ours, request = directory / f"{name}.key", directory / f"{name}.csr"
    openssl("req", *ec, "-keyout", ours, "-out", request, "-subj", f"/CN={name}")
    extensions = directory / "ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1\n")
    made = directory / f"{name}.pem"
    signing = ("-CA", authority, "-CAkey", key, "-CAcreateserial", "-extfile", extensions)
    openssl("x509", "-req", "-in", request, *signing, "-days", days, "-out", made)
    return made, ours


def subject_served(node: NodeProcess, authority: Path) -> str:
    word = node.directory.announcement()
    assert word is not None
    where = urlsplit(word.transports["stream"])
    context = ssl.create_default_context(cafile=authority)
    with (
        socket.create_connection((where.hostname, where.port), 10) as raw,
        context.wrap_socket(raw, server_hostname=where.hostname) as tls,
    ):
        return dict(pair[0] for pair in tls.getpeercert()["subject"])["commonName"]


def test_a_renewed_certificate_is_served_and_one_without_its_key_is_not(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    first, second = issue(tmp_path, "first"), issue(tmp_path, "second")
    served = tmp_path / "tls.pem", tmp_path / "tls.key"
    for source, target in zip(first, served, strict=True):
        shutil.copy(source, target)
    authority = tmp_path / "ca.pem"
    listens = ("--listen", "127.0.0.1:0", "--open")
    tls = ("--tls-cert", str(served[0]), "--tls-key", str(served[1]))
    with NodeProcess(redis_server, options=(*listens, *tls)) as node:
        assert subject_served(node, authority) == "first"
        with (
            Client(**node.client_options) as saver,
            Client(
                **{**node.client_options, "run_dir": tmp_path / "there"},
                security=StreamSecurity(tls_ca=authority),
            ) as reader,
        ):
            saver.put("k", b"v")
            wait_until(lambda: reader.get("k") == b"v", "it is read")
            shutil.copy(second[0], served[0])  # its key does not fit yet
            time.sleep(3.0)
            assert subject_served(node, authority) == "first"
            shutil.copy(second[1], served[1])
            wait_until(lambda: subject_served(node, authority) == "second", "it is served", SOON_S)
            assert reader.get("k") == b"v"


def test_a_client_takes_a_new_authority(redis_server: RedisServer, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    issue(old, "node")
    served = issue(new, "node")
    trusted = tmp_path / "ca.pem"
    shutil.copy(old / "ca.pem", trusted)
    options = ("--listen", "127.0.0.1:0", "--open", "--tls-cert", str(served[0]))
    with (
        NodeProcess(redis_server, options=(*options, "--tls-key", str(served[1]))) as node,
        Client(**node.client_options) as saver,
        Client(
            **{**node.client_options, "run_dir": tmp_path / "there"},
            security=StreamSecurity(tls_ca=trusted),
        ) as reader,
    ):
        saver.put("k", b"v")
        assert reader.get("k") is None
        shutil.copy(new / "ca.pem", trusted)
        wait_until(lambda: reader.get("k") == b"v", "the new authority is trusted", SOON_S)


@pytest.mark.parametrize(("days", "warned"), [(6, True), (8, False)])
def test_a_certificate_that_ends_within_a_week_is_told_by_node_and_doctor(
    days: int, warned: bool, redis_server: RedisServer, tmp_path: Path, monkeypatch
) -> None:
    cert, key = issue(tmp_path, "node", days=days)
    monkeypatch.setenv("KVSTORE_TLS_CERT", str(cert))
    monkeypatch.setenv("KVSTORE_TLS_KEY", str(key))
    found = software.transports(Context(None, "kv:default", None))
    assert (found[-1].level is Level.WARN) is warned
    assert bool(ending(cert)) is warned
    if warned:
        assert str(cert) in found[-1].found


def test_what_is_no_certificate_ends_never(tmp_path: Path) -> None:
    """Who uses it says what is wrong with it."""
    (tmp_path / "x").write_text("no certificate")
    assert ending(tmp_path / "x") == ending(tmp_path / "absent") == ""


def test_a_node_warns_of_its_certificate(
    redis_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = issue(tmp_path, "node", days=2)
    security = StreamSecurity(secret=NEW.encode(), tls_cert=cert, tls_key=key)
    with NodeThread(redis_server, listen=("127.0.0.1", 0), security=security, size_bytes=16 << 20):
        wait_until(lambda: f"the certificate in {cert} ends" in caplog.text, "it is said")
    assert stream_server.END_WARNED_EVERY_S >= 3600
    assert caplog.text.count("renew it") == 1


def test_what_protects_a_stream_can_be_copied_once_it_was_used(tmp_path: Path) -> None:
    cert, key = issue(tmp_path, "node")
    secret = tmp_path / "secret"
    put_file(secret, OLD)
    one = StreamSecurity(secret_file=secret, tls_ca=cert, tls_cert=cert, tls_key=key)
    assert one.secrets() == (OLD.encode(),)
    assert one.server_context() is one.server_context()
    for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert other == one
        assert other.secrets() == one.secrets()
        assert other.client_context() is not None
