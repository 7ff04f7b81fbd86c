"""Before its first load a worker has imported, mapped and connected to all that the load needs."""

from __future__ import annotations

import json
import textwrap
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from connector_parts import GEOMETRY, hashes_of
from own_python import printed

from connector.build import EngineShape
from connector.layout.topology import TpKVTopology
from connector.settings import ConnectorSettings
from kvstore.spi import BlockSession, Reservation

if TYPE_CHECKING:
    from stores import NodeProcess

pytest.importorskip("torch")
ROOT = Path(__file__).parents[3]
BLOCKS = 2
PROGRAM = textwrap.dedent("""
    import json, sys, time
    import torch
    from connector.build import EngineShape, worker_side
    from connector.layout.geometry import KVGeometry
    from connector.layout.topology import TpKVTopology
    from connector.messages import LoadBlock, LoadJob
    from connector.settings import ConnectorSettings
    from kvstore.spi import BlockRef
    told = json.loads(sys.argv[1])
    geometry = KVGeometry(**told["geometry"])
    shape = EngineShape.of_one_group(geometry, TpKVTopology.of(), {"model": "m"})
    worker = worker_side(ConnectorSettings.from_extra(told["settings"]), shape, 0)
    size = (8, geometry.heads, geometry.engine_block_tokens, geometry.channel_bytes)
    layers = [torch.zeros(size, dtype=torch.uint8) for _ in range(geometry.layers)]
    worker.register_kv_caches({str(i): layer for i, layer in enumerate(layers)})

    def until(done):
        give_up_at = time.monotonic() + 30
        while not done() and time.monotonic() < give_up_at:
            time.sleep(0.01)

    def warm():
        store = worker._store.opened
        return store is not None and store.nodes.mapped and store.writer._found

    def state():
        store = worker._store.opened
        if store is None:
            return {"mapped": [], "connected": []}
        return {
            "mapped": [one.announcement.node_id for one in store.nodes.mapped],
            "connected": [w.linked.announcement.node_id for w in store.writer._found if w.linked],
        }

    until(warm)
    before, modules = state(), set(sys.modules)
    per = told["engine_blocks"]
    blocks = tuple(
        LoadBlock((BlockRef(bytes.fromhex(key), bytes.fromhex(record)),), 0,
                  tuple(range(i * per, (i + 1) * per)))
        for i, (key, record) in enumerate(told["found"])
    )
    worker.start_loads([LoadJob(0, "q", blocks)])
    reports = []

    def ended():
        reports.append(worker.poll(0.1))
        return reports[-1].finished_loads

    until(ended)
    print(json.dumps({
        "before": before,
        "after": state(),
        "loaded": sorted(reports[-1].finished_loads),
        "failed": sorted(reports[-1].invalid_block_ids),
        "bytes": int(sum(layer[: per * len(blocks)].float().mean() for layer in layers)),
        "imported": sorted(
            name for name in set(sys.modules) - modules if name.split(".")[0] in told["ours"]
        ),
    }))
    worker.close()
""")


def test_a_first_load_imports_maps_and_connects_to_nothing(node: NodeProcess) -> None:
    settings = {**node.engine_settings, "block_tokens": 2 * GEOMETRY.engine_block_tokens}
    shape = EngineShape.of_one_group(GEOMETRY, TpKVTopology.of(), {"model": "m"})
    layout = shape.layout(ConnectorSettings.from_extra(settings))
    (namespace,) = layout.groups[0].namespaces
    keys = namespace.engine_keys(hashes_of(list(range(BLOCKS * layout.block_tokens))), 2)
    assert len(keys) == BLOCKS
    with closing(BlockSession(**node.client_options)) as saver:
        slots = saver.reserve(keys, GEOMETRY.token_bytes * layout.block_tokens, namespace.id)
        for slot in slots:
            assert isinstance(slot, Reservation)
            slot.buffer[:] = b"\x01" * len(slot.buffer)
        assert all(saver.commit(slots))
        found = [(one.key.hex(), one.record.hex()) for one in saver.match(keys)]
    told = {
        "settings": settings,
        "geometry": {
            name: getattr(GEOMETRY, name)
            for name in ("layers", "heads", "channel_bytes", "engine_block_tokens")
        },
        "engine_blocks": 2,
        "found": found,
        "ours": ["kvstore", "connector", "redis", "msgpack", "xxhash", "numpy"],
    }
    done = printed(PROGRAM, json.dumps(told), cwd=ROOT)
    said = json.loads(done)
    assert (said["loaded"], said["failed"], said["bytes"]) == (["q"], [], GEOMETRY.layers)
    assert len(said["before"]["mapped"]) == len(said["before"]["connected"]) == 1
    assert said["after"] == said["before"]
    assert said["imported"] == []
