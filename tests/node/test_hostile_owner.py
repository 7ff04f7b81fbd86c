"""The owner of a shared run directory cannot stop who reads there: tried by two real users.

Bob's node serves a group, and by a stream whoever knows his secret. Alice, who is in the group
and knows it, reads from two threads while Bob does to his files what he can. She may miss, or be
shown what Bob made of his own blocks, which only checksums tell; her process lives, nothing waits,
and nothing of Bob's is open in it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from other_users import ALICE, BOB, READERS, NodeOf, ProcessOf, needs_root, run_as
from redis_servers import RedisServer, free_port

from kvstore.nodedir import NodeDir
from kvstore.testing.stopping import stop

pytestmark = needs_root
PREFIX = "kv:owners"
SIZES = [100, 5000, 70_000, 1 << 20]
CALL_MAX_S = 8.0
"""Beyond the deadline of any call here, on a machine that is busy."""

CONTENT = """
import threading, time
SIZES = [100, 5000, 70_000, 1 << 20]
BLOCK = 300_000
TOKENS = list(range(1024))
def content(i):
    return bytes([i + 1]) * SIZES[i % 4]
def block(i):
    return bytes([i + 101]) * BLOCK
"""
SAVE = """
url, run_dir = args
with Client(url, key_prefix="kv:owners", run_dir=run_dir, verify="always", limits=PATIENT) as c:
    stored = c.put_many([(f"k{i}", content(i)) for i in range(8)])
    stored += c.put_blocks(TOKENS, [block(i) for i in range(4)])
    print(json.dumps(all(stored)))
"""
READ = """
url, run_dir, verify = args
client = Client(
    url, key_prefix="kv:owners", run_dir=run_dir, verify=verify,
    limits=Limits(redis_timeout_s=2.0, request_timeout_s=2.0),
)

class Round:
    def __init__(self):
        self.right = self.missed = self.wrong = 0
        self.longest_s = 0.0
        self.failed = []
    def timed(self, call):
        began = time.monotonic()
        try:
            return call()
        except Exception as e:
            self.failed.append(repr(e))
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - began)
    def saw(self, got, expected):
        if got is None:
            self.missed += 1
        elif bytes(got) == expected:
            self.right += 1
        else:
            self.wrong += 1
    def views(self, staging):
        found = client.match_prefix(TOKENS).found
        read = []
        for view in client.session.views(found, staging, 2.0):
            copied = None if view is None else bytes(view.buffer)
            read.append(copied if view is not None and view.valid() else None)
        return read + [None] * (4 - len(read))
    def run(self):
        names = [f"k{i}" for i in range(8)]
        for i, name in enumerate(names):
            self.saw(self.timed(lambda: client.get(name)), content(i))
        outs = [bytearray(len(content(i))) for i in range(8)]
        for i, got in enumerate(self.timed(lambda: client.get_many(names, out=outs)) or ()):
            self.saw(got, content(i))
        for staging in (None, memoryview(bytearray(2 << 20))):
            for i, got in enumerate(self.timed(lambda: self.views(staging)) or ()):
                self.saw(got, block(i))
        outs = [bytearray(BLOCK) for _ in range(4)]
        count = self.timed(lambda: client.get_blocks(TOKENS, outs)) or 0
        for i in range(4):
            self.saw(outs[i] if i < count else None, block(i))
        for name in names:
            self.timed(lambda: client.exists(name))
        self.timed(lambda: client.put("mine", b"x" * 100_000))
        self.timed(lambda: client.session.touch([client.namespace.value_key("k0")]))
        try:
            self.timed(lambda: client.pin("k0") and None)
        finally:
            refused = [f for f in self.failed if "only `get` reaches" in f or "Unavailable" in f]
            self.failed = [f for f in self.failed if f not in refused]
        return self
    def told(self):
        return {"right": self.right, "missed": self.missed, "wrong": self.wrong,
                "failed": self.failed, "longest_s": self.longest_s}

background = []
def forever():
    while True:
        background.append(Round().run())
        del background[:-100]
        time.sleep(0.02)  # or the tests beside it have nothing of the processor

print(json.dumps(Round().run().told()), flush=True)
threading.Thread(target=forever, daemon=True).start()
for line in sys.stdin:
    rounds = [Round().run(), *background]
    told = rounds[0].told()
    told["wrong"] = sum(one.wrong for one in rounds)
    told["failed"] = sum((one.failed for one in rounds), [])
    told["longest_s"] = max(one.longest_s for one in rounds)
    print(json.dumps(told), flush=True)
