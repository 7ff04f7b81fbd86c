"""`scripts/rdma-check` tests whether NIXL reads work between two hosts, and over what."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import IO, Any

import xxhash

from kvstore.client.base import Reservation
from kvstore.client.local.nodes import LocalNodes
from kvstore.client.local.writer import Writer
from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig
from kvstore.node.nixl_sidecar import NixlSidecar
from kvstore.nodedir import Announcement
from kvstore.protocol.control_requests import Want
from kvstore.record import unpack_record
from kvstore.segment.layout import Layout
from kvstore.transport.base import Read, Wanted
from kvstore.transport.nixl.process import installed
from kvstore.transport.nixl.transport import NixlTransport
from kvstore.transport.stream.address import own_address, parse_listen
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import StreamTransport
from kvstore.types import Kind, Location

MIB = 1 << 20
BLOCKS = 32
BLOCK_BYTES = MIB
READY_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 20.0
STOPPED_TIMEOUT_S = 1.0
"""Deadline of a read while the other side is stopped."""
SLACK_S = 2.0
"""How much later than its deadline a read may end on a busy machine."""
LINES_SHOWN = 40
RDMA = re.compile(r"\b(rc|dc|ud|srd|gga)(_\w+)?/")
SAME_HOST = {"UCX_TLS": "tcp,cma,self", "UCX_NET_DEVICES": "lo"}
DEVICES = Path("/sys/class/infiniband")


class Checks:
    """What was found so far, said at once."""

    def __init__(self) -> None:
        self.failed = 0

    def say(self, good: bool, what: str) -> bool:
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'}  {what}", flush=True)
        return good

    def note(self, what: str) -> None:
        print(f"note  {what}", flush=True)


def look_at_host(checks: Checks) -> bool:
    """Whether there is an RDMA device; without one, UCX's same-host transport is used."""
    checks.say(installed(), "NIXL is installed")
    devices = sorted(path.name for path in DEVICES.glob("*"))
    for device in devices:
        for port in sorted((DEVICES / device / "ports").glob("*")):
            state = (port / "state").read_text().strip()
            rate = (port / "rate").read_text().strip()
            checks.note(f"RDMA device {device} port {port.name}: {state}, {rate}")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if devices:
        checks.say(soft == resource.RLIM_INFINITY, "locked memory is unlimited (ulimit -l)")
    else:
        checks.note("no RDMA device on this host: same-host transports of UCX are tried instead")
        for name, value in SAME_HOST.items():
            os.environ.setdefault(name, value)
    return bool(devices)


# --- the owner --------------------------------------------------------------------


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def start_node(run_dir: Path, listen: tuple[str, int], advertise: str, checks: Checks) -> Node:
    """With its memory registered, read-only if that is possible. Raises `SystemExit`."""
    security = StreamSecurity.from_environment()
    for access in ("read-only", "writable"):
        config = NodeConfig(
            run_dir=run_dir,
            size_bytes=4 * BLOCKS * BLOCK_BYTES,
            listen=listen,
            advertise=advertise,
            security=security,
            nixl=access,
        )
        node = Node(config, MemoryIndex()).start()
        give_up_at = time.monotonic() + READY_TIMEOUT_S / 3
        while time.monotonic() < give_up_at:
            if sidecar(node).way():
                checks.say(True, f"a node's memory can be registered, mapped {access}")
                if access == "writable":
                    checks.note("start nodes with `--nixl writable`: read-only was refused")
                return node
            time.sleep(0.1)
        node.stop()
    checks.say(False, "a node's memory cannot be offered: see what NIXL and UCX said")
    raise SystemExit(1)


def sidecar(node: Node) -> NixlSidecar:
    stream = node._stream
    assert stream is not None
    assert stream.nixl is not None
    return stream.nixl


def save_blocks(node: Node, run_dir: Path) -> list[tuple[str, list[int]]]:
    """(key, location) of each block."""
    nodes = LocalNodes(run_dir, node.index, "kv:default")
    writer = Writer(nodes, name=None, timeout_s=READ_TIMEOUT_S, checksums=True)
    blocks = []
    for number in range(BLOCKS):
        key, payload = secrets.token_bytes(32), payload_of(number)
        (slot,) = writer.reserve([Want(key, BLOCK_BYTES, Kind.BLOCK, 0, None, 0)], 1)
        assert isinstance(slot, Reservation), slot
        slot.buffer[:] = payload
        assert writer.commit([slot])[0]
        (record,) = node.index.lookup([key])
        location = unpack_record(key, record) if record is not None else None
        assert location is not None
        blocks.append((key.hex(), list(location)))
    writer.close()
    nodes.close()
    return blocks


