"""Workers with blocks on another host: loaded in batches, saved without a node of their own."""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

import pytest
from connector_parts import Worker, bits, keys, load_job, loaded, save, save_job
from stores import NodeProcess

from connector.copiers.cuda.page_lock import address_of
from connector.copiers.registered import kv_memory
from connector.worker import layerwise_worker as layerwise_module
from connector.worker import worker as worker_module
from connector.worker.layerwise_worker import LayerwiseWorker
from kvstore import Limits
from kvstore.spi import BlockSession
from kvstore.transport.stream.security import StreamSecurity

torch = pytest.importorskip("torch")
SECRET = "a secret that both sides know"
PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=10.0)


@pytest.fixture(scope="module")
def node(redis_server):
    with NodeProcess(
        redis_server,
        options=("--listen", "127.0.0.1:0"),
        environment={"KVSTORE_SECRET": SECRET},
    ) as process:
        yield process


def session(node, run_dir=None):
    options = {**node.client_options, "limits": PATIENT}
    if run_dir is not None:
        options["run_dir"] = run_dir
    return BlockSession(security=StreamSecurity(secret=SECRET.encode()), **options)


@pytest.fixture
def near(node):
    """On the node's host."""
    store = session(node)
    yield store
    store.close()


@pytest.fixture
def far(node):
    """On a host without a node."""
    with tempfile.TemporaryDirectory(prefix="kve-") as directory:
        store = session(node, Path(directory))
        yield store
        store.close()


def group_of(worker):
    return worker.core._groups[0]


@pytest.mark.parametrize("window_blocks", [1, 2, 100])
def test_a_worker_loads_what_another_host_has_one_batch_a_window(
    near, far, monkeypatch, window_blocks
):
    one = Worker(near, seed=1)
    save(one, save_job(4))
    near.match(keys(4))
    block_bytes = group_of(one).read_bytes_max
    monkeypatch.setattr(worker_module, "LOAD_STAGING_BYTES", window_blocks * block_bytes)
    other = Worker(far, seed=2)
    batches = []
    read = far.remote.stream.read
    far.remote.stream.read = lambda *args: batches.append(args) or read(*args)
    other.core.start_loads([load_job(far, 4)])
    report = loaded(other)
    assert report.invalid_block_ids == set()
    assert torch.equal(bits(other.kv)[:, 11:19], bits(one.kv)[:, 1:9])
    assert len(batches) == -(-4 // window_blocks)


def test_where_blocks_of_other_hosts_arrive_is_page_locked_like_the_store(near, far, monkeypatch):
    """Else all that comes over the network goes to the device by the driver's own staging."""
    asked = []

    def memory(groups, block_tokens, mappings, count, *_):
        asked.append(mappings)
        return kv_memory(groups, block_tokens)

    monkeypatch.setattr(worker_module, "kv_memory", memory)
    one, other = Worker(near, seed=1), Worker(far, seed=2)
    save(one, save_job(2))
    job = load_job(far, 2)
    arrived = []
    views = far.views
    monkeypatch.setattr(
        far, "views", lambda *args: (arrived.append(view) or view for view in views(*args))
    )
    other.core.start_loads([job])
    assert loaded(other).invalid_block_ids == set()
    (staging,) = [m for m in asked[1]() if m.writable]
    assert staging.part_bytes == len(staging.memory) >= worker_module.LOAD_STAGING_BYTES
    start = address_of(staging.memory)
    assert start % mmap.PAGESIZE == 0
    for view in arrived:
        assert 0 <= address_of(view.buffer) - start < len(staging.memory)
    assert arrived


@pytest.mark.parametrize("window_blocks", [1, 3, 100])
def test_what_a_step_loads_from_another_host_arrives_there_too(
    near, far, monkeypatch, window_blocks
):
    one, other = Worker(near, seed=1), Worker(far, seed=2, kind=LayerwiseWorker)
    save(one, save_job(4))
    block_bytes = group_of(one).read_bytes_max
    monkeypatch.setattr(layerwise_module, "LOAD_STAGING_BYTES", window_blocks * block_bytes)
    job = load_job(far, 4)
    arrived, views = [], far.views
    monkeypatch.setattr(
        far, "views", lambda *args: (arrived.append(view) or view for view in views(*args))
    )
    other.core.start_loads([job])
    for name in other.kv:
        other.core.wait_layer_load(name)
    report = other.core.poll()
    assert (report.invalid_block_ids, report.ended_loads) == (set(), {0: 1})
    assert torch.equal(bits(other.kv)[:, 11:19], bits(one.kv)[:, 1:9])
    staging = other.core._staging
    offsets = [address_of(v.buffer) - address_of(staging) for v in arrived]
    assert len(offsets) == 4
    assert all(0 <= offset < len(staging) for offset in offsets)
    assert offsets == [i % window_blocks * block_bytes for i in range(4)]


def test_what_a_step_finds_on_its_own_host_needs_no_room_there(near, monkeypatch):
    """As much of it as may be is open at once, to be copied layer by layer."""
    one, other = Worker(near, seed=1), Worker(near, seed=2, kind=LayerwiseWorker)
    save(one, save_job(4))
    monkeypatch.setattr(layerwise_module, "LOAD_STAGING_BYTES", 1)
    asked, views = [], near.views
    monkeypatch.setattr(near, "views", lambda *args: asked.append(args) or views(*args))
    other.core.start_loads([load_job(near, 4)])
    for name in other.kv:
        other.core.wait_layer_load(name)
    assert other.core.poll().invalid_block_ids == set()
    assert [(len(found), staging) for found, staging, _ in asked] == [(4, None)]
    assert torch.equal(bits(other.kv)[:, 11:19], bits(one.kv)[:, 1:9])


def test_a_worker_saves_to_another_host(near, far):
    near.clear(group_of(Worker(far, seed=3)).namespace.id)
    one = Worker(far, seed=3)
    save(one, save_job(3))
    assert len(near.match(keys(3))) == 3
    other = Worker(near, seed=4)
    other.core.start_loads([load_job(near, 3)])
    assert loaded(other).invalid_block_ids == set()
    assert torch.equal(bits(other.kv)[:, 11:17], bits(one.kv)[:, 1:7])


def test_a_node_that_is_killed_costs_the_blocks_and_no_request(redis_server, tmp_path):
    with NodeProcess(
        redis_server, options=("--listen", "127.0.0.1:0"), environment={"KVSTORE_SECRET": SECRET}
    ) as node:
        near, far = session(node), session(node, tmp_path)
        save(Worker(near, seed=1), save_job(3))
        job = load_job(far, 3)
        node.kill()
        other = Worker(far, seed=2)
        other.core.start_loads([job])
        report = loaded(other)
        assert report.finished_loads == {job.request_id}
        assert report.invalid_block_ids == {i for block in job.blocks for i in block.block_ids}
        near.close()
        far.close()
