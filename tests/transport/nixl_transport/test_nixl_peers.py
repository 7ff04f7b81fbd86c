"""Owners and readers that die, stop, restart or lie, as processes: a read fails or misses by its
deadline, this process lives, and what is healthy again is used again."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import xxhash
from contract.transport import MIB, PATIENCE_S, SECURITY, reads
from nixl_places import NixlPlace, needs_nixl, nixl_transport, same_host
from own_python import holds_in_child
from redis_servers import wait_until

from kvstore.errors import UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig
from kvstore.node import nixl_sidecar as sidecar_module
from kvstore.segment.attached import AttachedShm
from kvstore.segment.layout import Layout
from kvstore.testing.stopping import stop
from kvstore.transport import proving
from kvstore.transport.base import Read
from kvstore.transport.nixl import process as nixl_process
from kvstore.transport.nixl import transfer
from kvstore.transport.nixl import transport as nixl_module
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import CHECKSUM_REASON

pytestmark = needs_nixl
SOON_S = 5.0
"""A deadline that a healthy read never needs."""


@pytest.fixture(scope="module", autouse=True)
def quick():
    """On the same host, and what waits before it tries again does not wait long."""
    with same_host() as patch:
        patch.setattr(proving, "RETRY_AFTER_S", 0.1)
        patch.setattr(proving, "RETRY_AFTER_MAX_S", 1.0)
        patch.setattr(nixl_module, "START_RETRY_AFTER_S", 0.1)
        patch.setattr(sidecar_module, "RETRY_AFTER_S", 0.1)
        yield


@pytest.fixture(scope="module")
def lasting(quick, tmp_path_factory):
    place = NixlPlace(tmp_path_factory.mktemp("run"))
    yield place
    place.close()


@pytest.fixture
def place(lasting):
    """Whole again after the test before."""
    lasting.tidy()
    lasting.wait_until_ready()
    return lasting


def gone(pid):
    """Whether that process has ended, even if nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def reader_of(place):
    return place.transport._reader


def peer_of(transport, place):
    return transport._peer(place.word)


@contextlib.contextmanager
def reading(place):
    """Reads all the time, in a thread: what came of it, and (while it goes on) how often."""
    payload = os.urandom(3 * MIB)
    block = place.save(payload)
    seen, wrong = [], []
    enough = threading.Event()

    def read():
        while not enough.is_set():
            (outcome,), (got,) = place.read(block, timeout_s=SOON_S)
            seen.append(outcome.read)
            if outcome.read is Read.HIT and got != payload:
                wrong.append(got)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        wait_until(lambda: Read.HIT in seen, "the first read")
        yield seen
    finally:
        enough.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert wrong == []


def hits_again(seen):
    """From here on there comes a hit."""
    del seen[:]
    wait_until(lambda: Read.HIT in seen, "a hit", 3 * PATIENCE_S)


def test_an_owner_killed_in_the_middle_of_reads_is_no_crash_and_no_wrong_byte(place):
    with reading(place) as seen:
        pid = place.sidecar.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: place.sidecar.pid not in (None, pid), "another one", 3 * PATIENCE_S)
        hits_again(seen)
    assert set(seen) <= {Read.HIT, Read.FAILED}


def test_a_reader_process_killed_in_the_middle_of_reads_is_replaced(place):
    with reading(place) as seen:
        pid = reader_of(place).pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: reader_of(place).pid != pid, "another one", 3 * PATIENCE_S)
        hits_again(seen)


def test_a_forked_child_does_not_use_its_parents_reader(place):
    """Its answers are whoever's hears them first."""
    block = place.save(b"1" * 100_000)
    reader = reader_of(place)
    transport = place.transport
    assert holds_in_child(lambda: not transport.ready(place.word) and transport.close() is None)
    assert reads(place.read(block)[0]) == [Read.HIT]
    assert reader_of(place) is reader


def test_a_reader_process_that_stops_costs_a_deadline_and_is_killed(place):
    block = place.save(b"1" * 100_000)
    pid = reader_of(place).pid
    stop(pid)
    outcomes, _ = place.read(block, timeout_s=0.5)
    assert reads(outcomes) == [Read.FAILED]
    wait_until(lambda: gone(pid), "it is killed")
    place.wait_until_ready()
    assert reads(place.read(block)[0]) == [Read.HIT]


