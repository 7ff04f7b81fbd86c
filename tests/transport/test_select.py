import pytest

from kvstore.errors import UsageError
from kvstore.transport.select import TRANSPORTS, allowed, choose


@pytest.mark.parametrize(
    ("names", "offered", "mapped", "chosen"),
    [
        (TRANSPORTS, ("nixl", "stream"), True, "shm"),
        (TRANSPORTS, ("nixl", "stream"), False, "nixl"),
        (TRANSPORTS, ("stream",), False, "stream"),
        (TRANSPORTS, (), False, None),
        (("stream",), ("nixl", "stream"), True, "stream"),
        (("shm",), ("nixl", "stream"), False, None),
    ],
)
def test_the_nearest_that_is_allowed_and_offered_is_chosen(names, offered, mapped, chosen):
    assert choose(names, offered, mapped=mapped) == chosen


def test_the_environment_allows_in_the_order_of_nearness(monkeypatch):
    monkeypatch.setenv("KVSTORE_TRANSPORTS", "stream, nixl")
    assert allowed(None) == ("nixl", "stream")
    assert allowed(["stream", "shm"]) == ("shm", "stream"), "an argument counts more"
    monkeypatch.delenv("KVSTORE_TRANSPORTS")
    assert allowed(None) == TRANSPORTS
    with pytest.raises(UsageError, match="transports="):
        allowed(["pigeon"])
