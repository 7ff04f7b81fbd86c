"""Suite `layerwise` measures which part of loads and saves a forward hides, layer by layer."""

from __future__ import annotations

import os
import random
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.processes import House, house
from benchmarks.report import Row, machine, median, spread
from connector.build import EngineShape
from connector.layout.geometry import KVGeometry
from connector.layout.topology import TpKVTopology
from connector.messages import LoadBlock, LoadJob, SaveBlock, SaveJob
from connector.scheduler.lazy_store import LazyStore
from connector.settings import ConnectorSettings
from connector.worker.layerwise_worker import LayerwiseWorker
from connector.worker.worker import WorkerCore
from kvstore.spi import BlockSession

LAYERS, HEADS, HEAD_SIZE = 32, 8, 128
ENGINE_BLOCK, BLOCK_TOKENS = 16, 64
PER_KEY = BLOCK_TOKENS // ENGINE_BLOCK
TOKENS = 2048
"""Of one prompt: 256 MiB of KV in bf16."""
NODE_BYTES = 2 << 30
REPETITIONS = 15
COMPUTE = (1.0, 2.0, 4.0)
"""Time of the forward over that of the transfer alone."""
MATRIX = 256
WARM = 5
"""Prompts that touch the KV blocks of both engines once."""
WAIT_S = 60.0

SHAPE = EngineShape.of_one_group(
    KVGeometry(
        layers=LAYERS,
        heads=HEADS,
        channel_bytes=2 * HEAD_SIZE * 2,
        engine_block_tokens=ENGINE_BLOCK,
    ),
    TpKVTopology.of(),
    {"model": "benchmark"},
)
LAYOUT = SHAPE.layout(ConnectorSettings(block_tokens=BLOCK_TOKENS, tp_sizes=[]))
NAMES = [f"layer{i}" for i in range(LAYERS)]
Timed = Callable[[], float]
"""Does one thing and returns the seconds that count."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="at least 5")
    parser.add_argument("--compute", type=float, nargs="+", default=COMPUTE)
    parser.add_argument("--vllm", action="store_true", help="real engines too: some minutes more")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    if find_spec("torch") is None:
        raise SystemExit("torch is not installed here (scripts/setup says why)")
    with house(NODE_BYTES) as here:
        about = machine(here.url)
        rows = _neutral(here, options)
    if options.vllm:
        rows += _vllm(options.repetitions)
    return about, rows


class Engine:
    """Holds a worker's KV, a forward of matrix products over it, and both kinds of worker side."""

    def __init__(self, here: House) -> None:
        import torch as untyped_torch

        torch: Any = untyped_torch
        self._torch = torch
        torch.set_num_threads(1)  # one core computes, another one copies
        self.blocks = TOKENS // ENGINE_BLOCK
        shape = (LAYERS, 2 * self.blocks, HEADS, ENGINE_BLOCK, 2 * HEAD_SIZE)
        self.kv = torch.randint(-30000, 30000, shape, dtype=torch.int16)
        """In the first half what is saved, in the second what is loaded."""
        self._x = torch.randn(MATRIX, MATRIX)
        self._w = torch.randn(MATRIX, MATRIX) / MATRIX**0.5
        self.products = 1
        """Of one layer."""
        self.store = BlockSession(here.url, run_dir=here.run_dir)
        self.whole, self.layerwise = (self._worker(kind) for kind in (WorkerCore, LayerwiseWorker))
        self._jobs = 0

    def _worker(self, kind: type[WorkerCore]) -> WorkerCore:
        worker = kind(
            LazyStore(lambda: BlockSession(self.store.url, run_dir=self.store.run_dir)),
            LAYOUT,
            rank=0,
            saves=True,
            load_timeout_s=WAIT_S,
            save_timeout_s=WAIT_S,
        )
        worker.register_kv_caches({name: self.kv[i] for i, name in enumerate(NAMES)})
        return worker

    def layer(self) -> None:
        for _ in range(self.products):
            self._x = self._x @ self._w

    def computes_for(self, seconds: float) -> None:
        """Have a forward of all layers take about so long."""
        self.products = 1
        one_s = min(_timed(self.forward) for _ in range(5))
        self.products = max(1, round(seconds / one_s))
        self._x = self._torch.randn(MATRIX, MATRIX)

    def forward(self) -> None:
        for _ in NAMES:
            self.layer()

    # Loads: seconds until the forward is done

    def load_job(self, keys: Sequence[bytes]) -> LoadJob:
        found = self.store.match(keys)
        if len(found) != len(keys):
            raise AssertionError(f"{len(found)} of {len(keys)} blocks are in the store")
        self._jobs += 1
        self.kv[:, self.blocks :] = 0
        blocks = (LoadBlock((f,), 0, self._ids(i, self.blocks)) for i, f in enumerate(found))
        return LoadJob(self._jobs, f"r{self._jobs}", tuple(blocks))

    def loaded(self) -> None:
        """Check that the bytes are right, outside of the time that counts."""
        if not self._torch.equal(self.kv[:, self.blocks :], self.kv[:, : self.blocks]):
            raise AssertionError("a load gave other bytes")

    def load_whole(self, job: LoadJob) -> None:
        self.whole.start_loads([job])
        report = self.whole.poll(WAIT_S)
        if report.invalid_block_ids or not report.finished_loads:
            raise AssertionError("a load failed")

    def load_before(self, job: LoadJob) -> None:
        self.load_whole(job)
        self.forward()

    def load_by_layers(self, job: LoadJob, *, compute: bool = True) -> None:
        self.layerwise.start_loads([job])
        for name in NAMES:
            self.layerwise.wait_layer_load(name)
            if compute:
                self.layer()
        if self.layerwise.poll().invalid_block_ids:
            raise AssertionError("a load failed")

    # Saves: seconds from the start of the forward until all is published

    def save_job(self) -> SaveJob:
        self.store.clear(LAYOUT.groups[0].namespaces[0].id)
        self._jobs += 1
        count = TOKENS // BLOCK_TOKENS
        blocks = (SaveBlock((os.urandom(32),), self._ids(i, 0)) for i in range(count))
        return SaveJob(self._jobs, f"r{self._jobs}", tuple(blocks))

    def save_whole(self, job: SaveJob) -> None:
        self.whole.start_saves([job])
        self._saved(self.whole)

    def save_after(self, job: SaveJob) -> None:
        self.forward()
        self.save_whole(job)

    def save_by_layers(self, job: SaveJob, *, compute: bool = True) -> None:
        jobs = [job]
        for name in NAMES:
            if compute:
                self.layer()
            self.layerwise.layer_written(name, jobs)
        self.layerwise.start_saves(jobs)
        self._saved(self.layerwise)

    def _saved(self, worker: WorkerCore) -> None:
        if not worker.poll(WAIT_S).ended_saves:
            raise AssertionError("a save did not end")

    def published(self, job: SaveJob) -> None:
        if len(self.store.match([block.keys[0] for block in job.blocks])) != len(job.blocks):
            raise AssertionError("a save is not in the store")

    @staticmethod
    def _ids(block: int, first: int) -> tuple[int, ...]:
        return tuple(range(first + block * PER_KEY, first + (block + 1) * PER_KEY))

    def close(self) -> None:
        self.whole.close()
        self.layerwise.close()
        self.store.close()