"""
ALL_RIGHT = 8 + 8 + 4 + 4 + 4


class Attack(NamedTuple):
    """What Bob does with `data`, `head` and `directory`; what Alice may then still read."""

    does: str
    may_hit: bool
    verify: str = "never"


ATTACKS = {
    "the payload is cut off": Attack("os.truncate(data, 0)", False),
    "the payload is cut in the middle of it": Attack("os.truncate(data, 200_001)", True),
    "the headers are cut off": Attack("os.truncate(head, 0)", False),
    "the headers are cut in the middle of one": Attack("os.truncate(head, 4096 + 100)", True),
    "all is cut off, and zeros come instead": Attack(
        """
        for path in (data, head):
            size = os.stat(path).st_size
            os.truncate(path, 0)
            os.truncate(path, size)
        """,
        False,
    ),
    "the payload is cut off again and again": Attack(
        """
        size = os.stat(data).st_size
        for _ in range(300):
            os.truncate(data, 0)
            os.truncate(data, size)
        """,
        False,
        "always",
    ),
    "the payload has holes": Attack(
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(data, os.O_RDWR)
        size = ctypes.c_long(os.fstat(fd).st_size)
        assert libc.fallocate(fd, 3, ctypes.c_long(0), size) == 0
        """,
        False,
        "always",
    ),
    "everything is called otherwise, or is something else": Attack(
        """
        os.chmod(data, 0)
        os.chmod(head, 0)
        for path in (data, head):
            Path(path + "x").write_bytes(os.urandom(100))
            os.rename(path + "x", path)
            os.unlink(path)
            os.mkfifo(path)
        word = json.loads((directory / "node.json").read_bytes())
        for place in ("/etc/passwd", head, data, "/dev/shm", "/dev/zero"):
            word.update(data_path=place, head_path=place)
            (directory / "node.json").write_text(json.dumps(word))
        for name in ("node.json", "lock", "room", "control.sock"):
            (directory / name).unlink(missing_ok=True)
            os.mkfifo(directory / name, 0o666)
        """,
        True,
    ),
}
OWNER = """
data, head, directory = args[0], args[1], Path(args[2])
{does}
print(json.dumps(True))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


class Shared(NamedTuple):
    url: str
    run_dir: Path
    directory: NodeDir
    data: Path
    head: Path


@pytest.fixture
def shared(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    run_dir = Path(tempfile.mkdtemp(prefix="kvn-"))
    url = f"redis://127.0.0.1:{server.port}"
    options = ["--url", url, "--key-prefix", PREFIX, "--size", "16MiB", "--group", str(READERS)]
    options += ["--listen", "127.0.0.1:0"]
    monkeypatch.setenv("KVSTORE_SECRET", "of Bob and of Alice")
    server.admin().flushall()
    with NodeOf(BOB, run_dir, *options, groups=[READERS]) as node:
        word = node.directory.announcement()
        assert word is not None
        data, head = Path(word.data_path), Path(word.head_path)
        assert run_as(BOB, CONTENT + SAVE, url, str(run_dir), groups=[READERS])
        yield Shared(url, run_dir, node.directory, data, head)
        node.process.kill()  # it may have died of what was done to its files
    for path in (data, head):
        path.unlink(missing_ok=True)
    shutil.rmtree(run_dir, ignore_errors=True)


def alice(shared: Shared, verify: str) -> ProcessOf:
    where = (shared.url, str(shared.run_dir), verify)
    return ProcessOf(ALICE, CONTENT + READ, *where, groups=[READERS])


def assert_lives(said: Any, reader: ProcessOf) -> None:
    assert said is not None, f"Alice's process has ended: {reader.process.wait()}"
    assert said["wrong"] == 0
    assert said["failed"] == []
    assert said["longest_s"] < CALL_MAX_S


@pytest.mark.parametrize("name", ATTACKS)
def test_an_owner_stops_nobody_who_reads(shared: Shared, name: str) -> None:
    attack = ATTACKS[name]
    does = "\n".join(line.removeprefix(" " * 8) for line in attack.does.split("\n"))
    with alice(shared, attack.verify) as reader:
        before = reader.heard()
        assert_lives(before, reader)
        assert before["right"] == ALL_RIGHT, before
        files = (str(shared.data), str(shared.head), str(shared.directory.path))
        run_as(BOB, OWNER.format(does=does), *files, groups=[READERS])
        for _ in range(2):
            after = reader.ask()
            assert_lives(after, reader)
            if not attack.may_hit:
                assert after["right"] == 0
                assert after["missed"] == ALL_RIGHT


def test_what_alice_has_mapped_is_nothing_of_bobs(shared: Shared) -> None:
    """Whatever is not in the list above and touches a mapping would end her as well."""
    with alice(shared, "never") as reader:
        assert_lives(reader.heard(), reader)
        assert_lives(reader.ask(), reader)
        mapped = Path(f"/proc/{reader.process.pid}/maps").read_text()
        assert str(shared.run_dir) not in mapped
        assert f"kvstore-{BOB}" not in mapped
        opened = [link.readlink() for link in Path(f"/proc/{reader.process.pid}/fd").iterdir()]
        assert not {shared.data, shared.head} & {*opened}


LISTEN = """
import select
with socket.socket(socket.AF_UNIX) as mine:
    mine.bind(args[0])
    os.chmod(args[0], 0o666)
    mine.listen(8)
    mine.settimeout(20)
    print(json.dumps(True), flush=True)
    sys.stdin.readline()
    heard = []
    while select.select([mine], [], [], 0)[0]:
        with mine.accept()[0] as connection:
            connection.settimeout(5)
            heard.append(len(connection.recv(1 << 16)))
    print(json.dumps(heard), flush=True)
"""
LINK = """
os.unlink(args[0])
os.symlink(args[1], args[0])
print(json.dumps(True))
"""


def test_a_reader_says_nothing_to_a_socket_of_its_own_that_the_owner_links(
    shared: Shared,
) -> None:
    """A client that connects to what is called control.sock sends what its owner chose to whatever
    else of its user listens."""
    with tempfile.TemporaryDirectory(prefix="kva-") as folder:
        Path(folder).chmod(0o777)
        its = str(Path(folder) / "another.sock")
        with ProcessOf(ALICE, LISTEN, its) as listener:
            assert listener.heard()
            word = shared.directory.announcement()
            assert word is not None
            stop(word.pid)  # it would put its socket back
            run_as(BOB, LINK, str(shared.directory.socket), its, groups=[READERS])
            with alice(shared, "never") as reader:
                assert reader.heard() is not None
            assert [said for said in listener.ask() if said] == []
