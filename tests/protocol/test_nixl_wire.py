import pytest
from each_input import each

from kvstore.protocol.nixl import (
    DEVICES_MAX,
    METADATA_BYTES_MAX,
    NAME_CHARS_MAX,
    PROBE_BYTES,
    Endpoint,
    unpack_endpoint,
)
from kvstore.protocol.stream import WireError

WAY = Endpoint("0000000000000007#5.1", b"metadata", 1 << 40, 1 << 41, 1 << 42, bytes(PROBE_BYTES))


def test_an_endpoint_is_read_as_it_was_sent_and_none_is_none() -> None:
    assert unpack_endpoint(list(WAY)) == WAY
    of_a_node_that_says_nothing_of_devices = list(WAY)[:-1]
    assert unpack_endpoint(of_a_node_that_says_nothing_of_devices) == WAY
    assert unpack_endpoint([]) is None


@each(
    "border",
    [
        {"agent": "n"},
        {"agent": "n" * NAME_CHARS_MAX},
        {"metadata": b"m"},
        {"metadata": bytes(METADATA_BYTES_MAX)},
        {"head_at": 1, "data_at": 1, "probe_at": 1},
        {"head_at": (1 << 62) - 1},
        {"device": 0},
        {"device": DEVICES_MAX - 1},
    ],
    ids=str,
)
def test_an_endpoint_at_any_limit_is_taken(border: dict[str, object]) -> None:
    way = WAY._replace(**border)
    assert unpack_endpoint(list(way)) == way


@each(
    "lie",
    [
        {"agent": ""},
        {"agent": b"bytes"},
        {"agent": "n" * 129},
        {"metadata": b""},
        {"metadata": bytes(METADATA_BYTES_MAX + 1)},
        {"metadata": "text"},
        {"head_at": -1},
        {"head_at": (1 << 64) - 1},
        {"head_at": 1 << 62},
        {"data_at": 0},
        {"data_at": 1.5},
        {"probe_at": True},
        {"probe": bytes(PROBE_BYTES - 1)},
        {"probe": None},
        {"device": -2},
        {"device": DEVICES_MAX},
        {"device": True},
        {"device": "0"},
    ],
    ids=str,
)
def test_what_cannot_be_an_endpoint_is_refused(lie: dict[str, object]) -> None:
    with pytest.raises(WireError):
        unpack_endpoint(list(WAY._replace(**lie)))


def test_a_way_with_too_much_or_too_little_is_refused() -> None:
    for answers in (list(WAY)[:-2], [*WAY, 1]):
        with pytest.raises(WireError):
            unpack_endpoint(answers)
