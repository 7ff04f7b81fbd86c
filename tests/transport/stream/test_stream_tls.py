"""Streams under TLS, with a CA made on the spot by the `openssl` command."""

import dataclasses
import time
from contextlib import closing

import pytest
from contract.transport import SECURITY, Place, TransportContract, reads
from tls_certificate import EC_KEY, openssl

from kvstore.errors import UsageError
from kvstore.node import Node, NodeConfig
from kvstore.transport.base import Read
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import NAME, StreamTransport


def authority(directory):
    """A CA that has signed a certificate for 127.0.0.1: (ca, certificate, key)."""
    ca, ca_key = directory / "ca.pem", directory / "ca.key"
    cert, key, request = directory / "n.pem", directory / "n.key", directory / "n.csr"
    names = directory / "names"
    names.write_text("subjectAltName=IP:127.0.0.1\n")
    openssl("req", "-x509", *EC_KEY, "-keyout", ca_key, "-out", ca, "-subj", "/CN=ca")
    openssl("req", *EC_KEY, "-keyout", key, "-out", request, "-subj", "/CN=node")
    openssl(
        *("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial"),
        *("-extfile", names, "-out", cert),
    )
    return ca, cert, key


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Another CA."""
    return authority(tmp_path_factory.mktemp("ca"))


def node_security(files, **more):
    return dataclasses.replace(SECURITY, tls_cert=files[1], tls_key=files[2], **more)


def client_security(files, **more):
    return dataclasses.replace(SECURITY, tls_ca=files[0], **more)


class TestTlsStream(TransportContract):
    @pytest.fixture
    def place(self, tmp_path, ours):
        place = Place(
            tmp_path,
            lambda place: StreamTransport(client_security(ours)),
            security=node_security(ours),
        )
        yield place
        place.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory, ours):
    place = Place(
        tmp_path_factory.mktemp("run"),
        lambda place: StreamTransport(client_security(ours)),
        security=node_security(ours),
    )
    yield place
    place.close()


def read_as(place, block, security, word=None):
    """Outcome for a client with this security."""
    transport, word = StreamTransport(security), word or place.word
    ours, place.transport = place.transport, transport
    node, place.word = place.word, word
    try:
        (outcome,), _ = place.read(block)
        return outcome
    finally:
        place.transport, place.word = ours, node
        transport.close()


def test_what_travels_is_not_readable(place):
    assert place.word.transports[NAME].startswith("tls://")


def test_a_node_with_a_certificate_of_another_ca_is_refused(place, theirs):
    outcome = read_as(place, place.save(b"1" * 1000), client_security(theirs))
    assert outcome.read is Read.FAILED
    assert "certificate" in outcome.reason


def test_a_certificate_for_another_name_is_refused(place, ours):
    port = place.word.transports[NAME].rpartition(":")[2]
    word = dataclasses.replace(place.word, transports={NAME: f"tls://localhost:{port}"})
    outcome = read_as(place, place.save(b"1" * 1000), client_security(ours), word)
    assert outcome.read is Read.FAILED


def test_tls_does_not_replace_the_secret(place, ours):
    for secret in (None, b"another secret, as long"):
        outcome = read_as(place, place.save(b"1"), client_security(ours, secret=secret))
        assert outcome.read is Read.FAILED
        assert "secret" in outcome.reason


def test_a_client_without_a_ca_and_one_that_is_told_of_no_tls_do_not_connect(place, ours):
    block = place.save(b"1" * 1000)
    assert read_as(place, block, SECURITY).read is Read.FAILED
    plain = place.word.transports[NAME].replace("tls:", "tcp:")
    word = dataclasses.replace(place.word, transports={NAME: plain})
    assert not StreamTransport(client_security(ours)).usable(word), "no downgrade"
    assert read_as(place, block, SECURITY, word).read is Read.FAILED


def test_a_node_with_a_ca_demands_certificates_of_clients(tmp_path, ours, theirs):
    with closing(
        Place(
            tmp_path,
            lambda place: StreamTransport(client_security(ours)),
            security=node_security(ours, tls_ca=ours[0]),
        )
    ) as place:
        block = place.save(b"1" * 1000)
        began = time.monotonic()
        assert reads(place.read(block)[0]) == [Read.FAILED]
        assert time.monotonic() - began < 15, "at once, not at the deadline"
        known = client_security(ours, tls_cert=ours[1], tls_key=ours[2])
        assert read_as(place, block, known).read is Read.HIT
        stranger = client_security(ours, tls_cert=theirs[1], tls_key=theirs[2])
        assert read_as(place, block, stranger).read is Read.FAILED


@pytest.mark.parametrize("lacks", ["tls_cert", "tls_key", "tls_ca"])
def test_files_that_cannot_be_used_keep_a_node_from_starting(tmp_path, ours, lacks):
    files = {"tls_ca": ours[0], "tls_cert": ours[1], "tls_key": ours[2]}
    files[lacks] = tmp_path / "absent.pem"
    security = dataclasses.replace(SECURITY, **files)
    config = NodeConfig(
        run_dir=tmp_path, size_bytes=1 << 20, listen=("127.0.0.1", 0), security=security
    )
    from kvstore.index.memory import MemoryIndex

    with pytest.raises(UsageError, match="tls="):
        Node(config, MemoryIndex()).start()


def test_a_certificate_needs_its_key(ours):
    with pytest.raises(UsageError, match="both or neither"):
        StreamSecurity(tls_cert=ours[1])
