"""The order of tokens before heads: a namespace of its own, and one tensor-parallel size at a time.

That a page is one piece then: test_vllm_layouts.py and on_fake_driver_tokens.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from connector_parts import copier_of, kv_tensors
from tp_engine import Model, TpEngine

from connector.build import EngineShape, GroupShape, scheduler_side, worker_side
from connector.copiers.base import Gather
from connector.layout.geometry import KVGeometry, LayerRun, splits_of
from connector.layout.topology import TpKVTopology
from connector.settings import ConnectorSettings
from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

BLOCK = 8
TOKENS = list(range(100, 100 + 3 * BLOCK + 2))
ORDERS = ("heads", "tokens")
Make = Callable[..., TpEngine]


@pytest.fixture
def make(store: MemoryBlockStore) -> Iterator[Make]:
    pytest.importorskip("torch")
    engines: list[TpEngine] = []

    def one(order: str, tp_size: int = 1, model: Model | None = None, **changes: Any) -> TpEngine:
        changes.setdefault("order", "NHD")
        made = TpEngine(store, model or Model(), tp_size, payload_order=order, **changes)  # type: ignore[arg-type]
        engines.append(made)
        return made

    yield one
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_an_engine_loads_byte_for_byte_what_one_of_its_size_and_order_saved(
    make: Make, tp_size: int, layerwise: bool
) -> None:
    make("tokens", tp_size, seed=1, layerwise=layerwise).save(TOKENS)
    # Of another block size, too: tokens follow each other whatever it is.
    engine = make("tokens", tp_size, seed=2, engine_block=2, layerwise=layerwise)
    offered, tables, _, report = engine.load(TOKENS)
    assert offered == 3 * BLOCK
    assert not report.failed_requests
    engine.check(TOKENS, offered, tables)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("heads", 1), ("tokens", 1)),
        (("tokens", 1), ("heads", 1)),
        (("heads", 2), ("tokens", 1)),
        (("tokens", 1), ("tokens", 2)),
        (("tokens", 2), ("tokens", 1)),
        (("tokens", 2), ("heads", 4)),
        # Of four workers each has one head, in the one order that there is: that of heads.
        (("tokens", 4), ("tokens", 2)),
    ],
)
def test_trap_another_order_or_split_of_the_heads_is_a_miss(
    make: Make, saved: tuple[str, int], loaded: tuple[str, int]
) -> None:
    make(*saved).save(TOKENS)
    engine = make(*loaded, seed=3)
    assert engine.match(engine.request("r", TOKENS)) == 0


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(("tokens", 4), ("heads", 1)), (("heads", 2), ("tokens", 8)), (("tokens", 8), ("heads", 4))],
)
def test_workers_with_one_head_have_one_order_and_share_as_ever(
    make: Make, saved: tuple[str, int], loaded: tuple[str, int]
) -> None:
    make(*saved, seed=1).save(TOKENS)
    engine = make(*loaded, seed=2)
    offered, tables, _, _ = engine.load(TOKENS)
    assert offered == 3 * BLOCK
    engine.check(TOKENS, offered, tables)


GEOMETRY = KVGeometry(layers=32, heads=4, channel_bytes=512, engine_block_tokens=16)
MODEL = {"model": "m", "hash_algorithm": "sha256_cbor", "hash_seed": "unset"}


def shape(geometry: KVGeometry, tp_size: int = 1) -> EngineShape:
    topology = TpKVTopology.of(tp_size, 1, geometry.heads * tp_size)
    group = GroupShape(geometry=geometry, topology=topology)
    return EngineShape(groups=(group,), workers=tp_size, model={"model": "m"})


def test_trap_no_key_of_one_order_is_one_of_the_other() -> None:
    """Nor of another number of heads with as many bytes a token."""
    every = []
    for order in ORDERS:
        for heads, tp_size in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 4)):
            geometry = KVGeometry(
                layers=2, heads=heads, channel_bytes=64 // heads, engine_block_tokens=4
            )
            settings = ConnectorSettings(payload_order=order, tp_sizes=[], block_tokens=BLOCK)  # type: ignore[arg-type]
            layout = shape(geometry, tp_size).layout(settings)
            every += [namespace.fingerprint for namespace in layout.all_namespaces()]
    assert len(set(every)) == len(every) == 2 * (1 + 1 + 1 + 2 + 2 + 4)


def test_the_order_and_the_heads_are_named_and_no_other_size_is_looked_for() -> None:
    layout = shape(GEOMETRY, 2).layout(ConnectorSettings(payload_order="tokens"))
    (split,) = layout.groups[0].splits
    names = ("layout", "head_first", "heads", "total_heads", "channel_bytes")
    assert [tuple(one.fields[name] for name in names) for one in split.namespaces] == [
        ("LNHC", 0, 4, 8, 512),
        ("LNHC", 4, 4, 8, 512),
    ]
    by_heads = shape(GEOMETRY, 2).layout(ConnectorSettings())
    assert layout.block_tokens == by_heads.block_tokens


def test_trap_the_namespaces_of_the_default_order_are_those_of_before() -> None:
    """Else an upgrade would throw a cache away."""
    splits = splits_of(MODEL, GEOMETRY, TpKVTopology.of(2, 1, 8), 64, (1, 2))
    assert [one.fingerprint.hex() for split in splits for one in split.namespaces] == [
        "0c59588098cf55e7db01ccc4e8e1a2998d383625c72697dbfa54a7904ef05433",
        "6251299132f2b92ddfc51ffc6ec230e9cde5830cfe4f831a21e35bccd146678f",
        "c56203d337a0422bf1d3648f4c5b61480634918a2c14bb1488086745c5ef04bf",
    ]


@pytest.mark.parametrize("memory", ["HND", "NHD"])
def test_the_bytes_of_the_default_order_are_layer_head_token(memory: str) -> None:
    torch = pytest.importorskip("torch")
    geometry = KVGeometry(layers=2, heads=2, channel_bytes=16, engine_block_tokens=4)
    kv = kv_tensors(6, memory, seed=1)
    out = bytearray(geometry.payload_bytes(BLOCK))
    copier_of(kv, geometry, BLOCK).gather_many([Gather([3, 1], memoryview(out))])
    bits = [layer.view(torch.uint8).numpy() for layer in kv.values()]
    want = [layer[block, head] for layer in bits for head in range(2) for block in (3, 1)]
    assert out == b"".join(one.tobytes() for one in want)


def test_memory_with_tokens_within_heads_is_refused_at_start() -> None:
    pytest.importorskip("torch")
    geometry = KVGeometry(layers=2, heads=2, channel_bytes=16, engine_block_tokens=4)
    with pytest.raises(
        UsageError, match=r"payload_order='tokens': must be heads where the 2 heads"
    ):
        copier_of(kv_tensors(6, "HND"), geometry.in_token_order(), BLOCK)


def test_layers_of_several_shapes_are_refused_at_start() -> None:
    runs = (LayerRun((0,), 2, 16), LayerRun((1,), 4, 16))
    geometry = KVGeometry(layers=2, heads=2, channel_bytes=16, engine_block_tokens=4, runs=runs)
    with pytest.raises(UsageError, match=r"payload_order='tokens': must be heads where layers"):
        worker_side(ConnectorSettings(payload_order="tokens"), shape(geometry), 0)


@pytest.mark.parametrize(
    ("changes", "said"), [({}, []), ({"heads": 1}, ["one head"]), ({"recurrent": True}, ["states"])]
)
def test_a_group_that_has_one_order_is_named_at_start(
    changes: dict[str, Any], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    geometry = KVGeometry(
        **{"layers": 2, "heads": 2, "channel_bytes": 16, "engine_block_tokens": 4}
        | ({"heads": 1} if changes else {})
        | changes
    )
    settings = ConnectorSettings(url="redis://127.0.0.1:1/0", payload_order="tokens")
    core = scheduler_side(settings, shape(geometry))
    core.close()
    lines = [r.getMessage() for r in caplog.records if "payload_order" in r.getMessage()]
    assert lines == [
        f"payload_order tokens changes nothing for KV cache group 0: a worker has {what} of it"
        for what in said
    ]
