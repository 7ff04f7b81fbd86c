"""`scripts/rdma-check` tests whether NIXL reads work between two hosts, and over what: the side
that reads, and judges. What is read: owner.py."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Client
from pathlib import Path
from typing import IO, Any

import xxhash

from kvstore.cuda.base import CudaDevice, DeviceRange, address_of, wait
from kvstore.nodedir import Announcement
from kvstore.segment.layout import Layout
from kvstore.transport.base import Read, Wanted
from kvstore.transport.nixl.transport import NixlTransport
from kvstore.transport.stream.address import parse_listen
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import StreamTransport
from kvstore.types import Location
from rdma.owner import (
    BLOCK_BYTES,
    BLOCKS,
    RDMA,
    READ_TIMEOUT_S,
    READY_TIMEOUT_S,
    Checks,
    device_of,
    look_at_host,
    payload_of,
    secret,
    serve,
)

LIB = str(Path(__file__).parents[1])
STOPPED_TIMEOUT_S = 1.0
"""Deadline of a read while the other side is stopped."""
SLACK_S = 2.0
"""How much later than its deadline a read may end on a busy machine."""
LINES_SHOWN = 40


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
        """Read all blocks; return (hits, hits with wrong bytes, seconds it took)."""
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


class ReadingToVram(Reading):
    """Reads the other side's blocks into memory of a device of this side."""

    def __init__(
        self, word: Announcement, blocks: list[tuple[str, list[int]]], device: CudaDevice
    ) -> None:
        super().__init__(word, blocks)
        self.transport.close()
        stream = StreamTransport(StreamSecurity.from_environment())
        self.transport = NixlTransport(stream, Layout, device)
        self._device, self._stream = device, device.stream()
        self._landing = device.allocate(len(blocks) * BLOCK_BYTES)

    def ready(self, timeout_s: float = READY_TIMEOUT_S) -> bool:
        return super().ready(timeout_s) and self.transport.to_vram

    @property
    def reason(self) -> str:
        return self.transport.why_not_to_vram or super().reason

    def read(self, timeout_s: float) -> tuple[int, int, float]:
        """As `Reading.read`, of what came to the device alone."""
        wanted = [
            Wanted(key, location, (room,), DeviceRange(self._at(i), BLOCK_BYTES, 0))
            for i, ((key, location), room) in enumerate(zip(self._blocks, self._rooms, strict=True))
        ]
        began = time.monotonic()
        outcomes = self.transport.read(self._word, wanted, began + timeout_s)
        took_s = time.monotonic() - began
        hits = [i for i, o in enumerate(outcomes) if o.read is Read.HIT and o.in_vram]
        for i in hits:
            self._stream.copy([(address_of(self._rooms[i]), self._at(i), BLOCK_BYTES)])
        assert wait(self._stream.record(), time.monotonic() + READ_TIMEOUT_S)
        wrong = sum(xxhash.xxh3_64_intdigest(self._rooms[i]) != self._right[i] for i in hits)
        return len(hits), wrong, took_s

    def _at(self, number: int) -> int:
        return self._landing + number * BLOCK_BYTES

    def close(self) -> None:
        self.transport.close()
        self._stream.close()
        self._device.free(self._landing)


@contextlib.contextmanager
def stderr_to(log: IO[bytes]) -> Iterator[None]:
    """Collect what this process and those it starts say on standard error: UCX writes no file
    before it ends."""
    saved = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def taken_transports(log: str) -> list[str]:
    """Return what UCX says it READs from other processes with (UCX_PROTO_INFO)."""
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

            word, blocks, vram_word, vram_blocks, lacking = ask("hello")
            reading = Reading(unpacked(word), blocks)
            from_vram = Reading(unpacked(vram_word), vram_blocks)
            try:
                read_and_break(checks, reading, ask)
                vram_read = read_vram(checks, from_vram, lacking)
                reading.transport.close()
                from_vram.transport.close()
                given = {"memory": (word, blocks), "VRAM": (vram_word, vram_blocks)}
                to_vram = read_to_vram(checks, given)
            finally:
                reading.transport.close()
                from_vram.transport.close()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if checks.failed:
        print("\n".join(line for line in said.splitlines()[-LINES_SHOWN:] if "|" not in line))
    taken = taken_transports(said)
    return verdict(checks, taken, has_device, vram_read=vram_read, to_vram=to_vram)


