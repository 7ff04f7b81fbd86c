"""Schedulers in lock step: one decides, all do the same, and what differs is said by all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
from connector_parts import BLOCK, PATIENCE_S, FakePins, FakeRequest, Side, layout, prompt, wait_for

from connector.layout.topology import TpKVTopology
from connector.messages import BlockRead, SaveBlock, SaveJob, StepPlan, WorkerReport
from connector.scheduler.lockstep import LockstepScheduler, _save_job
from connector.scheduler.patience import ComputeRate
from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

SIZE = 2
TWO = TpKVTopology.of(SIZE, 1, 2 * SIZE)


class Room:
    """`Exchange` among threads."""

    def __init__(self) -> None:
        self._said: list[bytes] = [b""] * SIZE
        self._barrier = threading.Barrier(SIZE, timeout=PATIENCE_S)

    def say(self, place: int, said: Any) -> list[Any]:
        self._said[place] = msgpack.packb(said)
        self._barrier.wait()
        heard = [msgpack.unpackb(one, strict_map_key=False) for one in self._said]
        self._barrier.wait()
        return heard


class Seat:
    def __init__(self, room: Room, place: int) -> None:
        self._room, self._place = room, place

    @property
    def leads(self) -> bool:
        return self._place == 0

    def __call__(self, said: Any) -> list[Any]:
        return self._room.say(self._place, said)


class Engines:
    """Two schedulers, each called by a thread of its own, over one store."""

    def __init__(self, store: MemoryBlockStore) -> None:
        self.led = Side(store, topology=TWO)
        self._threads = ThreadPoolExecutor(SIZE)
        room = Room()
        self.pins = [FakePins() for _ in range(SIZE)]
        self.sides = self.all(
            lambda i: LockstepScheduler(Seat(room, i), layout(TWO), lambda: self.led.core)
        )
        self.all(lambda i: self.sides[i].bind_pins(self.pins[i], SIZE, 1000))

    def all(self, call: Callable[[int], Any]) -> list[Any]:
        """What `call` gives for each place, run at once; an exception is an answer too."""
        tasks = [self._threads.submit(call, place) for place in range(SIZE)]
        return [task.exception() or task.result() for task in tasks]

    def match(self, requests: Sequence[FakeRequest]) -> list[int]:
        answers: list[Any] = []

        def asked() -> bool:
            answers[:] = self.all(lambda i: self.sides[i].match(requests[i], 0))
            self.step([[], []])
            return answers[0] is not None

        wait_for(asked, "an answer")
        return answers

    def step(
        self,
        scheduled: Sequence[Sequence[tuple[FakeRequest, int]]],
        tables: Sequence[list[int]] = ([], []),
    ) -> list[StepPlan]:
        return self.all(lambda i: self.sides[i].plan_step(scheduled[i], [], lambda _: (tables[i],)))

    def close(self) -> None:
        self.all(lambda i: self.sides[i].close())
        self._threads.shutdown()


@pytest.fixture
def engines(store: MemoryBlockStore) -> Iterator[Engines]:
    engines = Engines(store)
    yield engines
    engines.close()


def named(blocks: int, seed: int = 0) -> list[FakeRequest]:
    """One request as each process calls it."""
    made = [prompt(blocks, seed=seed) for _ in range(SIZE)]
    for place, request in enumerate(made):
        request.request_id += f"-{place}"
    return made


TABLE = list(range(1, 20))


def saved(engines: Engines, requests: Sequence[FakeRequest]) -> list[StepPlan]:
    return engines.step([[(one, one.num_tokens)] for one in requests], [TABLE, TABLE])


def test_all_plan_what_the_leader_plans_under_their_own_names(engines: Engines) -> None:
    requests = named(2)
    assert engines.match(requests) == [0, 0]
    ours, theirs = saved(engines, requests)
    assert [job.request_id for job in ours.saves] == [requests[0].request_id]
    assert [job.request_id for job in theirs.saves] == [requests[1].request_id]
    assert [j._replace(request_id="") for j in ours.saves] == [
        j._replace(request_id="") for j in theirs.saves
    ]
    assert engines.pins[0].references == engines.pins[1].references != {}


def test_a_save_travels_whole() -> None:
    runs = (((b"a", b"b"),), ((),))
    job = SaveJob(3, "r", (SaveBlock((b"c",), (1, 2), 1, 4),), runs, "trace", (((),), ((b"d",),)))
    message = msgpack.unpackb(msgpack.packb(job))
    assert _save_job(message, {"r": "own"}) == job._replace(request_id="own")


def test_blocks_stay_pinned_everywhere_until_the_workers_of_all_processes_have_let_go(
    engines: Engines,
) -> None:
    requests = named(2)
    (job,) = saved(engines, requests)[0].saves
    for place in range(SIZE):
        assert [side.has_pending_work() for side in engines.sides] == [True] * SIZE
        assert engines.pins[0].references == engines.pins[1].references != {}
        engines.sides[place].report(WorkerReport(ended_saves={job.job_id: 1}))
        engines.step([[], []])
    assert [side.has_pending_work() for side in engines.sides] == [False] * SIZE
    assert [pins.references for pins in engines.pins] == [{}, {}]


def test_saves_are_settled_between_steps_when_all_ask(engines: Engines) -> None:
    (job,) = saved(engines, named(2))[0].saves
    for side in engines.sides:
        side.report(WorkerReport(ended_saves={job.job_id: 1}))
    engines.all(lambda i: engines.sides[i].settle())
    assert [pins.references for pins in engines.pins] == [{}, {}]


def loading(engines: Engines, store: MemoryBlockStore, requests: list[FakeRequest]) -> int:
    """Plan the load of two blocks; its number."""
    for group in layout(TWO).groups:
        for namespace in group.namespaces:
            keys = namespace.engine_keys(requests[0].block_hashes, BLOCK // 4)
            store.commit([r for r in store.reserve(keys, 8, namespace.id) if r])  # type: ignore[misc]
    offered = engines.match(requests)
    assert offered == [2 * BLOCK] * SIZE, "a follower's own store is not asked"
    engines.all(lambda i: engines.sides[i].allocated(requests[i], lambda: (TABLE,), offered[i]))
    plans = engines.step([[], []])
    (ours,), (theirs,) = (plan.loads for plan in plans)
    assert (ours.request_id, theirs.request_id) == tuple(one.request_id for one in requests)
    assert ours._replace(request_id="") == theirs._replace(request_id="")
    return ours.job_id


def test_a_load_has_ended_in_all_processes_at_once_when_the_last_worker_says_so(
    engines: Engines, store: MemoryBlockStore
) -> None:
    requests = named(2)
    loading(engines, store, requests)
    engines.sides[1].report(WorkerReport(finished_loads={requests[1].request_id}))
    told = [plan.reported for plan in engines.step([[], []])]
    assert [report.finished_loads for report in told if report] == [set(), set()]
    engines.sides[0].report(WorkerReport(finished_loads={requests[0].request_id}))
    told = [plan.reported for plan in engines.step([[], []])]
    assert [report.finished_loads for report in told if report] == [
        {one.request_id} for one in requests
    ]


def test_all_know_how_long_a_load_may_take_and_the_leader_what_all_have_read(
    engines: Engines, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ComputeRate, "tokens_per_s", 4.0 * BLOCK)
    requests = named(2)
    loading(engines, store, requests)  # the same job in both
    read = BlockRead("other_host:1", 1, 1.0)
    engines.sides[1].report(WorkerReport(reads=[read]))
    told = [plan.reported for plan in engines.step([[], []])]
    assert [report.reads for report in told if report] == [[read]] * SIZE


def test_a_load_that_is_given_up_has_ended_when_it_has_in_all_processes(
    engines: Engines, store: MemoryBlockStore
) -> None:
    requests = named(2)
    loading(engines, store, requests)
    under_way = engines.all(lambda i: engines.sides[i].loads_under_way)
    assert [list(one) for one in under_way] == [[one.request_id] for one in requests]
    ended = [set(one.values()) for one in under_way]
    assert engines.all(lambda i: engines.sides[i].agreed(ended[i])) == ended
    assert engines.all(lambda i: engines.sides[i].agreed(ended[i] if i else set())) == [set()] * 2


@pytest.mark.parametrize("place", range(SIZE))
def test_a_load_that_failed_in_one_process_has_failed_in_all(
    engines: Engines, store: MemoryBlockStore, place: int
) -> None:
    requests = named(2)
    job_id = loading(engines, store, requests)
    for i, side in enumerate(engines.sides):
        name = requests[i].request_id
        bad = WorkerReport(
            failed_requests={name}, invalid_block_ids={3, 4}, failed_blocks={job_id: 1}
        )
        side.report(
            WorkerReport(finished_loads={name}).merge(bad if i == place else WorkerReport())
        )
    told = [plan.reported for plan in engines.step([[], []])]
    assert [report.invalid_block_ids for report in told if report] == [{3, 4}] * SIZE
    assert [report.failed_requests for report in told if report] == [
        {one.request_id} for one in requests
    ]
    engines.all(lambda i: engines.sides[i].loads_ended([requests[i].request_id]))
    assert engines.match(requests) == [BLOCK] * SIZE, "what could not be loaded is offered no more"


def differing(engines: Engines) -> dict[str, Callable[[], list[Any]]]:
    one, other = named(2), named(2, seed=5)
    longer = [named(2)[0], FakeRequest("r", [*named(2)[1].tokens, 7])]
    computed = named(2)
    computed[1].num_computed_tokens = 4
    sides = engines.sides

    def scheduled(requests: list[FakeRequest]) -> list[Any]:
        return [[(request, request.num_tokens)] for request in requests]

    def allocated() -> list[Any]:
        engines.all(lambda i: sides[i].allocated(one[i], lambda: ([i, 2],), BLOCK))
        return engines.step([[], []])

    return {
        "prompts": lambda: engines.all(lambda i: sides[i].match([one[0], other[1]][i], 0)),
        "lengths": lambda: engines.all(lambda i: sides[i].match(longer[i], 0)),
        "computed tokens": lambda: engines.all(lambda i: sides[i].match(one[i], i)),
        "steps": lambda: engines.step([scheduled(one)[0], []], [TABLE, TABLE]),
        "tokens of a step": lambda: engines.step(scheduled([one[0], other[1]]), [TABLE, TABLE]),
        "starts": lambda: engines.step(scheduled(computed), [TABLE, TABLE]),
        "blocks": lambda: engines.step(scheduled(one), [TABLE, TABLE[::-1]]),
        "blocks to load into": allocated,
        "calls": lambda: engines.all(
            lambda i: sides[0].match(one[0], 0) if i == 0 else sides[1].settle()
        ),
        "pools": lambda: engines.all(lambda i: sides[i].bind_pins(FakePins(), SIZE, 100 + i)),
    }


@pytest.mark.parametrize("what", list(differing(type("E", (), {"sides": []}))))  # type: ignore[arg-type]
def test_trap_processes_that_part_are_told_by_all_of_them(engines: Engines, what: str) -> None:
    answers = differing(engines)[what]()
    assert [type(answer) for answer in answers] == [UsageError] * SIZE
    assert ["all processes must be given the same" in str(answer) for answer in answers] == [
        True
    ] * SIZE
    assert [pins.references for pins in engines.pins][1] == {}, "a follower has started nothing"


def test_trap_processes_with_other_namespaces_do_not_start(store: MemoryBlockStore) -> None:
    room, cores = Room(), []
    with ThreadPoolExecutor(SIZE) as threads:
        tasks = [
            threads.submit(
                LockstepScheduler, Seat(room, i), layout(TWO, weights=f"w{i}"), cores.clear
            )
            for i in range(SIZE)
        ]
        for task in tasks:
            with pytest.raises(UsageError, match="weights_id"):
                task.result()


def test_all_know_one_name_of_their_engine(engines: Engines) -> None:
    assert len({side.engine_id for side in engines.sides}) == 1
