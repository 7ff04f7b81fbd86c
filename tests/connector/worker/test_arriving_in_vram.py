"""Blocks of another host that a worker loads by RDMA into VRAM, and from there into its engine.

NIXL's agents are real ones in real processes, on one host (nixl_places.py); the device is a model,
whose memory is files: what NIXL registers is DRAM, and all else is as on a device."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from connector_parts import (
    PER_KEY,
    Worker,
    bits,
    keys,
    load_job,
    loaded,
    save,
    save_job,
    taken,
)
from host_device import HostDevice
from nixl_places import needs_nixl, same_host
from redis_servers import wait_until
from stores import NodeProcess

from connector import build
from connector.copiers.base import KVMemory, Scatter
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of
from connector.limits import LOAD_STAGING_BYTES
from connector.messages import WorkerReport
from connector.settings import ConnectorSettings
from connector.worker.layerwise_worker import LayerwiseWorker
from connector.worker.vram import VramStore
from connector.worker.worker import WorkerCore
from kvstore import Limits, UsageError
from kvstore.client.nodes.fetch import FetchedBlock
from kvstore.spi import BlockSession, DeviceRange
from kvstore.testing.cuda import ModelCuda
from kvstore.testing.stopping import stop
from kvstore.transport.nixl import vram as vram_module
from kvstore.transport.nixl.vram import ARENA_BYTES
from kvstore.transport.stream.security import StreamSecurity

torch = pytest.importorskip("torch")
pytestmark = needs_nixl
MIB = 1 << 20
SECRET = "a secret that both sides know"
SECURITY = StreamSecurity(secret=SECRET.encode())
PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=10.0)
LONG_S = 60.0
LOAD_S = 9.0
"""Of one load, on a busy machine."""
BLOCKS = 4


@pytest.fixture(scope="module", autouse=True)
def on_same_host() -> Iterator[None]:
    with same_host() as patch:
        patch.setenv("KVSTORE_SECRET", SECRET)
        yield


def listening(redis_server: Any) -> NodeProcess:
    return NodeProcess(redis_server, options=("--listen", "127.0.0.1:0", "--nixl", "read-only"))


@pytest.fixture(scope="module")
def node(redis_server: Any, on_same_host: None) -> Iterator[NodeProcess]:
    with listening(redis_server) as process:
        yield process


def producer(node: NodeProcess) -> Worker:
    """Of the node's host, with blocks 0 to BLOCKS - 1 saved from engine block 1 on."""
    options = {**node.client_options, "limits": PATIENT}
    one = Worker(BlockSession(security=SECURITY, verify="always", **options), seed=1)
    save(one, save_job(BLOCKS))
    return one


class Noting(DeviceCopier):
    """Notes where what it spread was."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.payloads: list[Any] = []

    def scatter_many(self, items: Any, layer: int | None = None) -> None:
        self.payloads += [item.payload for item in items if isinstance(item, Scatter)]
        super().scatter_many(items, layer)


class Consumer:
    """An engine's worker on another host, with a device, whose settings say `vram`."""

    def __init__(
        self,
        node: NodeProcess,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        kind: type[WorkerCore] = WorkerCore,
        **model: Any,
    ) -> None:
        self.device = ModelCuda(folder, **model)
        monkeypatch.setattr(build, "cuda_device", lambda ordinal: self.device)
        self._run_dir = tempfile.TemporaryDirectory(prefix="kve-")
        settings = ConnectorSettings(
            url=str(node.client_options["url"]),
            key_prefix=str(node.client_options["key_prefix"]),
            run_dir=self._run_dir.name,
            nixl_destination="vram",
            lookup_timeout_s=10.0,
            limits=PATIENT,
        )
        store = build.open_in_vram(settings, 0, saves=True)
        assert isinstance(store, VramStore)
        self.store = store
        self.session = store._store

        def memory(groups: Any, block_tokens: int, mappings: Any, count: Any, *_: Any) -> KVMemory:
            ((kv, geometry),) = groups
            self.copier = Noting(
                layout_of(list(kv.values()), geometry, block_tokens), HostDevice(1)
            )
            return KVMemory([self.copier], lambda: None, 0)

        with monkeypatch.context() as patch:
            patch.setattr("connector.worker.worker.kv_memory", memory)
            self.worker = Worker(store, seed=2, timeout_s=LOAD_S, kind=kind)

    @property
    def nixl(self) -> Any:
        return self.session.remote.transports._get("nixl")

    @property
    def room(self) -> Any:
        """The landing memory, where there is some."""
        landing = self.session._landing
        return None if landing is None else landing._room

    @property
    def reader(self) -> Any:
        return self.nixl._reader

    def load(self, first_block_id: int = 11) -> WorkerReport:
        self.copier.payloads.clear()
        self.worker.core.start_loads([load_job(self.store, BLOCKS, first_block_id)])
        if not isinstance(self.worker.core, LayerwiseWorker):
            return loaded(self.worker)
        for name in self.worker.kv:
            self.worker.core.wait_layer_load(name)
        return self.worker.core.poll()

    def landed(self) -> list[bool]:
        """Of each payload that went to the engine, whether it lay in the landing memory."""
        room = self.room
        return [
            isinstance(one, DeviceRange)
            and room is not None
            and room.address <= one.address
            and one.address + one.size_bytes <= room.address + room.size_bytes
            for one in self.copier.payloads
        ]

    def until_in_vram(self) -> None:
        """Load until it comes that way, which is first tried in the background."""

        def came() -> bool:
            failed = self.load().invalid_block_ids  # a machine that is too busy to be in time
            return not failed and all(self.landed())

        wait_until(came, f"blocks come to VRAM: {self.session.why_not_to_vram}", LONG_S)

    def has(self, one: Worker) -> bool:
        last = BLOCKS * PER_KEY
        return bool(
            torch.equal(bits(self.worker.kv)[:, 11 : 11 + last], bits(one.kv)[:, 1 : 1 + last])
        )

    def read_bytes(self) -> dict[str, float]:
        """What the metrics say came, by the way it took."""
        counts = taken(self.worker.core.take_stats)
        mark = "read_bytes:"
        return {name.removeprefix(mark): n for name, n in counts.items() if mark in name}

    def close(self) -> None:
        self.device.hold.set()
        self.worker.core.close()
        self._run_dir.cleanup()


