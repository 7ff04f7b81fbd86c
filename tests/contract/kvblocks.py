"""What every `KVCopier` promises. Subclasses make one over a `Case`."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_cases import Case, Shape, shapes

from connector.copiers.base import Gather, HeadPart, KVCopier, Scatter

EXAMPLES = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
SEEDS = st.integers(0, 1 << 16)
BIG = Shape(layers=3, heads=2, channels=64, element_bytes=2, page_tokens=8, blocks_per_payload=2)


def whole(shape: Shape) -> HeadPart:
    return HeadPart(shape.heads, 0, 0, shape.heads)


class KVBlocksContract:
    def blocks(self, case: Case, seed: int) -> KVCopier:
        """A copier over the case's memory; `seed` is what its luck depends on."""
        raise NotImplementedError

    def sync(self, case: Case) -> None:
        """Bring what was scattered into the case's own memory, should it be elsewhere."""

    @EXAMPLES
    @given(shapes(), SEEDS, st.data())
    def test_payloads_are_layer_head_token_channel_whatever_the_memory_layout(
        self, shape: Shape, seed: int, data: Any
    ) -> None:
        case = Case(shape, seed)
        ids = st.lists(
            st.integers(0, shape.engine_blocks - 1),
            min_size=shape.blocks_per_payload,
            max_size=shape.blocks_per_payload,
        )
        chosen = data.draw(st.lists(ids, min_size=1, max_size=4))
        layer = data.draw(st.none() | st.integers(0, shape.layers - 1))
        before = [storage.copy() for storage in case.storages]
        outs = [np.full(shape.payload_shape, 0x5A, np.uint8) for _ in chosen]
        items = [
            Gather(ids, memoryview(out.reshape(-1))) for ids, out in zip(chosen, outs, strict=True)
        ]
        self.blocks(case, seed).gather_many(items, layer)
        for ids, out in zip(chosen, outs, strict=True):
            expected = case.payload(ids)
            if layer is not None:  # nothing of the others
                others = [i for i in range(shape.layers) if i != layer]
                expected[others] = 0x5A
            assert np.array_equal(out, expected)
        self.sync(case)
        for storage, was in zip(case.storages, before, strict=True):
            assert np.array_equal(storage, was), "gathering writes nothing"

    @EXAMPLES
    @given(shapes(), SEEDS, st.data())
    def test_trap_scattering_writes_those_heads_and_tokens_and_not_one_byte_more(
        self, shape: Shape, seed: int, data: Any
    ) -> None:
        case = Case(shape, seed)
        layer = data.draw(st.none() | st.integers(0, shape.layers - 1))
        free = data.draw(st.permutations(range(shape.engine_blocks)))
        items, wanted = [], case.copy()
        generator = np.random.default_rng(seed)
        for _ in range(data.draw(st.integers(1, 3))):
            count = min(data.draw(st.integers(0, shape.blocks_per_payload)), len(free))
            ids, free = free[:count], free[count:]
            skip = data.draw(st.integers(0, shape.blocks_per_payload - count))
            part = data.draw(st.none() | parts(shape.heads))
            heads = (part or whole(shape)).payload_heads
            payload = generator.integers(
                0, 256, (shape.layers, heads, *shape.payload_shape[2:]), np.uint8
            )
            payload.flags.writeable = False  # as the store's views are
            items.append(Scatter(memoryview(payload.reshape(-1)), skip, ids, part))
            wanted.put(payload, skip, ids, part or whole(shape), layer)
        self.blocks(case, seed).scatter_many(items, layer)
        self.sync(case)
        for storage, expected in zip(case.storages, wanted.storages, strict=True):
            assert np.array_equal(storage, expected)

    @given(SEEDS)
    @settings(EXAMPLES, max_examples=15)
    def test_many_payloads_at_once_are_those_one_by_one(self, seed: int) -> None:
        case = Case(BIG, seed)
        ids = np.random.default_rng(seed).integers(0, BIG.engine_blocks, (23, 2)).tolist()
        outs = [bytearray(case.payload([0, 0]).size) for _ in ids]
        blocks = self.blocks(case, seed)
        blocks.gather_many([Gather(i, memoryview(o)) for i, o in zip(ids, outs, strict=True)])
        assert all(out == case.payload(i).tobytes() for i, out in zip(ids, outs, strict=True))
        # Later ones win: what is scattered to one block again and again ends as the last.
        target = Case(BIG, seed + 1)
        other = self.blocks(target, seed)
        for out in outs:
            other.scatter_many([Scatter(memoryview(out), 0, [4, 1])])
        self.sync(target)
        assert np.array_equal(target.payload([4, 1]), case.payload(ids[-1]))

    def test_nothing_to_copy_is_nothing(self) -> None:
        case = Case(BIG, 0)
        blocks, before = self.blocks(case, 0), case.copy()
        blocks.gather_many([])
        blocks.scatter_many([])
        blocks.scatter_many([Scatter(memoryview(bytes(case.payload([0, 0]).size)), 1, [])])
        self.sync(case)
        assert np.array_equal(case.storages[0], before.storages[0])

    def test_ready_is_over_when_the_work_before_it_is(self) -> None:
        blocks = self.blocks(Case(BIG, 0), 0)
        blocks.wait_ready(blocks.mark_ready())
        blocks.wait_ready(None)


@st.composite
def parts(draw: Any, heads: int) -> HeadPart:
    """Some heads of a payload of any size, among the engine's."""
    taken = draw(st.integers(1, heads))
    source = draw(st.integers(0, 3))
    payload_heads = source + taken + draw(st.integers(0, 3))
    return HeadPart(payload_heads, source, draw(st.integers(0, heads - taken)), taken)
