"""A password of Redis is changed under whoever uses it: in its file, or by a function."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis_servers import RedisCluster, RedisServer, free_port, wait_until
from stores import NodeProcess
from threads_at_once import at_once

from kvstore import Client, RedisUrl
from kvstore.cli import main
from kvstore.errors import IndexDeadlineError, IndexUnavailableError, UsageError
from kvstore.index.redis import password as password_module
from kvstore.index.redis.index import RedisIndex, open_index
from kvstore.index.redis.url import parse_url
from kvstore.system import renewed

OLD, NEW = "the-old-pass/word", "the-new-pass/word"
HEALED_S = 20.0


def put_file(path: Path, text: str, mode: int = 0o600) -> Path:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(mode)
    return fresh.replace(path)


class Guarded:
    """A Redis with a password."""

    def __init__(self) -> None:
        self.server = RedisServer("--requirepass", OLD, port=free_port())
        self.password = OLD

    def change(self, password: str) -> None:
        """Have another password, and everybody connect again."""
        admin = self.server.admin(password=self.password)
        admin.config_set("requirepass", password)
        self.password = password
        with closing(self.server.admin(password=password)) as again:
            again.client_kill_filter(_type="normal", skipme=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files settle, and are looked at again, sooner than an operator's."""
    for name in ("LOOK_EVERY_S", "SETTLED_S"):
        monkeypatch.setattr(renewed, name, 0.2)


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    made = Guarded()
    yield made
    made.server.close()


def index_of(url: str, timeout_s: float = 5.0) -> RedisIndex:
    return open_index(url, timeout_s=timeout_s, publish_timeout_s=timeout_s)


def answers(index: RedisIndex | Client) -> bool:
    try:
        index.ping()
    except IndexUnavailableError:
        return False
    return True


