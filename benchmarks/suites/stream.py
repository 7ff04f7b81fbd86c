"""Suite `stream` measures get_many of a node that only TCP reaches, next to a bare TCP stream."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.processes import House, Worker, house
from benchmarks.report import Row, machine, median, ratios, spread
from benchmarks.suites.index import interleaved
from kvstore import Client, Limits
from kvstore.errors import UsageError
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.index import open_index
from kvstore.node import Node, NodeConfig
from kvstore.node.stream import service
from kvstore.protocol import stream as stream_wire
from kvstore.protocol import stream_seal
from kvstore.protocol.chunks import Digests
from kvstore.testing.hosts import Hosts, why_not
from kvstore.transport.stream import channel, transport
from kvstore.transport.stream.security import StreamSecurity

MIB = 1 << 20
SHAPES = ((32, MIB), (8, 8 * MIB), (32, 64 << 10), (256, 4 << 10), (1, MIB), (1, 4 << 10))
"""(blocks in a get_many, bytes of a block)."""
NODE_BYTES = 512 << 20
REPETITIONS = 60
REPETITIONS_QUICK = 10
WARM_UP = 3
PATIENT = Limits(redis_timeout_s=2.0, request_timeout_s=10.0, stream_timeout_s=10.0)
SECURITY = StreamSecurity(secret=b"a secret of this run")


class NoDigests(Digests):
    """Stands for checksums, to show what a stream would cost without; there is no such setting."""

    def update(self, chunk: Any) -> None:
        pass

    def value(self, number: int = 0) -> int:
        return 1


def _seal_as(op: str) -> None:
    """Seal as `op` says from here on in this process: connections between two that were told the
    same `op`."""
    unsealed = op in ("unsealed", "unchecked")
    keyed = (lambda *_: stream_seal.PLAIN_SEALS) if unsealed else stream_seal.keyed
    macs = frozenset({stream_seal.Mac.BLAKE3}) if op == "blake3" else stream_seal.available()
    for name, what in (("keyed", keyed), ("available", lambda: macs)):
        setattr(stream_wire, name, what)


Listen = Callable[[], str]
"""Called in a serving process before it opens a socket: where it is to listen."""


def _on_loopback() -> str:
    return "127.0.0.1"


def _on_host_a(cluster: str) -> str:
    hosts = Hosts.existing(cluster)
    hosts.enter("a")
    return hosts.address("a")


class StreamOwner:
    """Runs a node that serves streams."""

    def __init__(self, run_dir: Path, url: str, name: str, listen: Listen) -> None:
        address = listen()
        _seal_as(name)
        if name == "unchecked":
            service.Digests = NoDigests  # type: ignore[attr-defined]
        if name == "first":
            service.CHECKSUMS_KEPT_MAX = 0
        config = NodeConfig(
            run_dir=run_dir,
            name=name,
            key_prefix=f"kv:{name}",
            size_bytes=NODE_BYTES,
            listen=(address, 0),
            security=SECURITY,
        )
        self._node = Node(config, GuardedIndex(open_index(url, key_prefix=f"kv:{name}"))).start()

    def cpu_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self._node.stop()


class BareSource:
    """Sends what it is asked for with sendmsg, a value a call, out of shared memory: the yardstick.

    With `call_bytes`, no call is larger: as plain, but with what the store's streams know.
    """

    def __init__(
        self, run_dir: Path, url: str, size_bytes: int, listen: Listen, call_bytes: int | None
    ) -> None:
        address = listen()
        self._memory = mmap.mmap(-1, size_bytes)
        self._memory[:] = os.urandom(MIB) * (size_bytes // MIB)
        self._call_bytes = call_bytes
        self._listener = socket.create_server((address, 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()
        return host, port

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        view = memoryview(self._memory)
        while request := connection.recv(16):
            count, size_bytes = (int.from_bytes(request[i : i + 8], "little") for i in (0, 8))
            for i in range(count):
                left = view[i * size_bytes : (i + 1) * size_bytes]
                while left.nbytes:
                    left = left[connection.sendmsg([left[: self._call_bytes]]) :]

    def cpu_s(self) -> float:
        return time.process_time()

    def close(self) -> None:
        self._listener.close()


class BareReader:
    """Receives it with recv_into."""

    def __init__(self, address: tuple[str, int], call_bytes: int | None) -> None:
        self._call_bytes = call_bytes
        self._connection = socket.create_connection(address)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, out: list[memoryview]) -> None:
        size_bytes = out[0].nbytes
        self._connection.sendall(len(out).to_bytes(8, "little") + size_bytes.to_bytes(8, "little"))
        for left in out:
            while left.nbytes:
                piece = left[: self._call_bytes]
                left = left[self._connection.recv_into(piece, 0, socket.MSG_WAITALL) :]


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="over the link between two network namespaces (root), not over loopback",
    )


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Raises `UsageError` for `hosts` where there can be no network namespaces."""
    if not options.hosts:
        return _run(options, _on_loopback)
    if reason := why_not():
        raise UsageError("hosts", True, reason)
    with Hosts(2) as hosts, hosts.visit("b"):
        return _run(options, partial(_on_host_a, hosts.name))