@pytest.fixture
def consumer(
    node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Consumer]:
    consumer = Consumer(node, tmp_path, monkeypatch)
    yield consumer
    consumer.close()


@pytest.fixture
def one(node: NodeProcess) -> Iterator[Worker]:
    one = producer(node)
    yield one
    one.core.close()


def engine_blocks() -> set[int]:
    """All that a load of these tests is for."""
    return set(range(11, 11 + BLOCKS * PER_KEY))


def test_blocks_go_from_the_wire_to_vram_and_from_there_into_the_engine(
    one: Worker, consumer: Consumer
) -> None:
    consumer.until_in_vram()
    consumer.read_bytes()
    consumer.worker.kv["layer0"].zero_()
    consumer.worker.kv["layer1"].zero_()
    staging = consumer.worker.core._staging[:MIB]
    staging[:] = bytes(MIB)
    assert consumer.load().invalid_block_ids == set()
    assert consumer.landed() == [True] * BLOCKS
    assert consumer.has(one)
    sizes = sum(len(payload) for payload in consumer.copier.payloads)
    assert consumer.read_bytes() == {"nixl_vram": sizes}
    assert consumer.session.why_not_to_vram == ""
    assert staging == bytes(MIB), "nothing came to host memory"


def test_what_a_step_loads_layer_by_layer_arrives_there_too(
    one: Worker, node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Consumer(node, tmp_path, monkeypatch, LayerwiseWorker)) as consumer:
        consumer.until_in_vram()
        assert len(consumer.landed()) == BLOCKS * len(consumer.worker.kv)
        assert consumer.has(one)


