"""Two processes on one real device: what one saves in VRAM the other reads, or misses."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest
from contract.cuda import get, put
from contract.transport import PATIENCE_S, TransportContract, reads
from cuda_python import cuda_bindings
from redis_servers import wait_until
from vram_parts import VramPlace

from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.vram import VramNodes
from kvstore.core.events import Commit, Drop, Reserve
from kvstore.cuda.base import DeviceRange
from kvstore.index.memory import MemoryIndex
from kvstore.node import NodeConfig
from kvstore.node.vram import VramNode
from kvstore.nodedir import NodeDir
from kvstore.record import unpack_record
from kvstore.transport.base import Read
from kvstore.transport.cuda_ipc import WantedAnywhere

cuda_bindings("runtime")
pytestmark = pytest.mark.gpu

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB + 4096 + 16
BLOCKS = 24
STARTS_S = 120.0
spawn = multiprocessing.get_context("spawn")


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def serve(run_dir: str, pipe) -> None:
    """The owner: saves blocks, then does as it is told until the pipe ends."""
    from kvstore.cuda.bindings import open_device

    device = open_device(0)
    index = MemoryIndex()
    config = NodeConfig(run_dir=Path(run_dir), name="vram", size_bytes=128 * MIB)
    node = VramNode(config, index, device).start()
    session = node.session()

    def ask(what):
        return session.ask(what, time.monotonic() + STARTS_S)

    def save(key, payload):
        ((slot, generation, offset),) = ask(
            Reserve(0, 0, [key], [len(payload)], 1, [0], [0], [None], [0])
        )
        put(device, node.address + offset, payload)
        ask(Commit(0, 0, [(slot, generation, 0)]))
        (record,) = index.lookup([key])
        return key, unpack_record(key, record)

    pipe.send([save(key_of(n), payload_of(n)) for n in range(BLOCKS)])
    while (told := pipe.recv()) != "end":
        if told == "churn":  # every block again and again under other keys
            turn = 0
            while not pipe.poll():
                turn += 1
                for n in range(BLOCKS):
                    old, new = n + BLOCKS * (turn - 1), n + BLOCKS * turn
                    ask(Drop(0, 0, [key_of(old)]))
                    save(key_of(new), payload_of(new))
        elif told == "stop":
            node.stop()
            node.free()
            pipe.send("stopped")


class Pair:
    def __init__(self, run_dir: Path) -> None:
        from kvstore.cuda.bindings import open_device

        self.run_dir = run_dir
        self.pipe, theirs = spawn.Pipe()
        self.owner = spawn.Process(target=serve, args=(str(run_dir), theirs), daemon=True)
        self.owner.start()
        theirs.close()
        assert self.pipe.poll(STARTS_S), "the owner has not saved its blocks"
        self.there = self.pipe.recv()
        self.device = open_device(0)
        directory = NodeDirectory(run_dir, MemoryIndex(), "kv:default")
        self.nodes = VramNodes(directory, self.device)
        self.word = NodeDir(run_dir, "vram").announcement()
        self.mine = self.device.allocate(BLOCKS * BLOCK_BYTES)

    def read(self, blocks=None):
        """(number, bytes) of those that were hits, read into this process's VRAM."""
        blocks = range(BLOCKS) if blocks is None else blocks
        wanted = [
            WantedAnywhere(
                *self.there[n], [DeviceRange(self.mine + n * BLOCK_BYTES, BLOCK_BYTES, 0)]
            )
            for n in blocks
        ]
        outcomes = self.nodes.read(self.word, wanted, time.monotonic() + PATIENCE_S)
        return {
            n: get(self.device, self.mine + n * BLOCK_BYTES, BLOCK_BYTES)
            for n, outcome in zip(blocks, outcomes, strict=True)
            if outcome.read is Read.HIT
        }

    def close(self) -> None:
        self.nodes.close()
        self.device.free(self.mine)
        self.owner.kill()
        self.owner.join(STARTS_S)


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    pair.close()


class TestCudaIpcOnADevice(TransportContract):
    """The owner in this process."""

    @pytest.fixture
    def place(self, tmp_path):
        from kvstore.cuda.bindings import open_device

        device = open_device(0)
        place = VramPlace(tmp_path, device, device)
        yield place
        place.close()


def test_all_blocks_of_another_process_arrive_byte_for_byte(pair):
    for _ in range(3):
        assert pair.read() == {n: payload_of(n) for n in range(BLOCKS)}


def test_they_arrive_in_host_memory_too(pair):
    hosts = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(BLOCKS)]
    wanted = [WantedAnywhere(*at, [host]) for at, host in zip(pair.there, hosts, strict=True)]
    outcomes = pair.nodes.read(pair.word, wanted, time.monotonic() + PATIENCE_S)
    assert reads(outcomes) == [Read.HIT] * BLOCKS
    assert [bytes(host) for host in hosts] == [payload_of(n) for n in range(BLOCKS)]


def test_blocks_that_are_overwritten_meanwhile_are_misses_never_others(pair):
    pair.pipe.send("churn")
    seen = 0
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at:
        got = pair.read()
        assert all(data == payload_of(n) for n, data in got.items())
        seen += len(got)
        if not got:
            break
    assert pair.read() == {}, "all of them have been replaced"
    pair.pipe.send("end")


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.1])
def test_an_owner_that_is_killed_leaves_right_bytes_or_misses(pair, after_s):
    assert len(pair.read()) == BLOCKS
    kill_at = time.monotonic() + after_s
    killed = False
    for _ in range(1000):
        if not killed and time.monotonic() >= kill_at:
            pair.owner.kill()
            killed = True
        got = pair.read()
        assert all(data == payload_of(n) for n, data in got.items())
        if killed and not got:
            break
    wait_until(lambda: pair.read([0]) == {}, "its memory is gone")
    # The device is as good as before.
    data = os.urandom(MIB)
    put(pair.device, pair.mine, data)
    assert get(pair.device, pair.mine, MIB) == data


def test_an_owner_that_ends_in_order_leaves_misses(pair):
    assert len(pair.read()) == BLOCKS
    pair.pipe.send("stop")
    assert pair.pipe.poll(STARTS_S)
    assert pair.pipe.recv() == "stopped"
    assert pair.read() == {}


def test_the_benchmark_runs(monkeypatch):
    from benchmarks import gpu_ipc

    monkeypatch.setattr(gpu_ipc, "SHAPES", ((16, 4 * MIB),))
    (pull,) = gpu_ipc.run()
    assert pull.pull > 0
    print(pull, pull.ratio)
