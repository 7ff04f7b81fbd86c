"""A client that cannot ask its index says so by itself, and when it is asked."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis_servers import RedisServer, free_port, wait_until

from kvstore import AsyncClient, Client, Limits
from kvstore.client import health
from kvstore.client.nodes.saving.host_writer import HostWriter
from kvstore.errors import IndexDeadlineError
from kvstore.index.base import allowed_s
from kvstore.index.memory import MemoryIndex
from kvstore.index.outage import GuardedIndex
from kvstore.limits import PATIENT_TIMEOUT_S
from kvstore.spi import IndexRefusedError, IndexUnavailableError
from kvstore.types import Key

if TYPE_CHECKING:
    from stores import NodeProcess

PASSWORD = "right-one"
QUICK = Limits(redis_timeout_s=0.5, request_timeout_s=0.5)


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    with RedisServer("--requirepass", PASSWORD, port=free_port()) as server:
        yield server


def with_password(server: RedisServer, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{server.port}"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "kvstore.client" and record.levelno == logging.WARNING
    ]


@pytest.mark.parametrize("wrong", ["password", "port", "host"])
def test_what_is_wrong_with_the_url_is_a_warning_in_the_first_second(
    guarded: RedisServer, wrong: str, caplog: pytest.LogCaptureFixture, tmp_path
) -> None:
    url, said = {
        "password": (with_password(guarded, "another"), "wrong user name or password"),
        "port": (f"redis://127.0.0.1:{free_port()}", "refused"),
        "host": ("redis://no-such-host.invalid:6379", "no-such-host.invalid"),
    }[wrong]
    with caplog.at_level(logging.INFO), Client(url, run_dir=tmp_path):
        wait_until(lambda: warnings(caplog), "the warning")
    (warning,) = warnings(caplog)
    assert said in warning
    assert "only blocks of this host are found" in warning
    assert "another" not in warning


def test_the_first_look_comes_within_a_second() -> None:
    from kvstore.client.nodes import reaper

    assert reaper.EVERY_S < 1.0


def test_the_warning_comes_again_at_intervals_and_not_with_every_call(
    tmp_path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    with caplog.at_level(logging.INFO), Client(url, run_dir=tmp_path, limits=QUICK) as client:
        for _ in range(20):
            assert client.get("k") is None
        assert len(warnings(caplog)) == 1
        monkeypatch.setattr(health, "INDEX_WARNED_EVERY_S", 0.1)
        client.session._watch._warn_at = 0.0
        for _ in range(3):
            assert client.get("k") is None
            time.sleep(0.11)
        assert len(warnings(caplog)) == 4


def test_the_end_of_the_trouble_is_said_and_the_next_trouble_warns_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(health, "INDEX_LOOKED_AFTER_EVERY_S", 0.0)
    with (
        caplog.at_level(logging.INFO),
        RedisServer() as server,
        Client(server.url, run_dir=tmp_path, limits=QUICK),
    ):
        for count in (1, 2):
            server.kill()
            wait_until(lambda count=count: len(warnings(caplog)) == count, "the warning")
            server.start()
            wait_until(
                lambda count=count: (
                    sum("answers again" in r.getMessage() for r in caplog.records) == count
                ),
                "the end is said",
            )


@pytest.mark.parametrize("late", [False, True])
def test_an_index_that_is_late_for_a_moment_is_not_away(
    late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither for people nor for calls, whose breaker stays closed."""
    takes_s = PATIENT_TIMEOUT_S + (0.1 if late else -0.1)

    class Late(MemoryIndex):
        def lookup(self, keys: Sequence[Key]) -> list[bytes | None]:
            if takes_s <= allowed_s(0.05):
                return super().lookup(keys)
            raise IndexDeadlineError("late")

    index = GuardedIndex(Late())
    with caplog.at_level(logging.INFO):
        health.IndexWatch(index).look(1.0)
    assert len(warnings(caplog)) == late
    with pytest.raises(IndexDeadlineError):  # not that of an open breaker
        index.lookup([bytes(32)])


def test_ping_and_health_of_a_store_that_works(node: NodeProcess, client: Client) -> None:
    client.ping()
    assert client.put("k", b"v")
    found = client.health()
    assert found
    assert dict(found.nodes) == {"node": ""}
    assert str(found) == "healthy"


def test_ping_raises_what_is_wrong_and_health_says_it(guarded: RedisServer, tmp_path) -> None:
    with Client(with_password(guarded, "another"), run_dir=tmp_path, limits=QUICK) as client:
        with pytest.raises(IndexRefusedError, match="wrong user name or password"):
            client.ping()
        found = client.health()
        assert not found
        assert "wrong user name or password" in str(found)
        assert found.nodes == {}


def test_a_user_that_may_not_look_up_is_refused_though_redis_answers(
    guarded: RedisServer, tmp_path
) -> None:
    admin = guarded.admin(password=PASSWORD)
    admin.execute_command("ACL", "SETUSER", "blind", "on", ">blind", "~*", "-@all", "+ping")
    url = f"redis://blind:blind@127.0.0.1:{guarded.port}"
    with (
        Client(url, run_dir=tmp_path, limits=QUICK) as client,
        pytest.raises(IndexUnavailableError, match="lacks a right"),
    ):
        client.ping()


def test_health_names_the_node_that_does_not_answer(node: NodeProcess) -> None:
    with Client(**{**node.client_options, "limits": QUICK}) as client:
        assert client.put("k", b"v")
        node.signal(signal.SIGSTOP)
        try:
            found = client.health()
        finally:
            node.signal(signal.SIGCONT)
        assert not found
        assert "did not answer in time" in found.nodes["node"]
        assert not found.index


def test_health_says_where_no_node_is(node: NodeProcess, tmp_path: Path) -> None:
    """Values go to other hosts then, which need not be what was meant."""
    run_dir = tmp_path / "run"
    with Client(**{**node.client_options, "run_dir": run_dir}) as client:
        found = client.health()
    assert found
    assert str(found) == "healthy, with no memory node on this host"


def test_health_starts_nothing(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    look = HostWriter._look

    def noted(self: HostWriter, start: bool):  # type: ignore[no-untyped-def]
        started.append(start)
        return look(self, start)

    monkeypatch.setattr(HostWriter, "_look", noted)
    with Client(**node.client_options) as client:
        assert client.health()
    assert not any(started)


async def _asked(node: NodeProcess) -> bool:
    async with AsyncClient(**node.client_options) as client:
        await client.ping()
        return bool(await client.health())


def test_asyncio_has_both(node: NodeProcess) -> None:
    import asyncio

    assert asyncio.run(_asked(node))