def serve(args: argparse.Namespace) -> int:
    checks = Checks()
    look_at_host(checks)
    host, port = args.listen
    with tempfile.TemporaryDirectory(prefix="kv-rdma-") as directory:
        node = start_node(
            Path(directory), (host, 0), args.advertise or own_address(v6=":" in host), checks
        )
        try:
            blocks = save_blocks(node, Path(directory))
            with Listener((host or "0.0.0.0", port), authkey=secret()) as listener:
                print(f"server: listens at port {listener.address[1]}; Ctrl-C ends it", flush=True)
                while True:
                    try:
                        with listener.accept() as connection:
                            obey(connection, node, blocks)
                    except (EOFError, OSError) as e:
                        print(f"server: a client has gone ({e or 'hung up'})", flush=True)
                    if args.once:
                        return 0
        except KeyboardInterrupt:
            return 0
        finally:
            node.stop()


def obey(connection: Connection, node: Node, blocks: list[tuple[str, list[int]]]) -> None:
    """Do what the client asks, until it hangs up."""
    signals = {"stop": signal.SIGSTOP, "continue": signal.SIGCONT, "kill": signal.SIGKILL}
    assert node.announcement is not None
    while True:
        asked = connection.recv_bytes(1024).decode()
        answer: object = None
        if asked == "hello":
            answer = [node.announcement.pack().decode(), blocks]
        elif asked == "pid":
            answer = sidecar(node).pid
        elif (pid := sidecar(node).pid) is not None:
            os.kill(pid, signals[asked])
            answer = True
        connection.send_bytes(json.dumps(answer).encode())


def secret() -> bytes:
    value = StreamSecurity.from_environment().secret
    if value is None:
        raise SystemExit("set KVSTORE_SECRET to the same 16 or more bytes on both hosts")
    return value


# --- the reader ---------------------------------------------------------------------


class Reading:
    """Reads the other side's blocks."""

    def __init__(self, word: Announcement, blocks: list[tuple[str, list[int]]]) -> None:
        self._word = word
        self._blocks = [(bytes.fromhex(key), Location(*location)) for key, location in blocks]
        self._right = [xxhash.xxh3_64_intdigest(payload_of(i)) for i in range(len(blocks))]
        self._rooms = [memoryview(bytearray(BLOCK_BYTES)) for _ in blocks]
        self.transport = NixlTransport(StreamTransport(StreamSecurity.from_environment()), Layout)

    def ready(self, timeout_s: float = READY_TIMEOUT_S) -> bool:
        give_up_at = time.monotonic() + timeout_s
        while not self.transport.ready(self._word):
            if time.monotonic() > give_up_at:
                return False
            time.sleep(0.05)
        return True

    @property
    def reason(self) -> str:
        return self.transport._peer(self._word).reason

    def read(self, timeout_s: float) -> tuple[int, int, float]:
        """(hits, hits with wrong bytes, seconds it took)."""
        wanted = [
            Wanted(key, location._replace(checksum=0), (room,))
            for (key, location), room in zip(self._blocks, self._rooms, strict=True)
        ]
        began = time.monotonic()
        outcomes = self.transport.read(self._word, wanted, began + timeout_s)
        took_s = time.monotonic() - began
        hits = [i for i, outcome in enumerate(outcomes) if outcome.read is Read.HIT]
        wrong = sum(xxhash.xxh3_64_intdigest(self._rooms[i]) != self._right[i] for i in hits)
        return len(hits), wrong, took_s


@contextlib.contextmanager
def stderr_to(log: IO[bytes]) -> Iterator[None]:
    """What this process and those it starts say there: UCX writes no file before it ends."""
    saved = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def taken_transports(log: str) -> list[str]:
    """What UCX says it READs from other processes with (UCX_PROTO_INFO)."""
    found: set[str] = set()
    title, getting = "", False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].split("|") if cell.strip()]
        if len(cells) == 1 and "cfg#" in cells[0]:
            title, getting = cells[0], False
        elif len(cells) == 1:
            getting = "remote memory read by ucp_get" in cells[0] and " self " not in title
        elif getting and len(cells) == 3 and "/" in cells[2]:
            found.add(cells[2])
    return sorted(found)


def check(args: argparse.Namespace) -> int:
    checks = Checks()
    has_device = look_at_host(checks)
    os.environ["UCX_PROTO_INFO"], os.environ["UCX_LOG_FILE"] = "y", "stderr"
    with tempfile.TemporaryFile() as log, stderr_to(log):
        host, port = parse_listen(args.server)
        with Client((host, port), authkey=secret()) as connection:

            def ask(what: str) -> Any:
                connection.send_bytes(what.encode())
                return json.loads(connection.recv_bytes(1 << 20))

            word, blocks = ask("hello")
            announced = Announcement.unpack(word.encode())
            assert announced is not None, word
            reading = Reading(announced, blocks)
            try:
                read_and_break(checks, reading, ask)
            finally:
                reading.transport.close()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if checks.failed:
        print("\n".join(line for line in said.splitlines()[-LINES_SHOWN:] if "|" not in line))
    return verdict(checks, taken_transports(said), has_device)


