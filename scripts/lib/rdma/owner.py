"""Runs the side of `scripts/rdma-check` that is read: nodes whose memory is registered with
NIXL."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import resource
import secrets
import signal
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import xxhash

from kvstore.client.base import Reservation
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.saving.link import Grants
from kvstore.client.nodes.saving.writer import Writer
from kvstore.core.answers import Grant
from kvstore.core.events import Commit, Reserve
from kvstore.cuda.base import CudaDevice, address_of, wait
from kvstore.cuda.bindings import open_device
from kvstore.errors import DeviceError
from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig
from kvstore.node.nixl_sidecar import NixlSidecar
from kvstore.node.vram import VramNode
from kvstore.protocol.control_requests import Wants
from kvstore.record import unpack_record
from kvstore.testing.cuda import ModelCuda
from kvstore.transport.nixl.process import installed
from kvstore.transport.stream.address import own_address
from kvstore.transport.stream.security import StreamSecurity
from kvstore.types import Kind

BLOCKS = 32
BLOCK_BYTES = 1 << 20
READY_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 20.0
RDMA = re.compile(r"\b(rc|dc|ud|srd|gga)(_\w+)?/")
SAME_HOST = {"UCX_TLS": "tcp,cma,self", "UCX_NET_DEVICES": "lo"}
DEVICES = Path("/sys/class/infiniband")


class Checks:
    """Collects what was found so far, and says each at once."""

    def __init__(self) -> None:
        self.failed = 0

    def say(self, good: bool, what: str) -> bool:
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'}  {what}", flush=True)
        return good

    def note(self, what: str) -> None:
        print(f"note  {what}", flush=True)


def look_at_host(checks: Checks) -> bool:
    """Tell whether there is an RDMA device; without one, UCX's same-host transport is used."""
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


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def start_node(run_dir: Path, listen: tuple[str, int], advertise: str, checks: Checks) -> Node:
    """Start a node with its memory registered, read-only if that is possible. Raises
    `SystemExit`."""
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
    """Save blocks; return (key, location) of each."""
    nodes = NodeDirectory(run_dir, node.index, "kv:default")
    writer = Writer(nodes, name=None, timeout_s=READ_TIMEOUT_S, checksums=True)
    link = writer.link()
    blocks = []
    for number in range(BLOCKS):
        key, payload = secrets.token_bytes(32), payload_of(number)
        (slot,) = link.reserve_later(Wants([key], BLOCK_BYTES), 1, Grants())()
        assert isinstance(slot, Reservation), slot
        slot.buffer[:] = payload
        assert link.commit_later([slot])()[0]
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
            vram, lacking = start_vram_node(Path(directory), node.config, checks)
            assert node.announcement is not None
            assert vram.announcement is not None
            hello: list[object] = [
                *(node.announcement.pack().decode(), save_blocks(node, Path(directory))),
                *(vram.announcement.pack().decode(), save_in_vram(vram), lacking),
            ]
            with Listener((host or "0.0.0.0", port), authkey=secret()) as listener:
                print(f"server: listens at port {listener.address[1]}; Ctrl-C ends it", flush=True)
                while True:
                    try:
                        with listener.accept() as connection:
                            obey(connection, node, hello)
                    except (EOFError, OSError) as e:
                        print(f"server: a client has gone ({e or 'hung up'})", flush=True)
                    if args.once:
                        return 0
        except KeyboardInterrupt:
            return 0
        finally:
            node.stop()
            vram.stop()


def device_of(folder: Path) -> tuple[CudaDevice, str]:
    """Return device 0, or a model of one below `folder` and why there is none."""
    try:
        return open_device(), ""
    except DeviceError as e:
        (folder / "model").mkdir()
        return ModelCuda(folder / "model"), str(e)


def start_vram_node(run_dir: Path, like: NodeConfig, checks: Checks) -> tuple[VramNode, str]:
    """Start a node in VRAM. Return it, and why its VRAM is only a model's; empty for a real
    device's."""
    device, lacking = device_of(run_dir)
    config = dataclasses.replace(like, name="vram")
    node = VramNode(config, MemoryIndex(), device)
    node.start()
    checks.note(f"VRAM is that of {lacking and 'a model: '}{lacking or 'device 0'}")
    give_up_at = time.monotonic() + READY_TIMEOUT_S / 3
    while not sidecar(node).way() and time.monotonic() < give_up_at:
        time.sleep(0.1)
    if not sidecar(node).way():
        # The client's first READ will fail, and say so.
        checks.note("VRAM cannot be registered (nvidia-peermem, dma-buf?): see what NIXL said")
    return node, lacking


def save_in_vram(node: VramNode) -> list[tuple[str, list[int]]]:
    """Save blocks in VRAM; return as `save_blocks`."""
    session, stream = node.session(), node.device.stream()
    deadline = time.monotonic() + READ_TIMEOUT_S
    blocks = []
    for number in range(BLOCKS):
        key, payload = secrets.token_bytes(32), memoryview(bytearray(payload_of(number)))
        wanted = Reserve(0, 0, [key], [BLOCK_BYTES], 1, [Kind.BLOCK], [0], [None], [0])
        (granted,) = session.ask(wanted, deadline)
        assert isinstance(granted, Grant), granted
        stream.copy([(node.address + granted.offset, address_of(payload), BLOCK_BYTES)])
        assert wait(stream.record(), deadline)
        sealed = [(granted.slot_id, granted.generation, xxhash.xxh3_64_intdigest(payload))]
        assert session.ask(Commit(0, 0, sealed), deadline)[0]
        (record,) = node.index.lookup([key])
        location = unpack_record(key, record) if record is not None else None
        assert location is not None
        blocks.append((key.hex(), list(location)))
    return blocks


def obey(connection: Connection, node: Node, hello: list[object]) -> None:
    """Do what the client asks, until it hangs up."""
    signals = {"stop": signal.SIGSTOP, "continue": signal.SIGCONT, "kill": signal.SIGKILL}
    assert node.announcement is not None
    while True:
        asked = connection.recv_bytes(1024).decode()
        answer: object = None
        if asked == "hello":
            answer = hello
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