def _timed(act: Callable[[], None]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _neutral(here: House, options: Namespace) -> list[Row]:
    engine = Engine(here)
    try:
        return [
            kind(engine, compute, options.repetitions)
            for kind in (_loads, _saves)
            for compute in options.compute
        ]
    finally:
        engine.close()


def _loads(engine: Engine, compute: float, repetitions: int) -> Row:
    job = engine.save_job()
    engine.save_whole(job)
    keys = [block.keys[0] for block in job.blocks]

    def one(act: Callable[[LoadJob], None]) -> Timed:
        def timed() -> float:
            load = engine.load_job(keys)
            took_s = _timed(lambda: act(load))
            engine.loaded()
            return took_s

        return timed

    cases = {
        "transfer": one(engine.load_whole),
        "transfer_by_layers": one(partial(engine.load_by_layers, compute=False)),
        "whole": one(engine.load_before),
        "by_layers": one(engine.load_by_layers),
    }
    return _row("load", engine, compute, repetitions, cases)


def _saves(engine: Engine, compute: float, repetitions: int) -> Row:
    def one(act: Callable[[SaveJob], None]) -> Timed:
        def timed() -> float:
            save = engine.save_job()
            took_s = _timed(lambda: act(save))
            engine.published(save)
            return took_s

        return timed

    cases = {
        "transfer": one(engine.save_whole),
        "transfer_by_layers": one(partial(engine.save_by_layers, compute=False)),
        "whole": one(engine.save_after),
        "by_layers": one(engine.save_by_layers),
    }
    return _row("save", engine, compute, repetitions, cases)


def _row(
    name: str, engine: Engine, compute: float, repetitions: int, cases: dict[str, Timed]
) -> Row:
    """Measure all cases in turns; what is hidden is taken per repetition."""
    for timed in cases.values():  # pages of first use
        timed()
    engine.computes_for(compute * median([cases["transfer"]() for _ in range(5)]))
    cases = {"forward": lambda: _timed(engine.forward), **cases}
    took: dict[str, list[float]] = {case: [] for case in cases}
    for repetition in range(repetitions):
        for case in cases if repetition % 2 else reversed(cases):
            took[case].append(cases[case]())
    hidden = [
        (whole_s - by_layers_s) / transfer_s
        for whole_s, by_layers_s, transfer_s in zip(
            took["whole"], took["by_layers"], took["transfer"], strict=True
        )
    ]
    return {
        "case": name,
        **{f"{case}_ms": round(median(times) * 1e3, 1) for case, times in took.items()},
        "hidden": round(median(hidden), 2),
        "spread": round(spread(took["by_layers"]), 2),
        "mib": SHAPE.groups[0].geometry.token_bytes * TOKENS >> 20,
        "repetitions": repetitions,
    }


def _vllm(repetitions: int) -> list[Row]:
    """Measure real engines with and without, each in turn the producer and the reader of a
    prompt."""
    if find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed here (scripts/setup says why)")
    from engines import EngineProcess, EngineSettings, ModelShape, build_model, kv_transfer

    shape = ModelShape(layers=16, hidden=768, heads=12, kv_heads=4, vocabulary=8192)
    with house(NODE_BYTES) as here, tempfile.TemporaryDirectory(prefix="kvb-model-") as where:
        model = build_model(Path(where), shape)

        def engine(layerwise: bool) -> EngineProcess:
            transfer = kv_transfer(
                url=here.url,
                run_dir=str(here.run_dir),
                block_tokens=BLOCK_TOKENS,
                lookup_timeout_s=2.0,
                load_timeout_s=WAIT_S,
                layerwise=layerwise,
            )
            settings = EngineSettings(
                connector=transfer,
                kv_blocks=600,
                max_batched_tokens=4096,
                extra={"async_scheduling": False},  # the same for both
            )
            return EngineProcess(
                model, settings, log=Path(where) / f"engine{layerwise}.log", fresh=True
            )

        with engine(False) as off, engine(True) as on:
            return _engine_rows({"between steps": off, "by layers": on}, repetitions)


def _engine_rows(engines: dict[str, Any], repetitions: int) -> list[Row]:
    source = random.Random(1)
    took: dict[tuple[str, str], list[float]] = {}

    def ttft_s(name: str, prompt: list[int], cached: int) -> tuple[float, list[int]]:
        done = engines[name].generate([prompt], max_tokens=2)[0]
        if done.cached_tokens != cached:
            raise AssertionError(f"{done.cached_tokens} tokens cached instead of {cached}")
        return float(done.ttft_s), done.tokens

    for repetition in range(WARM + repetitions):
        for producer in engines:
            prompt = [source.randrange(2, 8000) for _ in range(TOKENS + 2)]
            times = {("compute and save", producer): ttft_s(producer, prompt, 0)}
            engines[producer].drain()
            time.sleep(0.2)  # the last blocks are published
            engines[producer].call("reset", connector=False)
            for reader in engines:
                times["load", reader] = ttft_s(reader, prompt, TOKENS)
            if len({tuple(tokens) for _, tokens in times.values()}) != 1:
                raise AssertionError("other tokens than those of the producer")
            for case, (first_token_s, _) in times.items() if repetition >= WARM else ():
                took.setdefault(case, []).append(first_token_s)
    return [
        {
            "case": f"vLLM TTFT: {case}",
            "whole_ms": round(median(took[case, "between steps"]) * 1e3, 1),
            "by_layers_ms": round(median(took[case, "by layers"]) * 1e3, 1),
            "spread": round(spread(took[case, "by layers"]), 2),
            "repetitions": len(took[case, "by layers"]),
        }
        for case in ("compute and save", "load")
    ]
