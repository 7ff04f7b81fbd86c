"""Equal identities are one index; credentials are not part of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from each_input import each
from redis_servers import RedisServer

from kvstore.index.outage import GuardedIndex
from kvstore.index.redis import identity
from kvstore.index.redis.identity import identity_of
from kvstore.index.redis.index import open_index
from kvstore.index.redis.url import parse_url


def said(url: str) -> str:
    return identity_of(parse_url(url))


@each(
    ("one", "other"),
    [
        ("redis://db.example", "redis://DB.example:6379/0"),
        ("redis://10.0.0.1:7000", "redis://someone:password@10.0.0.1:7000?db=0"),
        ("rediss://db.example", "redis://db.example"),
        ("redis://localhost", "redis://localhost:6379"),
        ("redis+cluster://a:1,b:2", "redis+cluster://b:2,a:1"),
    ],
)
def test_two_ways_to_write_one_address_are_the_same(one: str, other: str) -> None:
    assert said(one) == said(other) != ""


@each(
    ("one", "other"),
    [
        ("redis://db.example", "redis://db.example:6380"),
        ("redis://db.example/0", "redis://db.example/1"),
        ("redis://db.example", "redis://other.example"),
        ("redis://localhost", "redis://127.0.0.1"),
        ("redis+sentinel://a:1/one", "redis+sentinel://a:1/two"),
        ("redis+sentinel://a:1/one", "redis://a:1"),
        ("redis+cluster://a:1", "redis://a:1"),
    ],
)
def test_other_addresses_and_aliases_differ(one: str, other: str) -> None:
    assert said(one) != said(other)


def test_nothing_secret_is_said() -> None:
    for url in ("redis://me:secret1@db", "redis+sentinel://a:1/m?sentinel_password=secret1"):
        assert "secret1" not in said(url)
        assert "me:" not in said(url)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "[::1]"])
def test_an_address_of_this_host_is_another_in_another_network_namespace(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each container has a localhost of its own, and they may share a run directory."""
    here, far = said(f"redis://{host}"), said("redis://db.example")
    (tmp_path / "net").touch()
    monkeypatch.setattr(identity, "NETWORK", tmp_path / "net")
    assert said(f"redis://{host}") not in (here, "")
    assert said("redis://db.example") == far
    monkeypatch.setattr(identity, "NETWORK", tmp_path / "none")
    assert said(f"redis://{host}") == ""


def test_a_socket_is_the_same_by_whatever_path_its_directory_is_reached(tmp_path: Path) -> None:
    there, link, elsewhere = (tmp_path / name for name in ("there", "link", "elsewhere"))
    there.mkdir()
    elsewhere.mkdir()
    link.symlink_to(there)
    one = said(f"unix://{there}/redis.sock")
    assert one == said(f"unix://user:word@{link}/redis.sock") != ""
    assert one != said(f"unix://{there}/redis.sock?db=1")
    assert one != said(f"unix://{there}/other.sock")
    assert one != said(f"unix://{elsewhere}/redis.sock")
    assert said(f"unix://{tmp_path}/none/redis.sock") == ""


def test_it_is_told_without_a_connection_and_outlasts_a_restart_of_redis() -> None:
    with RedisServer() as redis:
        index = GuardedIndex(open_index(redis.url))
        before = index.identity()
        redis.restart()
        assert index.identity() == before == said(redis.url) != ""
        redis.kill()
        assert index.identity() == before
        index.close()