def test_a_password_in_a_file_is_read_again_when_it_changes(
    guarded: Guarded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = put_file(tmp_path / "password", f"{OLD}\n")
    with closing(index_of(f"redis://127.0.0.1:{guarded.server.port}?password_file={file}")) as one:
        one.ping()
        guarded.change(NEW)
        assert not answers(one)
        put_file(file, NEW)
        wait_until(lambda: answers(one), "the new one is used", HEALED_S)
        for spoil in (lambda: put_file(file, ""), file.unlink):
            spoil()
            time.sleep(0.6)
            guarded.change(NEW)
            assert answers(one), "what it was before is used"
        assert str(file) in caplog.text
        assert NEW not in caplog.text


def test_node_and_client_go_on_after_it_was_changed_and_so_does_the_command_line(
    guarded: Guarded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = put_file(tmp_path / "password", OLD)

    class Place:
        url = f"unix://{guarded.server.socket}?password_file={file}"

    with (
        NodeProcess(Place()) as node,  # type: ignore[arg-type]
        Client(**{**node.client_options, "transports": ["stream"]}) as far,
        Client(**node.client_options) as client,
    ):
        assert client.put("before", b"1")
        guarded.change(NEW)
        put_file(file, NEW)
        wait_until(lambda: answers(far), "the client asks the index again", HEALED_S)
        assert client.put("after", b"2")
        index = node.directory.announcement()
        assert index is not None
        admin = guarded.server.admin(password=NEW)
        admin.delete(f"{node.key_prefix}:node:{index.node_id:016x}")
        wait_until(
            lambda: admin.exists(f"{node.key_prefix}:node:{index.node_id:016x}"),
            "the node announces itself",
            HEALED_S,
        )
        where = ["--url", Place.url, "--key-prefix", node.key_prefix]
        assert main(["stat", *where, "--run-dir", str(node.run_dir)]) == 0
        assert NEW not in "".join(capsys.readouterr())


def test_on_a_cluster_too(tmp_path: Path) -> None:
    cluster = RedisCluster()
    try:
        for node in cluster.nodes:
            node.admin().config_set("requirepass", OLD)
        file = put_file(tmp_path / "password", OLD)
        with closing(index_of(f"{cluster.url}?password_file={file}")) as index:
            index.ping()
            for node in cluster.nodes:
                admin = node.admin(password=OLD)
                admin.config_set("requirepass", NEW)
                node.admin(password=NEW).client_kill_filter(_type="normal", skipme=True)
            put_file(file, NEW)
            wait_until(lambda: answers(index), "the new one is used", HEALED_S)
    finally:
        for node in cluster.nodes:
            node.process.kill()
        cluster.close()


def test_through_sentinel_each_has_a_file_of_its_own(guarded: Guarded, tmp_path: Path) -> None:
    conf = tmp_path / "sentinel.conf"
    conf.write_text(
        f"sentinel monitor main 127.0.0.1 {guarded.server.port} 1\n"
        f"sentinel auth-pass main {OLD}\nrequirepass {NEW}\n"
    )
    with RedisServer(port=free_port(), args=(str(conf), "--sentinel")) as sentinel:
        ours = put_file(tmp_path / "ours", OLD)
        theirs = put_file(tmp_path / "theirs", NEW)
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main?password_file={ours}"
        with closing(index_of(f"{url}&sentinel_password_file={theirs}")) as index:
            index.ping()


def test_a_function_is_asked_for_the_password_when_connections_are_opened(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(password_module, "KEPT_S", 0.0)
    asked = itertools.count(1)
    calls: list[int] = []

    def token() -> str:
        calls.append(next(asked))
        return guarded.password

    url = RedisUrl(f"redis://127.0.0.1:{guarded.server.port}", token)
    with closing(index_of(url)) as index:
        assert calls == []
        index.ping()
        index.ping()
        assert calls == [1]
        guarded.change(NEW)
        index.ping()
        assert calls == [1, 2]


def test_a_client_takes_a_function(guarded: Guarded, tmp_path: Path) -> None:
    url = RedisUrl(f"redis://127.0.0.1:{guarded.server.port}", lambda: guarded.password)
    with Client(url, run_dir=tmp_path / "run") as client:
        assert client.get("k") is None
        client.session.index.ping()


def test_one_answer_is_good_for_all_connections_of_a_moment(guarded: Guarded) -> None:
    calls: list[str] = []

    def token() -> str:
        calls.append(guarded.password)
        return guarded.password

    with closing(index_of(RedisUrl(guarded.server.url, token))) as index:
        at_once([index.ping] * 8)
        assert answers(index)
    assert calls == [OLD]


def test_a_function_that_hangs_costs_a_call_its_deadline_and_is_not_asked_again_meanwhile(
    guarded: Guarded,
) -> None:
    free, calls = threading.Event(), []

    def token() -> str:
        calls.append(1)
        free.wait(30)
        return OLD

    with closing(index_of(RedisUrl(guarded.server.url, token), timeout_s=0.1)) as index:
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(IndexDeadlineError):
                index.ping()
            assert time.monotonic() - started < 5
        free.set()
        wait_until(lambda: answers(index), "what it said late is used")
    assert calls == [1]


@pytest.mark.parametrize("wrong", [OSError("token abcdef"), None, b"bytes", ""])
def test_a_function_that_fails_is_said_and_what_it_said_is_not(
    guarded: Guarded, wrong: object
) -> None:
    def token() -> object:
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    with closing(index_of(RedisUrl(guarded.server.url, token))) as index:  # type: ignore[arg-type]
        with pytest.raises(IndexUnavailableError, match="function that gives Redis' pass") as said:
            index.ping()
        assert "abcdef" not in str(said.value)


def test_a_host_without_threads_is_an_index_that_is_away_until_it_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = password_module.AskedPassword(lambda: "secret")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        with pytest.raises(IndexUnavailableError, match="no thread"):
            asked(time.monotonic() + 5)
    assert asked(time.monotonic() + 5) == "secret"


def test_a_child_asks_anew(guarded: Guarded) -> None:
    """The thread that its parent asks in is not there."""
    hangs = threading.Event()
    parent = os.getpid()

    def token() -> str:
        if os.getpid() == parent:
            hangs.wait(30)
        return OLD

    index = index_of(RedisUrl(guarded.server.url, token), timeout_s=0.2)
    assert not answers(index)
    child = os.fork()
    if child == 0:
        patient = index_of(RedisUrl(guarded.server.url, token))
        deadline = time.monotonic() + 10
        while not answers(index) and time.monotonic() < deadline:
            time.sleep(0.05)
        os._exit(0 if answers(index) and answers(patient) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hangs.set()
    index.close()


def test_a_file_that_cannot_be_used_is_said_by_name_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"password_file=.*cannot be read"):
        parse_url(f"redis://h?password_file={tmp_path / 'absent'}")
    open_to_all = put_file(tmp_path / "open", OLD, 0o644)
    with pytest.raises(UsageError, match="others may read"):
        parse_url(f"redis://h?password_file={open_to_all}")
    with pytest.raises(UsageError, match="must not be empty"):
        parse_url(f"redis://h?sentinel_password_file={put_file(tmp_path / 'empty', ' ')}")
    target = parse_url(f"redis://h?password_file={put_file(tmp_path / 'good', OLD)}")
    assert OLD not in repr(target)