def test_an_owner_that_is_stopped_leaves_a_read_pending_that_ends_here(place, monkeypatch):
    """Stopped after it gave its way in: UCX then waits for it for ever."""
    block = place.save(b"1" * 100_000)
    real = nixl_module.nixl_endpoint
    stopped = []

    def way_of_one_that_stops(*arguments):
        way = real(*arguments)
        if way is not None and not stopped:
            stopped.append(place.sidecar.pid)
            stop(stopped[0])
        return way

    healthy, place.transport = place.transport, nixl_transport()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(nixl_module, "PROBE_TIMEOUT_S", 0.5)
            patch.setattr(nixl_module, "nixl_endpoint", way_of_one_that_stops)
            while not stopped:
                outcomes, _ = place.read(block)
            assert reads(outcomes) == [Read.FAILED]
        wait_until(lambda: place.transport.quarantined == 0, "no late byte can come any more")
        # The node finds that it does not answer, and starts another one.
        place.wait_until_ready()
        assert place.sidecar.pid != stopped[0]
        assert reads(place.read(block)[0]) == [Read.HIT]
    finally:
        place.transport.close()
        place.transport = healthy


def test_arenas_that_cannot_be_given_up_end_reading_through_nixl(place, monkeypatch):
    monkeypatch.setattr(nixl_process.NixlProcess, "kill", lambda self: None)
    monkeypatch.setattr(nixl_module, "NIXL_QUARANTINED_MAX", 1)
    block = place.save(b"1" * 1000)
    reader = reader_of(place)
    reader.retire()
    outcomes, _ = place.read(block, timeout_s=1.0)
    assert reads(outcomes) == [Read.FAILED]
    wait_until(lambda: "wait for late bytes" in peer_of(place.transport, place).reason, "why")
    monkeypatch.undo()
    reader.close()
    place.wait_until_ready()
    assert reads(place.read(block)[0]) == [Read.HIT]


CRASHING = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from contract.transport import SECURITY, room
from nixl_places import nixl_transport
from kvstore.nodedir import Announcement
from kvstore.transport.base import Read, Wanted
from kvstore.types import Location
import time
word = Announcement.unpack(bytes.fromhex(sys.argv[2]))
key, location = bytes.fromhex(sys.argv[3]), Location(*map(int, sys.argv[4].split()))
transport = nixl_transport()
while True:
    wanted = [Wanted(key, location, (room(location),))]
    (outcome,) = transport.read(word, wanted, time.monotonic() + 20)
    if outcome.read is Read.HIT:
        print(transport._reader.pid, flush=True)