def unpacked(word: str) -> Announcement:
    announced = Announcement.unpack(word.encode())
    assert announced is not None, word
    return announced


def read_vram(checks: Checks, reading: Reading, lacking: str) -> bool:
    """Tell whether VRAM of the other side can be read; `lacking` says why that is only a
    model's."""
    if not reading.ready():
        checks.note(f"from VRAM: the first READ FAILED: {reading.reason}")
        return False
    checks.say(True, "from VRAM: the first READ brought the right 4 KiB")
    reading.read(READ_TIMEOUT_S)
    hits, wrong, took_s = reading.read(READ_TIMEOUT_S)
    rate = BLOCKS * BLOCK_BYTES / took_s / 1e9
    checks.say(
        (hits, wrong) == (BLOCKS, 0),
        f"from VRAM: {hits} of {BLOCKS} blocks of 1 MiB, {wrong} wrong, {rate:.1f} GB/s",
    )
    if lacking:
        checks.note(f"GPUDirect was NOT tried: the other side has no device ({lacking})")
    return True


def read_to_vram(
    checks: Checks, blocks_of: Mapping[str, tuple[str, list[tuple[str, list[int]]]]]
) -> bool:
    """Whether what is READ can go to VRAM of this side: what engines have with `nixl_destination`.
    `blocks_of` has the words and blocks of the other side's nodes."""
    with tempfile.TemporaryDirectory(prefix="kv-rdma-") as directory:
        device, lacking = device_of(Path(directory))
        checks.note(f"to VRAM: that of {lacking and 'a model: '}{lacking or 'device 0'}")
        for where, (word, blocks) in blocks_of.items():
            reading = ReadingToVram(unpacked(word), blocks, device)
            try:
                if not to_vram_works(checks, reading, where):
                    return False
            finally:
                reading.close()
    if lacking:
        checks.note(f"GPUDirect to VRAM was NOT tried: this side has no device ({lacking})")
    return True


def to_vram_works(checks: Checks, reading: Reading, where: str) -> bool:
    if not reading.ready():
        checks.note(f"from {where} to VRAM: the first READ FAILED: {reading.reason}")
        return False
    reading.read(READ_TIMEOUT_S)
    hits, wrong, took_s = reading.read(READ_TIMEOUT_S)
    rate = BLOCKS * BLOCK_BYTES / took_s / 1e9
    checks.say(
        wrong == 0,
        f"from {where} to VRAM: {hits} of {BLOCKS} blocks of 1 MiB came there, {wrong} wrong, "
        f"{rate:.1f} GB/s with the check",
    )
    return hits == BLOCKS


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
    """Tell whether all blocks are read right again, before long."""
    give_up_at = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up_at:
        if reading.ready(1.0) and reading.read(READ_TIMEOUT_S)[:2] == (BLOCKS, 0):
            return True
        time.sleep(0.1)
    return False


def verdict(
    checks: Checks,
    taken: list[str],
    has_device: bool,
    *,
    vram_read: bool = True,
    to_vram: bool = True,
) -> int:
    print(f"note  UCX reads other processes over: {', '.join(taken) or 'nothing'}")
    over_rdma = any(RDMA.search(transport) for transport in taken)
    if checks.failed:
        print(f"\nverdict: NOT USABLE, {checks.failed} checks failed")
        return 1
    if not vram_read:
        print(
            "\nverdict: VRAM CANNOT BE READ, host memory can: `kvstore node --vram` serves streams"
        )
        return 4
    if not to_vram:
        print(
            "\nverdict: NOTHING COMES TO VRAM of this side, all else works: leave the setting "
            "nixl_destination at host"
        )
        return 5
    if over_rdma:
        print("\nverdict: RDMA WORKS between these hosts")
        return 0
    why = "UCX did not take it" if has_device else "there is no RDMA device here"
    print(f"\nverdict: NO RDMA WAS FOUND ({why}). All else passed, over {', '.join(taken)}:")
    print("that says nothing about RDMA between hosts. Nodes there are read by streams.")
    return 3


def both() -> int:
    os.environ.setdefault("KVSTORE_SECRET", secrets.token_hex(16))
    command = [sys.executable, LIB, "rdma.check", "server", "--listen", "127.0.0.1:0", "--once"]
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