def _run(options: Namespace, listen: Listen) -> tuple[dict[str, Any], list[Row]]:
    repetitions = REPETITIONS_QUICK if options.quick else REPETITIONS
    rows: list[Row] = []
    with house(64 * MIB) as here:
        about = machine(here.url)
        owners = {name: here.worker(StreamOwner, name, listen) for name in _OPS}
        most = max(count * size for count, size in SHAPES)
        bare = {
            name: here.worker(BareSource, most, listen, send) for name, (send, _) in _BARE.items()
        }
        readers = {
            name: BareReader(bare[name].do("address"), receive)
            for name, (_, receive) in _BARE.items()
        }
        for shape in SHAPES:
            rows += _shape(here, owners | bare, readers, shape, repetitions)
    return about, rows


_YARDSTICK = "bare stream"
_BARE = {
    _YARDSTICK: (None, None),
    "bare, our calls": (channel.SEND_BYTES_MAX, channel.RECEIVE_BYTES_MAX),
}
"""Most bytes in a call that sends and in one that receives; None: a value a call."""
_OPS = ("first", "again", "blake3", "unsealed", "unchecked")
"""get_many of blocks that the node has not served before, and has to hash; that it has, sealed with
AES-GMAC where that is installed, with BLAKE3, and with nothing; without checksums either."""


def _shape(
    here: House,
    servers: dict[str, Worker],
    readers: dict[str, BareReader],
    shape: tuple[int, int],
    repetitions: int,
) -> list[Row]:
    count, size_bytes = shape
    out = [memoryview(bytearray(size_bytes)) for _ in range(count)]
    keys = [f"{count} of {size_bytes}, {i}" for i in range(count)]
    calls: dict[str, Callable[[], object]] = {
        name: partial(reader.read, out) for name, reader in readers.items()
    }
    clients = {op: _filled(here, op, keys, size_bytes) for op in _OPS}

    def get_many(op: str) -> None:
        digests = NoDigests if op == "unchecked" else Digests
        transport.Digests = digests  # type: ignore[attr-defined]
        _seal_as(op)
        client = clients[op][0]
        assert None not in client.get_many(keys, out=out), client.stats()

    calls |= {op: partial(get_many, op) for op in _OPS}
    try:
        interleaved(calls, WARM_UP)
        took = interleaved(calls, repetitions)
        rows = [
            _row(op, shape, took[op], took[_YARDSTICK], *_cpu(call, servers[op], shape))
            for op, call in calls.items()
        ]
        for op in _OPS:
            get_many(op)
            assert [xxhash.xxh3_64_intdigest(value) for value in out] == clients[op][1]
    finally:
        for client, _ in clients.values():
            client.close()
    return rows


def _filled(here: House, name: str, keys: list[str], size_bytes: int) -> tuple[Client, list[int]]:
    """Make a client that reads over a stream what was put on the node's host, and checksums."""
    options: dict[str, Any] = {
        "key_prefix": f"kv:{name}",
        "run_dir": here.run_dir,
        "limits": PATIENT,
        "security": SECURITY,
    }
    values = [os.urandom(size_bytes) for _ in keys]
    with Client(here.url, **options) as writer:
        assert all(writer.put_many(zip(keys, values, strict=True)))
    client = Client(here.url, transports=("stream",), **options)
    return client, [xxhash.xxh3_64_intdigest(value) for value in values]


def _cpu(call: Callable[[], object], server: Worker, shape: tuple[int, int]) -> tuple[float, float]:
    """Return seconds of processor per GB of payload: of the reader, and of who sends."""
    gigabytes = shape[0] * shape[1] / 1e9
    repetitions = max(3, int(0.5 / gigabytes)) if gigabytes > 0.01 else 50
    mine, theirs = time.process_time(), server.do("cpu_s")
    for _ in range(repetitions):
        call()
    mine, theirs = time.process_time() - mine, server.do("cpu_s") - theirs
    return mine / (gigabytes * repetitions), theirs / (gigabytes * repetitions)


def _row(
    op: str,
    shape: tuple[int, int],
    took: list[float],
    yardstick: list[float],
    reader_cpu: float,
    sender_cpu: float,
) -> Row:
    count, size_bytes = shape
    return {
        "op": op,
        "blocks": count,
        "block_kib": size_bytes >> 10,
        "latency_us_p50": round(median(took) * 1e6),
        "gb_per_s": round(count * size_bytes / median(took) / 1e9, 2),
        "stream_ratio": round(median(ratios(yardstick, took)), 3),
        "spread": round(spread(took), 2),
        "reader_cpu_s_per_gb": round(reader_cpu, 2),
        "sender_cpu_s_per_gb": round(sender_cpu, 2),
    }
