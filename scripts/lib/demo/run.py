"""Has two producers and two consumers share KV through Redis and shared memory: the main job.

    round 1     the producers compute the prompts, half each, and save the KV; meanwhile an engine
                without a store answers every prompt: what is right, and how long that takes
    round 2     each consumer is sent all of them and loads the KV
    round 3     the same again, and the memory node is killed in the middle

Exit status 0 only if every answer equals the reference and every possible block
was loaded in round 2. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from engine_template import prepare
from engines import (
    EngineProcess,
    EngineSettings,
    Generated,
    ModelShape,
    build_model,
    environment_of,
    kv_transfer,
)
from progress import Steps, steps
from rich.console import Console
from services import Service, node_command, node_up

from demo.report import Row, draw, show_table
from kvstore import Client, Limits

PREFIX_TOKENS = 2048
TAIL_TOKENS = 2
"""Computed by every engine in a step of its own, so that all run the same kernels on the same
shapes: what differs between answers is then the KV and nothing else."""
PROMPTS = 8
NEW_TOKENS = 8
NODE_BYTES = 1 << 30
LOOKUP_TIMEOUT_S = 2.0
PATIENT = {
    "lookup_timeout_s": LOOKUP_TIMEOUT_S,
    "save_timeout_s": 30.0,
    "load_timeout_s": 30.0,
    "limits": {"request_timeout_s": 10.0},
}
"""Far above the defaults: five engines on two cores may keep Redis and the node waiting, and here
every possible block must be saved and loaded."""
SAVE_TIMEOUT_S = 30.0
SAVE_POLL_S = 0.5
MODEL = ModelShape(
    layers=8, hidden=512, heads=8, kv_heads=4, vocabulary=4096, context_tokens=PREFIX_TOKENS * 2
)
LIB = Path(__file__).parents[1]
CORES = {"reference": 0, "producer 1": 1, "producer 2": 2, "consumer 1": 0, "consumer 2": 1}
"""On two cores the reference has one, as long as both producers, who compute half as much, have the
other."""


class Demo:
    """Owns the processes; `close` ends them whatever happened."""

    def __init__(self, out: Path, engine: bool, console: Console) -> None:
        self.out = out
        self.engine = engine
        self.console = console
        self.run_dir = Path(tempfile.mkdtemp(prefix="kvd-"))
        self.node: Service | None = None
        self.engines: dict[str, EngineProcess] = {}
        rng = random.Random(20)
        self.prompts = [
            [rng.randrange(2, MODEL.vocabulary) for _ in range(PREFIX_TOKENS + TAIL_TOKENS)]
            for _ in range(PROMPTS)
        ]

    def start(self, progress: Steps) -> None:
        task = progress.add("starting the node and five engines", 6)
        model = self.out / "model"
        if self.engine:
            # Of a fresh environment nothing is compiled: that is most of the first start.
            prepare(sys.executable, environment_of(EngineSettings()))
        self.start_node()
        progress.advance(task)
        if self.engine:
            build_model(model, MODEL)
        roles = {
            "reference": None,
            "producer 1": "kv_producer",
            "producer 2": "kv_producer",
            "consumer 1": "kv_consumer",
            "consumer 2": "kv_consumer",
        }
        cores = sorted(os.sched_getaffinity(0))

        def launch(name: str, role: str | None) -> None:
            settings = EngineSettings(
                connector=(
                    kv_transfer(role, run_dir=str(self.run_dir), **PATIENT) if role else None
                ),
                max_model_len=PREFIX_TOKENS + 64,
                max_batched_tokens=PREFIX_TOKENS,
                kv_blocks=2 * (PREFIX_TOKENS // 32) + 16,
                prefix_caching=False,
                cpus=str(cores[min(CORES[name], len(cores) - 1)]),
            )
            program = LIB / ("engines.py" if self.engine else "synthetic.py")
            log = self.out / f"{name.replace(' ', '-')}.log"
            self.engines[name] = EngineProcess(model, settings, log, program, fresh=not self.engine)
            progress.advance(task)

        with ThreadPoolExecutor(len(roles)) as pool:
            jobs = [pool.submit(launch, *role) for role in roles.items()]
            for job in jobs:
                job.result()

    def start_node(self) -> None:
        parent = "--end-with-parent", str(os.getpid())
        command = node_command(self.run_dir, NODE_BYTES, "--name", "demo", *parent)
        self.node = Service(command, self.out / "node.log").wait(node_up(self.run_dir, "demo"))

    def kill_node(self) -> None:
        assert self.node is not None
        self.node.end(signal.SIGKILL)

    def ask(
        self,
        work: Mapping[str, Sequence[int]],
        progress: Steps,
        title: str,
        after: Callable[[], None] = lambda: None,
    ) -> dict[str, dict[int, Generated]]:
        """Send prompts to engines, one at a time to each, engines side by side."""
        task = progress.add(title, sum(map(len, work.values())))
        answers: dict[str, dict[int, Generated]] = {name: {} for name in work}

        def feed(name: str) -> None:
            for i in work[name]:
                answers[name][i] = self.engines[name].generate([self.prompts[i]], NEW_TOKENS)[0]
                progress.advance(task)
                after()

        with ThreadPoolExecutor(len(work)) as pool:
            for job in [pool.submit(feed, name) for name in work]:
                job.result()
        return answers

    def wait_for_saves(self) -> None:
        """Return when the store has stopped growing: saving goes on behind the answers."""
        patient = Limits(redis_timeout_s=LOOKUP_TIMEOUT_S)
        with Client(run_dir=self.run_dir, limits=patient) as client:
            give_up_at = time.monotonic() + SAVE_TIMEOUT_S
            stored = -1
            while time.monotonic() < give_up_at:
                node = client.stats()["node"]
                busy = node.get("reserved", 1) or node.get("unpublished", 1)
                if not busy and node["blocks"] == stored:
                    return
                stored = int(node.get("blocks", -1))
                time.sleep(SAVE_POLL_S)
        self.console.print(f"[yellow]saves were still going on after {SAVE_TIMEOUT_S:.0f} s")

    def close_engines(self, *names: str) -> None:
        with ThreadPoolExecutor(len(names) or 1) as pool:
            list(pool.map(lambda name: self.engines.pop(name).close(), names))

    def close(self) -> None:
        self.close_engines(*self.engines)
        if self.node is not None:
            self.node.close()


def run(demo: Demo, progress: Steps) -> tuple[list[Row], dict[str, object]]:
    """Run all rounds; return the rows of the table and the summary."""
    demo.start(progress)
    everything = range(PROMPTS)
    half = PROMPTS // 2
    made = demo.ask(
        {
            "reference": everything,
            "producer 1": everything[:half],
            "producer 2": everything[half:],
        },
        progress,
        "round 1: producers compute and save",
    )
    right = made["reference"]
    computed = {**made["producer 1"], **made["producer 2"]}
    demo.wait_for_saves()
    demo.close_engines("reference", "producer 1", "producer 2")
    consumers = {"consumer 1": everything, "consumer 2": everything}
    loaded = demo.ask(consumers, progress, "round 2: consumers load")

    answered = 0

    def kill_in_the_middle() -> None:
        nonlocal answered
        answered += 1
        if answered == PROMPTS:
            demo.kill_node()
            demo.console.print("[red]the memory node was killed (SIGKILL)")

    last = demo.ask(consumers, progress, "round 3: the node is killed", kill_in_the_middle)

    def same(answers: dict[int, Generated]) -> int:
        return sum(answers[i].tokens == right[i].tokens for i in answers)

    rows = [
        Row(
            i,
            right[i].ttft_s * 1e3,
            statistics.median(loaded[c][i].ttft_s for c in consumers) * 1e3,
            sum(loaded[c][i].cached_tokens for c in consumers),
            all(
                a.tokens == right[i].tokens for a in (computed[i], *(loaded[c][i] for c in loaded))
            ),
        )
        for i in everything
    ]
    summary: dict[str, object] = {
        "requests": 2 * PROMPTS,
        "identical": sum(map(same, loaded.values())),
        "tokens_possible": 2 * PROMPTS * PREFIX_TOKENS,
        "tokens_loaded": sum(a.cached_tokens for c in loaded.values() for a in c.values()),
        "ttft_computed_ms": round(statistics.median(row.computed_ms for row in rows), 1),
        "ttft_loaded_ms": round(statistics.median(row.loaded_ms for row in rows), 1),
        "after_node_kill": {
            "requests": 2 * PROMPTS,
            "answered": sum(map(len, last.values())),
            "identical": sum(map(same, last.values())),
        },
    }
    return rows, summary


def passed(rows: list[Row], summary: dict[str, object]) -> bool:
    after = summary["after_node_kill"]
    assert isinstance(after, dict)
    return (
        all(row.identical for row in rows)
        and summary["identical"] == summary["requests"]
        and summary["tokens_loaded"] == summary["tokens_possible"]
        and after["answered"] == after["identical"] == after["requests"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--no-engine", action="store_true", help="synthetic blocks, no vLLM")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="logs and the picture")
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    parser.add_argument("--downloads-s", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    console = Console(stderr=True)
    if not options.no_engine and find_spec("vllm") is None:
        console.print(
            "vLLM is not installed here (scripts/setup says why).\n"
            "`scripts/demo --no-engine` does the same with synthetic blocks."
        )
        return 2
    if options.no_engine:
        console.print(
            "[yellow]no engine: blocks are synthetic, computed by hashing, not by a model"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    demo = Demo(options.out, not options.no_engine, console)
    try:
        with steps(console) as progress:
            rows, summary = run(demo, progress)
    finally:
        demo.close()
    show_table(console, rows)
    picture = draw(rows, summary, options.out / "demo.png")
    console.print(f"picture: {picture}, logs: {options.out}")
    took_s = time.time() - options.began - options.downloads_s
    console.print(f"took {took_s:.0f} s, and {options.downloads_s:.0f} s of downloads")
    summary["seconds"], summary["seconds_of_downloads"] = round(took_s), options.downloads_s
    print(json.dumps(summary))
    return 0 if passed(rows, summary) else 1


if __name__ == "__main__":
    sys.exit(main())