def read_and_break(checks: Checks, reading: Reading, ask: Callable[[str], Any]) -> None:
    if not checks.say(reading.ready(), "the first READ brought the right 4 KiB"):
        checks.note(f"because: {reading.reason}")
        return
    reading.read(READ_TIMEOUT_S)  # pages are touched, connections made
    hits, wrong, took_s = reading.read(READ_TIMEOUT_S)
    rate = BLOCKS * BLOCK_BYTES / took_s / 1e9
    checks.say(
        (hits, wrong) == (BLOCKS, 0),
        f"{hits} of {BLOCKS} blocks of 1 MiB, {wrong} wrong, {rate:.1f} GB/s with the copy",
    )
    ask("stop")
    hits, wrong, took_s = reading.read(STOPPED_TIMEOUT_S)
    checks.say(
        wrong == 0 and took_s < STOPPED_TIMEOUT_S + SLACK_S,
        f"the owner's process stopped: {hits} hits, {wrong} wrong, ended after {took_s:.2f} s",
    )
    ask("continue")
    checks.say(reading.ready(), "and after it went on it is read again")
    former = ask("pid")
    ask("kill")
    hits, wrong, took_s = reading.read(STOPPED_TIMEOUT_S)
    checks.say(
        wrong == 0 and took_s < STOPPED_TIMEOUT_S + SLACK_S,
        f"the owner's process killed: {hits} hits, {wrong} wrong, ended after {took_s:.2f} s",
    )
    again = comes_back(reading)
    checks.say(again and ask("pid") != former, "the node has started another, which is read")
    owner = ask("pid")
    reader = reading.transport._reader
    assert reader is not None
    os.kill(reader.pid, signal.SIGKILL)
    hits, wrong, took_s = reading.read(STOPPED_TIMEOUT_S)
    checks.say(wrong == 0, f"this side's reading process killed: {hits} hits, {wrong} wrong")
    checks.say(
        comes_back(reading) and ask("pid") == owner,
        "the owner's process does not mind, and there is a new reading process",
    )


def comes_back(reading: Reading) -> bool:
    """Whether all blocks are read right again, before long."""
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up_at:
        if reading.ready(1.0) and reading.read(READ_TIMEOUT_S)[:2] == (BLOCKS, 0):
            return True
        time.sleep(0.1)
    return False


def verdict(checks: Checks, taken: list[str], has_device: bool) -> int:
    print(f"note  UCX reads other processes over: {', '.join(taken) or 'nothing'}")
    over_rdma = any(RDMA.search(transport) for transport in taken)
    if checks.failed:
        print(f"\nverdict: NOT USABLE, {checks.failed} checks failed")
        return 1
    if over_rdma:
        print("\nverdict: RDMA WORKS between these hosts")
        return 0
    why = "UCX did not take it" if has_device else "there is no RDMA device here"
    print(f"\nverdict: NO RDMA WAS FOUND ({why}). All else passed, over {', '.join(taken)}:")
    print("that says nothing about RDMA between hosts. Nodes there are read by streams.")
    return 3


def both() -> int:
    os.environ.setdefault("KVSTORE_SECRET", secrets.token_hex(16))
    command = [sys.executable, __file__, "server", "--listen", "127.0.0.1:0", "--once"]
    command += ["--advertise", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if (port := re.search(r"at port (\d+)", line)) is not None:
                    return check(argparse.Namespace(server=f"127.0.0.1:{port[1]}"))
                print(f"server: {line}", end="", flush=True)
            return 1
        finally:
            server.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/rdma-check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    roles = parser.add_subparsers(dest="role", required=True)
    server = roles.add_parser("server", help="owns memory that is read")
    server.add_argument("--listen", type=parse_listen, required=True, metavar="HOST:PORT")
    server.add_argument("--advertise", default="", help="the address the client reaches it by")
    server.add_argument("--once", action="store_true", help="end with the first client")
    client = roles.add_parser("client", help="reads it, and says what came of it")
    client.add_argument("server", metavar="HOST:PORT")
    roles.add_parser("local", help="both roles on this host")
    args = parser.parse_args()
    if args.role == "local":
        return both()
    return serve(args) if args.role == "server" else check(args)


if __name__ == "__main__":
    sys.exit(main())
