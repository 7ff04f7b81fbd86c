"""Values that leave while they are read: found once more, not a third time."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from batch_readers import LeavesAll
from stores import NodeProcess  # noqa: TC002  # as in every other test

from kvstore import Client, MissReason


@pytest.fixture
def moving(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Client, int], list[bytes]]:
    """Have the value of "k" replaced by another, elsewhere, between finding and reading it, as
    many times; all values that it had."""

    def move(client: Client, times: int) -> list[bytes]:
        reader, values = client.session.reader, [os.urandom(100_000)]
        assert client.put("k", values[0])
        reader.forget(client.namespace.value_key("k"))
        read = reader.read

        def late(*args: object) -> object:
            if len(values) <= times:
                client.delete("k")
                client.put(f"in its place {len(values)}", os.urandom(100_000))
                values.append(os.urandom(100_000))
                assert client.put("k", values[-1])
            return read(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(reader, "read", late)
        monkeypatch.setattr("kvstore.segment.batch_read.READER", LeavesAll())
        return values

    return move


@pytest.mark.parametrize("into", [False, True])
def test_a_value_that_moves_between_finding_and_copying_is_read_where_it_is_now(
    client: Client, moving: Callable[[Client, int], list[bytes]], into: bool
) -> None:
    values = moving(client, 1)
    out = [bytearray(100_000)] if into else None
    (got,) = client.get_many(["k"], out=out)
    assert bytes(got) == values[1]
    assert client.stats()["client"]["hits"] == 1
    assert client.stats()["client"]["misses"] == 0


def test_a_value_that_moves_again_and_again_is_a_miss(
    client: Client, moving: Callable[[Client, int], list[bytes]]
) -> None:
    values = moving(client, 100)
    assert client.get("k") is None
    assert len(values) == 3, "looked for twice"
    assert client.stats()["client"]["misses"] == 1
    assert client.stats()["missed"][MissReason.LOAD_FAILED.value] == 2
