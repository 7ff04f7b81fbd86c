"""Many hits at once share what they ask: the index is not asked, and nodes hear of all together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from connector_parts import PER_KEY, Worker, hashes_of, layout, save, wait_for

from connector.messages import LoadBlock, LoadJob, SaveBlock, SaveJob
from connector.scheduler.lazy_store import LazyStore
from connector.scheduler.lookup import Lookup, Lookups
from kvstore.client.nodes.control import ControlChannel
from kvstore.client.nodes.saving import host_writer
from kvstore.protocol.control import Op
from kvstore.spi import BlockSession

if TYPE_CHECKING:
    from stores import NodeProcess

pytest.importorskip("torch")
AT_ONCE = 32


def prompts() -> list[list[bytes]]:
    size = layout().block_tokens
    return [hashes_of([number * 1000 + i for i in range(size)]) for number in range(AT_ONCE)]


def saved(session: BlockSession) -> list[bytes]:
    """Save a block of each prompt; their keys."""
    (namespace,) = layout().groups[0].namespaces
    keys = [namespace.engine_keys(hashes, PER_KEY)[0] for hashes in prompts()]
    worker = Worker(session)
    save(worker, SaveJob(0, "s", tuple(SaveBlock((key,), (1, 2)) for key in keys)))
    worker.core.close()
    return keys


def test_32_hits_ask_the_index_nothing_and_nodes_at_most_once(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = saved(BlockSession(**node.client_options))  # closed with its worker
    # No time passes between two tellings, however slow the machine is.
    monkeypatch.setattr(host_writer, "TOUCH_EVERY_S", 3600.0)
    said: list[Op] = []
    for name in ("say_each", "request"):
        real = getattr(ControlChannel, name)

        def counted(channel: Any, op: Op, *rest: Any, real: Any = real, **more: Any) -> Any:
            said.append(op)
            return real(channel, op, *rest, **more)

        monkeypatch.setattr(ControlChannel, name, counted)
    asked: list[Sequence[bytes]] = []
    with closing(BlockSession(**node.client_options)) as looking:
        looking.match([bytes(32)])
        for name in ("match", "lookup"):
            monkeypatch.setattr(looking.index, name, lambda wanted: asked.append(wanted) or [])
        answers: list[Lookup] = []
        lookups = Lookups(
            LazyStore(lambda: looking), layout(), 5.0, warm_up=False, on_answer=answers.append
        )
        for hashes in prompts():
            assert lookups.submit(hashes) is not None
        wait_for(lambda: len(answers) == AT_ONCE, "all look-ups")
        lookups.close()
    assert [one.run for one in answers] == [1] * AT_ONCE
    assert asked == []
    worker = Worker(BlockSession(**node.client_options))
    (refs,) = zip(*(one.placement[0] for one in answers), strict=True)
    jobs = [
        LoadJob(i, f"q{i}", (LoadBlock(placed.found, 0, (1 + i % 8, 10 + i % 8)),))
        for i, placed in enumerate(refs)
        if placed is not None
    ]
    worker.core.start_loads(jobs)
    report = worker.until(lambda report: len(report.finished_loads) == AT_ONCE)
    assert (report.invalid_block_ids, report.failed_requests) == (set(), set())
    worker.core.close()
    assert len(keys) == AT_ONCE
    assert said.count(Op.TOUCH) <= 1, "the worker's first word; the rest is told together later"
    assert set(said) <= {Op.TOUCH}