"""


def test_a_client_killed_in_the_middle_of_reads_leaves_the_owner_serving(place):
    key, location = place.save(os.urandom(3 * MIB))
    pid = place.sidecar.pid
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-c",
                CRASHING,
                os.pathsep.join(sys.path),
                place.word.pack().hex(),
            ),
            *(key.hex(), " ".join(map(str, location))),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        reader_pid = int(process.stdout.readline())
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        process.stdout.close()
    wait_until(lambda: gone(reader_pid), "its reader ends with it")
    for _ in range(20):
        assert reads(place.read((key, location))[0]) == [Read.HIT]
    assert place.sidecar.pid == pid


def test_a_restarted_node_is_read_under_its_new_epoch_and_not_under_the_old(quick, tmp_path):
    with closing(NixlPlace(tmp_path)) as first:
        old_word, old = first.word, first.save(b"1" * 100_000)
        assert reads(first.read(old)[0]) == [Read.HIT]
        first.node.stop()
        first.node = Node(first.node.config, first.index).start()
        first.word = first.node.announcement
        assert first.word.epoch > old_word.epoch
        first.wait_until_ready()
        first.writer.let_go()
        fresh = first.save(b"2" * 100_000)
        outcomes, (_, got) = first.read(old, fresh)
        assert reads(outcomes) == [Read.MISS, Read.HIT]
        assert got == b"2" * 100_000
        first.word = old_word
        assert reads(first.read(old, timeout_s=0.5)[0]) == [Read.FAILED]


# --- lies ---------------------------------------------------------------------------


def test_bytes_that_are_not_those_of_the_checksum_are_a_miss(place):
    key, location = place.save(b"1" * 100_000)
    right = location._replace(checksum=xxhash.xxh3_64_intdigest(b"1" * 100_000))
    assert reads(place.read((key, right))[0]) == [Read.HIT]
    with closing(
        AttachedShm(Path(place.word.data_path), Path(place.word.head_path), writable=True)
    ) as shm:
        _, offset = Layout(place.word).places(location)
        shm.payload[offset + 70_000] ^= 1
        (outcome,), _ = place.read((key, right))
    assert (outcome.read, outcome.reason) == (Read.MISS, CHECKSUM_REASON)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"probe": bytes(4096)}, "other bytes"),
        ({"metadata": b"nixl" * 100}, "Error"),
        ({"agent": "0000000000000000#1.1"}, "is not this node's"),
        ({"data_at": 1 << 46, "head_at": 1 << 46}, ""),
    ],
    ids=["probe", "metadata", "agent", "addresses"],
)
def test_a_node_that_lies_about_its_endpoint_is_left_alone(place, monkeypatch, lie, reason):
    block = place.save(b"1" * 100_000)
    real = nixl_module.nixl_endpoint

    def lying(*arguments):
        way = real(*arguments)
        return way._replace(**lie) if way is not None else None

    place.transport._peers.clear()
    with monkeypatch.context() as patch:
        patch.setattr(nixl_module, "nixl_endpoint", lying)
        peer = peer_of(place.transport, place)
        untried = peer.reason
        (outcome,), _ = place.read(block)
        assert outcome.read is not Read.HIT
        wait_until(lambda: peer.reason != untried, "it is found out")
        assert reason in peer.reason
    place.wait_until_ready()
    assert reads(place.read(block)[0]) == [Read.HIT]


def test_large_blocks_are_read_in_parts(place, monkeypatch):
    monkeypatch.setattr(transfer, "NIXL_REQUEST_BYTES_MAX", MIB)
    payloads = [os.urandom(size) for size in (3 * MIB + 5, 1, MIB, MIB - 7)]
    blocks = [place.save(payload) for payload in payloads]
    outcomes, got = place.read(*blocks)
    assert reads(outcomes) == [Read.HIT] * len(blocks)
    assert got == payloads


# --- who may ----------------------------------------------------------------------


def test_the_endpoint_is_not_in_the_announcement(place):
    way = place.sidecar.way()
    (told,) = (place.word.transports[name] for name in place.word.transports if name == "nixl")
    assert way[0].startswith(told)
    assert way[1].hex() not in place.word.pack().hex()
    assert len(told) < 64


@pytest.mark.parametrize("lacks", ["secret", "listen"])
def test_a_node_offers_it_only_to_those_who_know_a_secret(tmp_path, lacks):
    options = {"listen": ("127.0.0.1", 0), "security": SECURITY, "open_to_all": True}
    options |= {"secret": {"security": StreamSecurity()}, "listen": {"listen": None}}[lacks]
    with pytest.raises(UsageError, match="nixl="):
        NodeConfig(run_dir=tmp_path, nixl="read-only", **options)


def test_a_node_without_nixl_says_so_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstore.node.stream.server.installed", lambda: False)
    config = NodeConfig(
        run_dir=tmp_path,
        size_bytes=MIB,
        listen=("127.0.0.1", 0),
        security=SECURITY,
        nixl="read-only",
    )
    with pytest.raises(UsageError, match="is not installed"):
        Node(config, MemoryIndex()).start()


def test_ucx_does_not_listen_on_every_interface(place, monkeypatch):
    """An operator who allows TCP says where."""
    monkeypatch.delenv("UCX_NET_DEVICES")
    with closing(nixl_transport()) as transport:
        assert not transport.ready(place.word)
        peer = peer_of(transport, place)
        wait_until(lambda: "UCX_NET_DEVICES" in peer.reason, "it says why")


def test_trap_its_processes_see_no_device():
    """UCX would make a context on each: hundreds of MiB of an engine's VRAM."""
    say = "child.guard(); os.write(2, os.environ['CUDA_VISIBLE_DEVICES'].encode() + b'.')"
    code = f"import os; from kvstore.transport.nixl import child; {say}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1", "UCX_TLS": "^tcp"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, timeout=60, check=True
    )
    assert ran.stderr == b"."
