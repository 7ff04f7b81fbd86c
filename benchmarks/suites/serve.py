"""Suite `serve` replays agents' sessions against two vLLM engines: no store, ours, others'."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.processes import lone_redis
from benchmarks.report import Row, machine
from benchmarks.serving import peers_venv, slow_disk
from benchmarks.serving.engines import BLOCK_TOKENS
from benchmarks.serving.family import become_subreaper
from benchmarks.serving.replay import ENGINES, Settings, Turn, about_versions, take_turn
from benchmarks.serving.report import (
    FLOOR,
    OURS,
    REFERENCE,
    Measured,
    into_document,
    markdown,
    rows,
)
from benchmarks.serving.scenarios import GIB, SCENARIOS, Scenario, quick
from benchmarks.serving.sessions import Load, Session, load_of, sessions
from benchmarks.serving.stores import CONNECTORS, MIB, VARIANTS

SEED = 7
DTYPE = "float32"
"""In which every answer is that of the engine without a store, or wrong: there rounding moves no
token but in a tie. It costs a tenth of the time here; without AVX-512 it is the quicker type."""
LIMIT_S = 420.0
STORE_STEP_BYTES = 32 * MIB
"""Both engines' parts of a peer's store are multiples of half of it."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarks.md"
LAYERS, KV_HEADS, HEAD_SIZE = 8, 2, 64


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--connector",
        action="append",
        choices=[*CONNECTORS],
        help="again for more",
    )
    parser.add_argument(
        "--scenario",
        action="append",
        choices=[*SCENARIOS, slow_disk.NAME],
        help=f"again for more; default: full. {slow_disk.NAME} is a table of its own, for root",
    )
    parser.add_argument("--turns", type=int, default=1, help="of each connector; 3 or more tell")
    parser.add_argument(
        "--sessions", type=Path, help="trace, a session a line; default: sessions from --seed"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of one replay")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default=DTYPE,
        help="in bfloat16 rounding counts as wrong (%(default)s)",
    )
    parser.add_argument(
        "--peers-venv", type=Path, default=peers_venv.DEFAULT, help="environment of the peers"
    )
    parser.add_argument("--install-peers", action="store_true", help="make it, and end")
    parser.add_argument("--out", type=Path, default=Path("out/serve"), help="logs and the table")
    parser.add_argument("--docs", action="store_true", help="put the table in docs/benchmarks.md")
    parser.add_argument("--quick", action="store_true", help="a minute: none, kvstore and floor")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Replay each scenario with each connector, in turns."""
    if options.install_peers:
        peers_venv.install(options.peers_venv.absolute())
        raise SystemExit(0)
    if find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed here (scripts/setup says why)")
    # The engines shall keep all cores busy that stores have, on a larger machine too.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:ENGINES])
    # Others' modules are compiled once, not in every process; and the store is our own.
    for name in ("PYTHONDONTWRITEBYTECODE", "KVSTORE_URL", "KVSTORE_RUN_DIR", "KVSTORE_CONFIG"):
        os.environ.pop(name, None)
    become_subreaper()
    # As Ctrl-C: what was started is ended first.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with lone_redis() as url:
        about = machine(url)
    dtype = options.dtype
    about |= {"date": datetime.now(UTC).date().isoformat(), "dtype": dtype}
    about["sessions"] = options.sessions.name if options.sessions else f"from seed {options.seed}"
    with tempfile.TemporaryDirectory(prefix="kvb-model-") as where:
        model = _model(Path(where))
        if slow_disk.NAME in (options.scenario or ()):
            out = options.out.absolute()
            return about, slow_disk.measure(model, dtype, out, options.turns, options.seed)
        bench = Bench(options, dtype, model)
        made: list[Row] = []
        for name in options.scenario or ["full"]:
            made += bench.measure(name)
    about |= about_versions(bench.all_turns)
    tables = markdown(about, made)
    (options.out / "table.md").write_text(tables)
    if options.docs:
        DOCUMENT.write_text(into_document(DOCUMENT.read_text(), tables))
    return about, made


def _model(where: Path) -> Path:
    from engines import ModelShape, build_model

    shape = ModelShape(
        layers=LAYERS,
        hidden=384,
        intermediate=1024,
        heads=384 // HEAD_SIZE,
        kv_heads=KV_HEADS,
        weights_std=0.06,
        vocabulary=4096,
        context_tokens=4096 + BLOCK_TOKENS,
    )
    return build_model(where, shape)


class Bench:
    """Takes the turns of every scenario, and keeps those of the engine without a store."""

    def __init__(self, options: Namespace, dtype: str, model: Path) -> None:
        self._options = options
        self._dtype = dtype
        self._model = model
        self._references: dict[tuple[object, ...], Turn] = {}
        self.all_turns: list[Turn] = []
        every = [name for name in CONNECTORS if name not in VARIANTS]
        quick = [REFERENCE, OURS, FLOOR] if options.quick else every
        self._connectors: list[str] = options.connector or quick

    def measure(self, name: str) -> list[Row]:
        """Return a scenario's rows; the reference takes a turn once for each load."""
        options = self._options
        scenario = SCENARIOS[name]
        if options.quick:
            scenario = quick(scenario)
        replayed = sessions(
            options.sessions,
            count=scenario.sessions,
            requests_max=scenario.requests_max,
            seed=options.seed,
        )
        load = load_of(replayed, BLOCK_TOKENS)
        self._say(
            f"{name}: {load.requests} requests, {load.prompt_tokens} prompt tokens, "
            f"{load.hit_possible:.4f} of them possible from a cache"
        )
        turns: dict[str, list[Turn]] = {connector: [] for connector in self._connectors}
        if REFERENCE in turns:
            turns[REFERENCE].append(self._reference(name, scenario, replayed))
        others = [connector for connector in self._connectors if connector != REFERENCE]
        for number in range(options.turns):
            for connector in others if number % 2 == 0 else reversed(others):
                size_bytes = _store_bytes(scenario, load, self._dtype)
                taken = self._turn(connector, name, scenario, replayed, size_bytes, number)
                turns[connector].append(taken)
        reference = self._references.get(scenario.load)
        return rows(Measured(name, turns, reference, load, self._dtype))

    def _reference(self, name: str, scenario: Scenario, replayed: list[Session]) -> Turn:
        if scenario.load not in self._references:
            alone = replace(scenario, killed=False)
            taken = self._turn(REFERENCE, name, alone, replayed, GIB, 0)
            self._references[scenario.load] = taken
        return self._references[scenario.load]

    def _turn(
        self,
        connector: str,
        name: str,
        scenario: Scenario,
        replayed: list[Session],
        size_bytes: int,
        number: int,
    ) -> Turn:
        settings = Settings(
            model=self._model,
            dtype=self._dtype,
            out=self._options.out.absolute() / f"{name}-{connector.replace('/', '-')}-{number + 1}",
            peers=self._options.peers_venv.absolute(),
            seed=self._options.seed,
            limit_s=self._options.limit_s,
        )
        taken = take_turn(connector, scenario, replayed, size_bytes, settings)
        self.all_turns.append(taken)
        failed = sum(answer.error is not None for answer in taken.answers.values())
        self._say(
            f"{name}, turn {number + 1}, {connector}: "
            + (taken.reason or f"{taken.wall_s:.1f} s, {failed} errors")
        )
        return taken

    def _say(self, line: str) -> None:
        print(f"bench serve: {line}", file=sys.stderr, flush=True)


def _store_bytes(scenario: Scenario, load: Load, dtype: str) -> int:
    if scenario.store_share is None:
        return GIB
    token_bytes = LAYERS * KV_HEADS * 2 * HEAD_SIZE * (2 if dtype == "bfloat16" else 4)
    wanted = load.distinct_tokens * token_bytes * scenario.store_share
    return -(-round(wanted) // STORE_STEP_BYTES) * STORE_STEP_BYTES