def test_a_device_without_room_to_land_loads_through_host_memory(
    one: Worker, node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(
        Consumer(node, tmp_path, monkeypatch, capacity_bytes=LOAD_STAGING_BYTES - 1)
    ) as consumer:
        assert consumer.load().invalid_block_ids == set()
        assert consumer.landed() == [False] * BLOCKS
        assert consumer.has(one)
        assert "no room" in consumer.session.why_not_to_vram


def test_a_device_without_room_for_the_arena_loads_through_host_memory(
    one: Worker, node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = LOAD_STAGING_BYTES + ARENA_BYTES - 1
    with closing(Consumer(node, tmp_path, monkeypatch, capacity_bytes=room)) as consumer:

        def by_nixl() -> bool:
            assert consumer.load().invalid_block_ids == set()
            return "nixl" in consumer.read_bytes()

        wait_until(by_nixl, "they come through NIXL", LONG_S)
        assert consumer.landed() == [False] * BLOCKS
        assert consumer.has(one)
        assert "no room" in consumer.session.why_not_to_vram


def test_a_nixl_that_cannot_register_vram_loads_through_host_memory(
    one: Worker, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a UCX without CUDA: the descriptor is one that no driver of this machine opens."""
    ends = os.pipe()
    real = vram_module.VramArena.arguments
    monkeypatch.setattr(vram_module.VramArena, "fd", property(lambda arena: ends[0]))
    monkeypatch.setattr(
        vram_module.VramArena, "arguments", lambda arena: [str(ends[0]), *real(arena)[1:]]
    )

    def by_nixl() -> bool:
        assert consumer.load().invalid_block_ids == set()
        return "nixl" in consumer.read_bytes()

    wait_until(by_nixl, "they come through NIXL", LONG_S)
    assert consumer.landed() == [False] * BLOCKS
    assert consumer.has(one)
    assert "DeviceError" in consumer.session.why_not_to_vram


def test_what_comes_wrong_to_the_device_fails_the_load_and_host_memory_is_used_then(
    one: Worker, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.until_in_vram()
    way = consumer.nixl._vram
    real = way.bring

    def spoil(arena: Any, copies: Any) -> None:
        """As a card that writes elsewhere: what was READ is not there."""
        real(arena, [(to, arena.address + 15 * MIB, n) for to, _, n in copies])

    with monkeypatch.context() as patch:
        patch.setattr(way, "bring", spoil)
        report = consumer.load()
    assert report.invalid_block_ids == engine_blocks()
    assert consumer.copier.payloads == [], "no block of the engine was touched"
    consumer.worker.kv["layer0"].zero_()
    assert consumer.load().invalid_block_ids == set()
    assert consumer.landed() == [False] * BLOCKS
    assert consumer.has(one)
    assert "damaged" in consumer.session.why_not_to_vram


def test_a_device_that_refuses_its_copies_costs_nothing_but_the_way(
    one: Worker, consumer: Consumer
) -> None:
    consumer.until_in_vram()
    consumer.device.broken = True
    assert consumer.load().invalid_block_ids == set()
    assert consumer.landed() == [False] * BLOCKS
    assert consumer.has(one)
    consumer.device.broken = False


def test_a_copy_that_hangs_fails_the_load_by_its_deadline_and_loses_the_memory(
    one: Worker, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.until_in_vram()
    room = consumer.room
    assert room is not None
    consumer.worker.core._load_timeout_s = 4.0
    consumer.device.hold.clear()
    began = time.monotonic()
    report = consumer.load()
    assert report.invalid_block_ids == engine_blocks()
    assert time.monotonic() - began < vram_module.CUDA_IPC_DRAIN_S, "by the load's own deadline"
    wait_until(lambda: "hangs" in consumer.session.why_not_to_vram, "it is given up", LONG_S)
    assert consumer.load().invalid_block_ids == set()
    assert consumer.landed() == [False] * BLOCKS
    assert consumer.has(one)
    consumer.close()
    consumer.device.export(room.address)  # the copy may still write there: it is not free


def test_a_reading_process_killed_in_the_middle_costs_nothing_but_the_way(
    one: Worker, consumer: Consumer
) -> None:
    consumer.until_in_vram()
    free_bytes = consumer.device.free_bytes
    reader = consumer.reader
    stop(reader.pid)
    reports: list[WorkerReport] = []
    thread = threading.Thread(target=lambda: reports.append(consumer.load()))
    thread.start()
    wait_until(lambda: reader._due, "the READ is asked for", LONG_S)
    os.kill(reader.pid, signal.SIGKILL)
    thread.join(LONG_S)
    assert reports[0].invalid_block_ids == set(), "a stream brought them"
    assert consumer.landed() == [False] * BLOCKS
    assert consumer.has(one)
    consumer.until_in_vram()
    assert consumer.device.free_bytes == free_bytes, "what it had is given back"


def test_a_node_killed_in_the_middle_is_reported_and_no_byte_of_it_is_used(
    redis_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(redis_server) as node:
        one = producer(node)
        consumer = Consumer(node, tmp_path, monkeypatch)
        consumer.until_in_vram()
        reader = consumer.reader
        before = bits(consumer.worker.kv).clone()
        stop(reader.pid)
        reports: list[WorkerReport] = []
        thread = threading.Thread(target=lambda: reports.append(consumer.load(21)))
        thread.start()
        wait_until(lambda: reader._due, "the READ is asked for", LONG_S)
        node.kill()
        os.kill(reader.pid, signal.SIGKILL)
        thread.join(LONG_S)
        assert reports[0].invalid_block_ids == set(range(21, 21 + BLOCKS * PER_KEY))
        assert torch.equal(bits(consumer.worker.kv), before)
        consumer.close()
        one.core.close()


def test_memory_on_the_device_is_of_one_staging_alone_and_given_back(
    one: Worker, consumer: Consumer
) -> None:
    """Views of one caller must not be written over by another's."""
    consumer.until_in_vram()
    room = consumer.room
    assert room is not None
    found = consumer.store.match(keys(BLOCKS))
    other = memoryview(bytearray(MIB))
    for staging in (other, None):
        views = list(consumer.store.views(found, staging, LONG_S))
        assert all(isinstance(view, FetchedBlock) and view.vram is None for view in views)
    consumer.worker.core.close()
    with pytest.raises(UsageError, match="allocate"):
        consumer.device.export(room.address)


def test_without_the_setting_nothing_is_asked_of_the_device(
    one: Worker, node: NodeProcess, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"nixl_destination.*host, vram; did you mean vram"):
        ConnectorSettings(nixl_destination="vrma")  # type: ignore[arg-type]
    assert ConnectorSettings().nixl_destination == "host"
    store = build.open_in_vram(ConnectorSettings(run_dir=str(tmp_path)), 0, saves=True)
    assert isinstance(store, BlockSession)
    assert store.why_not_to_vram == "it is not wanted"
    store.close()
