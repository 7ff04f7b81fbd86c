"""Who is remembered as refusing this client, and for how long."""

import ssl
from types import SimpleNamespace

import pytest

from kvstore.errors import DeadlineError, NodeUnavailableError
from kvstore.protocol.stream import WireError
from kvstore.protocol.stream_handshake import SecretError
from kvstore.transport.stream import refusals
from kvstore.transport.stream.refusals import Refusals


def node(number, epoch=1):
    return SimpleNamespace(node_id=number, epoch=epoch)


@pytest.mark.parametrize("error", [WireError("its secret is another one"), ssl.SSLError("no CA")])
def test_who_answers_and_refuses_is_remembered_until_that_start_of_it_serves(error):
    refused = Refusals()
    refused.heard(node(1), error)
    assert node(1) in refused
    assert node(1, epoch=2) not in refused
    assert node(2) not in refused
    refused.over(node(2))
    assert node(1) in refused
    refused.over(node(1))
    assert node(1) not in refused


@pytest.mark.parametrize("error", [DeadlineError("late"), NodeUnavailableError("gone"), OSError()])
def test_who_does_not_answer_refuses_nothing(error):
    refused = Refusals()
    refused.heard(node(1), error)
    assert node(1) not in refused


def test_beyond_a_limit_all_are_forgotten(monkeypatch):
    monkeypatch.setattr(refusals, "REFUSALS_MAX", 3)
    refused = Refusals()
    for number in range(4):
        refused.heard(node(number), WireError("no"))
    assert [node(number) in refused for number in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SecretError("another"), "secret"),
        (ssl.SSLCertVerificationError(1, "not valid"), "tls"),
        (ssl.SSLEOFError(8, "it hung up"), "refused"),
        (WireError("no room"), "refused"),
    ],
)
def test_what_a_connection_failed_at_is_told_apart(error, cause):
    refused = Refusals()
    refused.heard(node(1), error)
    assert refused.why(node(1)) == (cause, str(error))
    assert refused.why(node(2)) is None
