"""Runs one turn: starts a connector's store and engines, replays the sessions, ends everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.engines import Answer, ServingEngine, arguments
from benchmarks.serving.family import Family, descendants, end_all, remove_shm, shm_files_of
from benchmarks.serving.scenarios import Scenario
from benchmarks.serving.sessions import RESERVED_TOKENS, VOCABULARY, Request, Session
from benchmarks.serving.stores import CONNECTORS, Place, Store, StoreMissingError

ENGINES = 2
REQUEST_TIMEOUT_S = 180.0
SAMPLE_S = 0.5
WARM_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Holds what all turns share."""

    model: Path
    dtype: str
    out: Path
    peers: Path
    seed: int
    limit_s: float
    """Of one replay: what is not answered by then is an error."""


@dataclass(slots=True)
class Turn:
    """Holds what one turn of one connector gave; `reason` when it could not run."""

    connector: str
    reason: str | None = None
    wall_s: float = 0.0
    answers: dict[str, Answer] = field(default_factory=dict)
    engine_cpu_s: float = 0.0
    store_cpu_s: float = 0.0
    over: bool = True
    """Whether every request was answered before the limit."""
    versions: dict[str, str] = field(default_factory=dict)


def take_turn(
    connector: str, scenario: Scenario, sessions: Sequence[Session], size_bytes: int, s: Settings
) -> Turn:
    """Run a turn; whatever fails in it is its row's reason. Leaves no process and no file."""
    turn = Turn(connector)
    folder = s.out
    folder.mkdir(parents=True, exist_ok=True)
    store: Store | None = None
    files: set[str] = set()
    run_dir = Path(tempfile.mkdtemp(prefix="kvb-"))
    try:
        store = CONNECTORS[connector](
            Place(folder, run_dir, size_bytes, ENGINES, s.peers, sessions)
        )
        turn.versions["store"] = store.version
        asyncio.run(_run(turn, store, scenario, sessions, s, files))
    except (StoreMissingError, RuntimeError, OSError) as e:
        turn.reason = str(e)
    finally:
        with contextlib.suppress(Exception):
            if store is not None:
                store.close()
        files |= shm_files_of(*descendants())
        end_all(spared=())
        remove_shm(files)
        shutil.rmtree(run_dir, ignore_errors=True)
    (folder / "answers.json").write_text(
        json.dumps({name: asdict(a) | {"best": None} for name, a in turn.answers.items()})
    )
    return turn


async def _run(
    turn: Turn,
    store: Store,
    scenario: Scenario,
    sessions: Sequence[Session],
    s: Settings,
    files: set[str],
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    engines = [
        ServingEngine(
            store.python,
            arguments(s.model, dtype=s.dtype, kv_blocks=scenario.kv_blocks),
            store.connector,
            core=cores[number % len(cores)],
            env=store.env,
            log=s.out / f"engine-{number}.log",
        )
        for number in range(ENGINES)
    ]
    server = [store.server.pid] if store.server is not None else []
    family = Family([engine.process.pid for engine in engines], server, store.mark)
    try:
        await asyncio.gather(*(engine.ready() for engine in engines))
        turn.versions |= engines[0].versions
        await _warm(engines)
        await _replay(turn, engines, store, scenario, sessions, s, family)
    finally:
        family.note_shm()
        await asyncio.gather(*(engine.close() for engine in engines))
        files |= family.shm_files


async def _warm(engines: Sequence[ServingEngine]) -> None:
    """Have each engine compute one prompt that nobody asks for again."""
    for number, engine in enumerate(engines):
        source = random.Random(f"warm {number}")
        prompt = tuple(source.randrange(RESERVED_TOKENS, VOCABULARY) for _ in range(WARM_TOKENS))
        answer = await engine.ask(Request(-1 - number, 0, prompt, 0.0, 0), REQUEST_TIMEOUT_S)
        if answer.error is not None:
            raise RuntimeError(f"the engine cannot compute: {answer.error}")


async def _replay(
    turn: Turn,
    engines: Sequence[ServingEngine],
    store: Store,
    scenario: Scenario,
    sessions: Sequence[Session],
    s: Settings,
    family: Family,
) -> None:
    waiting = list(reversed(sessions))
    half = sum(map(len, sessions)) // 2
    began_s = time.monotonic()

    async def live() -> None:
        while waiting:
            for request in waiting.pop():
                await asyncio.sleep(request.think_s)
                engine = engines[scenario.engine_of(request, len(engines), s.seed)]
                turn.answers[request.name] = await engine.ask(request, REQUEST_TIMEOUT_S)
                if scenario.killed and len(turn.answers) == half:
                    family.note_shm()
                    store.kill()

    async def sample() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            family.sample()

    family.begin()
    sampling = asyncio.create_task(sample())
    try:
        async with asyncio.timeout(s.limit_s):
            await asyncio.gather(*(live() for _ in range(scenario.live)))
    except TimeoutError:
        turn.over = False
    turn.wall_s = time.monotonic() - began_s
    sampling.cancel()
    family.sample()
    turn.engine_cpu_s = family.cpu_s("engine")
    turn.store_cpu_s = family.cpu_s("store")
    for session in sessions:
        for request in session:
            turn.answers.setdefault(
                request.name, Answer(error=f"not answered within {s.limit_s:.0f} s")
            )


def about_versions(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the versions of engines and stores that took part."""
    about: dict[str, Any] = {}
    for turn in turns:
        for name in ("vllm", "torch"):
            if version := turn.versions.get(name):
                about.setdefault(name, version)
        if version := turn.versions.get("store"):
            about[turn.connector] = version
    return about
