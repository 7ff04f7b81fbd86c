"""A node of another version is named wherever somebody misses it, and nothing of it is used."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from clocks import died_ago
from redis_servers import RedisServer, wait_until
from stores import MIB, PATIENT, NodeProcess

from kvstore import Client, MissReason
from kvstore.nodedir import VERSION, NodeDir, stranger, sweep
from kvstore.segment import header
from kvstore.segment.attached import AttachedShm
from kvstore.spi import BlockSession, NodeUnavailableError

# A release that has changed what the version stands for: everything else is as it is here.
PEER = """
import sys
from kvstore import nodedir
from kvstore.protocol import control as wire
from kvstore.segment import header, shm
from kvstore.client.nodes import control
nodedir.VERSION = int(sys.argv[1])
wire.PROTOCOL_VERSION = control.PROTOCOL_VERSION = int(sys.argv[2])
header.LAYOUT_VERSION = int(sys.argv[3])
from kvstore.cli import main
raise SystemExit(main(sys.argv[4:]))
"""
SAID = f"node b speaks version {VERSION + 1}, this side version {VERSION}"


class Peer:
    """`kvstore node` of another version, in its own process."""

    def __init__(
        self,
        redis: RedisServer,
        run_dir: Path,
        version: int = VERSION + 1,
        protocol: int = 99,
        layout: int = 99,
    ) -> None:
        self.directory = NodeDir(run_dir, "b")
        self.key_prefix = f"kv:{run_dir.name}"
        self.options = {
            "url": redis.url,
            "run_dir": run_dir,
            "key_prefix": self.key_prefix,
            "limits": PATIENT,
        }
        self.place = ("--run-dir", str(run_dir), "--key-prefix", self.key_prefix)
        numbers = [str(number) for number in (version, protocol, layout)]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", PEER, *numbers, "node", "--name", "b", "--size", "4MiB"),
                *("--url", redis.url, *self.place),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self.directory.socket.exists, "the peer serves")
        wait_until(lambda: self.directory.why_not_ready() == "", "the peer is ready")

    def kv(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvstore.cli", *args, *self.place],
            capture_output=True,
            text=True,
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvo-") as directory:
        yield Path(directory)


@pytest.fixture
def peer(redis_server: RedisServer, run_dir: Path) -> Iterator[Peer]:
    peer = Peer(redis_server, run_dir)
    yield peer
    peer.close()


def test_a_client_names_it_in_what_it_answers(peer: Peer) -> None:
    with Client(**peer.options) as client:
        result = client.put("k", b"v")
        assert not result
        assert SAID in result.reason
        assert client.health().nodes == {"b": SAID}
        assert not client.health()
        missing = client.explain_key("k").first_missing
        assert missing is not None
        assert SAID in missing.detail
        assert client.get("k") is None
    refused = pytest.raises(NodeUnavailableError, match=SAID)
    with closing(BlockSession(**peer.options)) as session, refused:
        session.reserve([bytes(32)], 1000, 1)


def test_the_command_line_names_it(peer: Peer, redis_server: RedisServer) -> None:
    url = ("--url", redis_server.url)
    assert SAID in peer.kv("stat", *url).stdout
    assert SAID in peer.kv("doctor", *url).stdout
    one = peer.kv("stat", "--node", "b")
    assert one.returncode == 1
    assert SAID in one.stderr


def test_a_client_on_another_host_names_it_and_its_host(peer: Peer, tmp_path: Path) -> None:
    with Client(**{**peer.options, "run_dir": tmp_path}) as client:
        result = client.put("k", b"v")
        assert not result
        assert SAID in result.reason


def test_a_block_in_it_is_out_of_reach_not_in_a_dead_node(
    peer: Peer, redis_server: RedisServer
) -> None:
    """Found in the index: its own clients use it."""
    code = PEER.replace("from kvstore.cli import main\nraise SystemExit(main(sys.argv[4:]))", "")
    code += (
        "from pathlib import Path\nfrom kvstore import Client, Limits\n"
        "patient = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)\n"
        "with Client(sys.argv[4], run_dir=Path(sys.argv[5]), key_prefix=sys.argv[6],"
        " limits=patient) as c:\n    print(c.put('k', b'v' * 5000).status)\n"
    )
    numbers = (str(VERSION + 1), "99", "99")
    where = (redis_server.url, str(peer.directory.path.parent.parent), peer.key_prefix)
    ran = subprocess.run(
        [sys.executable, "-c", code, *numbers, *where], capture_output=True, text=True
    )
    assert ran.stdout == "stored\n", ran.stderr
    with Client(**peer.options) as client:
        assert client.get("k") is None
        missing = client.explain_key("k").first_missing
        assert missing is not None
        assert missing.reason is MissReason.OUT_OF_REACH
        assert SAID in missing.detail


def ours(peer: Peer, redis: RedisServer, name: str) -> NodeProcess:
    """Return a node of this version beside it."""
    where = {"key_prefix": peer.key_prefix, "run_dir": peer.options["run_dir"]}
    return NodeProcess(redis, size=4 * MIB, name=name, **where)


def test_it_does_not_keep_a_node_of_ours_from_being_used(
    peer: Peer, redis_server: RedisServer
) -> None:
    with (
        ours(peer, redis_server, name="ours"),
        Client(**peer.options) as client,
    ):
        assert client.put("k", b"v")
        assert client.get("k") == b"v"
        assert client.health().nodes == {"b": SAID, "ours": ""}


def test_one_that_differs_in_its_protocol_alone_says_both_versions(
    redis_server: RedisServer, run_dir: Path
) -> None:
    with (
        closing(Peer(redis_server, run_dir, version=VERSION, layout=header.LAYOUT_VERSION)) as peer,
        Client(**peer.options) as client,
    ):
        result = client.put("k", b"v")
        assert not result
        assert "this node speaks version 99" in result.reason


def test_a_segment_of_another_layout_is_told_by_its_version(
    redis_server: RedisServer, run_dir: Path
) -> None:
    with closing(Peer(redis_server, run_dir, version=VERSION)) as peer:
        word = peer.directory.announcement()
        assert word is not None
        with pytest.raises(
            ValueError, match=f"layout version 99, this side {header.LAYOUT_VERSION}"
        ):
            AttachedShm(Path(word.data_path), Path(word.head_path))
        with Client(**peer.options) as client:
            assert "layout version 99" in client.put("k", b"v").reason


def test_what_a_dead_one_left_waits_for_its_next_start_and_goes_with_it(
    peer: Peer, redis_server: RedisServer, run_dir: Path
) -> None:
    files = peer.directory._segment_paths()
    assert len(files) == 2
    wait_until(peer.directory.keep.exists, "it says that it may come back")
    peer.process.kill()
    peer.process.wait()
    sweep(run_dir)
    assert all(path.exists() for path in files), "not ours to free before its time"
    died_ago(3600, keep=peer.directory.keep)
    sweep(run_dir)
    assert not any(path.exists() for path in files)


def test_a_node_of_ours_in_its_place_starts_empty_and_frees_what_it_left(
    peer: Peer, redis_server: RedisServer
) -> None:
    files = peer.directory._segment_paths()
    peer.process.kill()
    peer.process.wait()
    with (
        ours(peer, redis_server, name="b"),
        Client(**peer.options) as client,
    ):
        assert not any(path.exists() for path in files)
        assert client.put("k", b"v")


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{}", b'{"version": "2"}', b'{"version": true}', b"\xff", b"[" * 10**5],
)
def test_what_is_no_announcement_is_no_stranger(raw: bytes) -> None:
    assert stranger(raw) is None


def test_a_strangers_words_are_cut_and_hold_nothing_that_a_terminal_obeys() -> None:
    found = stranger(b'{"version": 9, "name": "\\u001b[2J", "host": "%s"}' % (b"x" * 9999))
    assert found is not None
    assert found.name == "?"
    assert len(found.host) == 255
