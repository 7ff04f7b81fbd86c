"""Why a request did not hit, told by real nodes: the scheduler side over real sessions.

What it says over the model of a store, all reasons included, is in test_explain_requests.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from connector_parts import (
    BLOCK,
    GEOMETRY,
    PATIENCE_S,
    FakeRequest,
    layout,
    prompt,
    wait_for,
)

from connector.messages import WorkerReport
from connector.scheduler.lazy_store import LazyStore
from connector.scheduler.scheduler import SchedulerCore
from connector.scheduler.settings import SchedulerSettings
from kvstore import Client, MissReason
from kvstore.spi import BlockSession, Missing, Reservation

if TYPE_CHECKING:
    from stores import NodeProcess

BLOCK_BYTES = GEOMETRY.token_bytes * BLOCK


class Real:
    """A scheduler side over a real node, and a session that saves as its worker would."""

    def __init__(self, node: NodeProcess, **fields: object) -> None:
        self.layout = layout(**fields)
        self.session = BlockSession(**node.client_options)
        self.session.register_namespaces(tuple(self.layout.all_namespaces()))
        settings = SchedulerSettings(lookup_timeout_s=PATIENCE_S)
        self.core = SchedulerCore(
            LazyStore(lambda: BlockSession(**node.client_options)), self.layout, settings
        )

    def save(self, request: FakeRequest, block_bytes: int = BLOCK_BYTES) -> None:
        namespace = self.layout.groups[0].namespaces[0]
        keys = namespace.engine_keys(request.block_hashes, self.layout.hashes_per_key)
        reservations = self.session.reserve(keys, block_bytes, namespace.id)
        slots = [slot for slot in reservations if isinstance(slot, Reservation)]
        assert all(self.session.commit(slots))

    def match(self, request: FakeRequest) -> int:
        answers: list[int | None] = []

        def asked() -> bool:
            answers.append(self.core.match(request, 0))
            self.core.plan_step([], [], lambda _: None)
            return answers[-1] is not None

        wait_for(asked, "an answer")
        return answers[-1] or 0

    def explain(self, request: FakeRequest, reason: MissReason) -> Missing:
        def told() -> Missing:
            explanation = self.core.explain(request.request_id)
            assert explanation is not None
            assert explanation.first_missing is not None
            return explanation.first_missing

        wait_for(lambda: told().reason is reason, f"{reason}, not {told()}")
        return told()

    def close(self) -> None:
        self.core.close()
        self.session.close()


def pressure(node: NodeProcess) -> None:
    """More than the node holds."""
    with Client(**node.client_options) as client:
        for i in range(80):
            assert client.put(f"pressure{i}", os.urandom(1 << 20))


def test_a_prompt_evicted_by_pressure_is_told_with_node_and_age(node: NodeProcess) -> None:
    real = Real(node)
    request = prompt(2)
    real.save(request)
    pressure(node)
    wait_for(lambda: real.match(request) == 0, "the removal")
    missing = real.explain(request, MissReason.EVICTED)
    assert missing.node == "node"
    assert missing.age_s is not None
    real.close()


def test_what_requests_found_and_missed_is_seen_at_the_node(node: NodeProcess) -> None:
    real = Real(node)
    found, never = prompt(2, seed=1), prompt(3, seed=2)
    real.save(found)
    assert real.match(found) == 2 * BLOCK
    real.core.allocated(found, lambda: (list(range(101, 110)),), 2 * BLOCK)
    real.core.plan_step([], [], lambda _: None)
    real.core.loads_ended([found.request_id])
    assert real.match(never) == 0
    real.explain(never, MissReason.NEVER_STORED)
    for request in (found, never):
        real.core.finished(request.request_id)

    def told() -> dict[str, float]:
        names = ("asked_tokens", "hit_tokens", "missed_tokens:never-stored")
        counted = real.session.writer.stats()
        return {name: counted.get(name, 0) for name in names}

    expected = dict(zip(told(), (5 * BLOCK, 2 * BLOCK, 3 * BLOCK), strict=True))
    wait_for(lambda: told() == expected, "the node's numbers")
    real.close()


def test_a_slot_reused_between_lookup_and_load_is_a_failed_load_that_says_evicted(
    node: NodeProcess,
) -> None:
    real = Real(node)
    request = prompt(2)
    real.save(request)
    assert real.match(request) == 2 * BLOCK
    real.core.allocated(request, lambda: (list(range(101, 110)),), 2 * BLOCK)
    (job,) = real.core.plan_step([], [], lambda _: None).loads
    pressure(node)
    assert real.session.view(job.blocks[0].found[0]) is None, "so a worker reports it as failed"
    real.core.report(WorkerReport(failed_blocks={job.job_id: 0}))
    real.core.loads_ended([request.request_id])
    missing = real.explain(request, MissReason.LOAD_FAILED)
    assert missing.block == 0
    wait_for(
        lambda: "evicted it" in real.explain(request, MissReason.LOAD_FAILED).detail,
        "the node's word",
    )
    real.close()


def test_the_same_prompt_of_an_engine_with_another_dtype_names_the_field(
    node: NodeProcess,
) -> None:
    other, real = Real(node, dtype="float16"), Real(node, dtype="bfloat16")
    request = prompt(2)
    other.save(request)
    assert real.match(request) == 0
    missing = real.explain(request, MissReason.DIFFERENT_FINGERPRINT)
    assert "the same tokens are there under other fields" in missing.detail
    assert [d.field for d in missing.differing_fields] == ["dtype"]
    other.close()
    real.close()


def test_a_killed_node_is_told(node: NodeProcess) -> None:
    real = Real(node)
    request = prompt(2)
    real.save(request)
    node.kill()
    wait_for(lambda: real.match(request) == 0, "the node's end to be seen")
    missing = real.explain(request, MissReason.NODE_DEAD)
    assert "which had it" in missing.detail
    real.close()
