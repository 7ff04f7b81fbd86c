"""Holds what a case of `scripts/conformance` works with: engines, prompts and the judge."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from engines import EngineProcess, EngineSettings, Generated, ModelShape, build_model

ROOT = Path(__file__).parents[3]
INSIDE = Path(__file__).with_name("inside.py")
TOKENS = 512
PROMPTS = 3
KEPT = ("alone", "first", "second", "alone with others")
"""Engines of more than one case."""
SIDE_CHANNEL_PORT = 15600
"""Of the first engine under vLLM's NixlConnector; the next ones follow."""
CALL_TIMEOUT_S = 120.0
"""What the slowest case asks for takes an engine a tenth of this."""
RESET_TIMEOUT_S = 30.0
LOADED, RECOMPUTED, WRONG, SHARED, FAILED, DIED, SILENT, REFUSED, NOT_RUN, APPLIES_NOT = (
    "loaded",
    "recomputed",
    "WRONG TOKENS",
    "SHARED WHAT IS APART",
    "REQUEST FAILED",
    "ENGINE FAILED",
    "NO ANSWER",
    "refused at start",
    "not run",
    "does not apply",
)
BAD = (WRONG, SHARED, FAILED, DIED, SILENT)
BY_REQUEST = "KV is handed over from request to request, by no key"
HANDED_OVER = {
    "parts-of-prompts": "a prompt is handed over whole",
    "cache-salt": BY_REQUEST,
    "preemption": BY_REQUEST,
    "killed-while-saving": BY_REQUEST,
    "flipped-bits": "KV lies in the cache of the engine that computed it, and nowhere else",
    "evicted-before-load": "what is handed over is held by the engine that computed it",
}
"""Cases that say nothing about a connector which gives KV to the one engine that a request names,
and shares nothing else."""
IN_ONE_ENGINE = "KV stays within the engine that computed it"
WITHIN = dict.fromkeys(
    (
        "killed-while-saving",
        "other-dtype",
        "other-block-size",
        "new-weights",
        "revision",
        "evicted-before-load",
        "older-version",
        "store-lost",
    ),
    IN_ONE_ENGINE,
)
"""Cases that say nothing about a connector whose store is the engine's own."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says what became of one case."""

    case: str
    verdict: str
    cached_tokens: int = 0
    """Of all prompts that were asked for the second time."""
    asked_tokens: int = 0
    detail: str = ""


def judge(
    case: str,
    wanted: Sequence[Sequence[int]],
    found: Sequence[Generated],
    asked_tokens: int,
    *,
    apart: bool,
) -> Verdict:
    """Compare what engines answered with `wanted`, the tokens of an engine without a connector.
    With `apart`, nothing may be shared."""
    cached = sum(max(0, one.cached_tokens) for one in found)
    pairs = [(list(one.tokens), list(right)) for one, right in zip(found, wanted, strict=True)]
    differ = sum(one != right[: len(one)] for one, right in pairs)
    if differ:
        detail = f"{differ} of {len(found)} answers differ"
        return Verdict(case, WRONG, cached, asked_tokens, detail)
    if short := sum(len(one) < len(right) for one, right in pairs):
        detail = f"{short} of {len(found)} answers end early: is kv_load_failure_policy recompute?"
        return Verdict(case, FAILED, cached, asked_tokens, detail)
    if apart and cached:
        return Verdict(case, SHARED, cached, asked_tokens)
    return Verdict(case, LOADED if cached else RECOMPUTED, cached, asked_tokens)


def filled_in(connector: Any, folder: Path, name: str) -> Any:
    """Return `connector` with {dir} and {id} replaced in all its texts."""
    if isinstance(connector, str):
        return connector.replace("{dir}", str(folder)).replace("{id}", name)
    if isinstance(connector, dict):
        return {key: filled_in(value, folder, name) for key, value in connector.items()}
    if isinstance(connector, list):
        return [filled_in(value, folder, name) for value in connector]
    return connector


def absolute(path: str) -> str:
    """Return a PYTHONPATH as engines may be given it, which run in another folder."""
    return os.pathsep.join(str(Path(one).resolve()) for one in path.split(os.pathsep) if one)


@dataclass(slots=True)
class Bench:
    """Owns the engines and folders of one connector under trial; at its end all are gone."""

    given: dict[str, Any]
    """The connector's configuration, with {dir} and {id} in it."""
    work: Path
    closing: contextlib.ExitStack
    python: Path | None = None
    """Runs the engines, where it is not this process's."""
    env: dict[str, str] = field(default_factory=dict)
    """Of the engines with the connector."""
    payload: list[Path] = field(default_factory=list)
    """Files outside of `folder` that the store keeps KV in."""
    pids: list[int] = field(default_factory=list)
    """The store's processes, where no node of this project is one."""
    store_mib: int = 64
    """Size of the store, after which it must have evicted."""
    older: str = ""
    """Path, as in PYTHONPATH, of an older version of the connector."""
    version: str = ""
    """Of the connector and its store, where they are not of this project."""
    logs: Path | None = None
    """Where the engines' logs are left; None: with `work` they are gone."""
    without: dict[str, str] = field(default_factory=dict)
    """Cases that say nothing about this connector, and why."""
    hands_over: bool = False
    """Whether the connector gives KV to the one engine that a request names, and shares nothing
    else. `shared_prefix` finds it out."""
    within: bool = False
    """Whether an engine finds again what it has kept itself, and no other one does; so too."""
    models: dict[int, Path] = field(default_factory=dict)
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    started: int = 0
    seed: int = 0
    connector: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.in_folder("s")

    def in_folder(self, name: str) -> None:
        """Have engines that start from now on keep their KV in another folder of the store's."""
        (self.work / name).mkdir(mode=0o700, exist_ok=True)
        self.connector = filled_in(self.given, self.work / name, uuid4().hex)

    def give_up_sharing(self) -> None:
        """End every engine with the connector: who failed is not asked again."""
        for name in self.names_of_sharing():
            self.engines.pop(name).close()

    def names_of_sharing(self) -> list[str]:
        return [name for name in self.engines if not name.startswith("alone")]

    def store_has_ended(self) -> bool:
        """Tell whether a process of the store is gone, or is a zombie."""
        return any(_has_ended(pid) for pid in self.pids)

    def let_go(self) -> None:
        """End the engines that were made for one case."""
        for name in [name for name in self.engines if name not in KEPT]:
            self.engines.pop(name).close()

    def model(self, seed: int) -> Path:
        if seed not in self.models:
            self.models[seed] = build_model(self.work / f"model{seed}", ModelShape(seed=seed))
        return self.models[seed]

    def engine(self, name: str, model: Path, *, store: bool, **settings: Any) -> EngineProcess:
        """Return the engine of that name; it is started when it is first asked for."""
        if name not in self.engines:
            mine = absolute(os.environ.get("PYTHONPATH", ""))
            path = [str(ROOT), str(ROOT / "tests/support/vllm_engines"), mine]
            env = {"PYTHONPATH": os.pathsep.join(path), **(self.env if store else {})}
            env |= settings.pop("env", {})
            # An engine that is killed, or that does not start, leaves vLLM's folders there.
            self.tmp.mkdir(exist_ok=True)
            number = str(SIDE_CHANNEL_PORT + len(self.engines))
            chosen = EngineSettings(
                connector=self.connector if store else None,
                env={
                    "TMPDIR": str(self.tmp),
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": number,
                    **env,
                },
                **{"max_batched_tokens": TOKENS, **settings},
            )
            self.started += 1
            log = (self.logs or self.work) / f"{self.started:02d} {name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            self.engines[name] = EngineProcess(
                model,
                chosen,
                log=log,
                program=INSIDE,
                python=self.python,
                call_timeout_s=CALL_TIMEOUT_S,
                cwd=self.work,  # what `python -m` finds first: not this project
            )
            self.closing.callback(self.engines[name].close)
        return self.engines[name]

    def alone(self, name: str = "alone", model: Path | None = None, **more: Any) -> EngineProcess:
        return self.engine(name, model or self.model(7), store=False, **more)

    def sharing(self, name: str, model: Path | None = None, **more: Any) -> EngineProcess:
        return self.engine(name, model or self.mounted(7), store=True, **more)

    def pair(
        self, of: str = "", model: Path | None = None, **more: Any
    ) -> tuple[EngineProcess, EngineProcess]:
        """Return the engine that computes and the one that is asked for the same. Where KV does not
        leave an engine they are one."""
        first = self.sharing(f"first{of}", model, **more)
        return first, first if self.within else self.sharing(f"second{of}", model, **more)

    def mounted(self, seed: int) -> Path:
        """Return the path that all engines with the connector load from, now with these weights."""
        path, marker = self.work / "mounted", self.work / f"mounted is {seed}"
        if not marker.exists():
            for old in self.work.glob("mounted*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            shutil.copytree(self.model(seed), path)
            marker.touch()
        return path

    def prompts(self, tokens: int = TOKENS + 2, count: int = PROMPTS) -> list[list[int]]:
        """Return prompts such as no case before had."""
        self.seed += 1
        rng = random.Random(self.seed)
        return [[rng.randrange(2, 500) for _ in range(tokens)] for _ in range(count)]

    def share(
        self, first: EngineProcess, second: EngineProcess, prompts: list[list[int]], **more: Any
    ) -> list[Generated]:
        """Have the first engine compute and keep, and return what the second one answers."""
        told = self.keep(first, prompts, **more)
        return second.generate(prompts, kv_transfer_params=told, **more)

    def keep(
        self, engine: EngineProcess, prompts: list[list[int]], **more: Any
    ) -> list[dict[str, Any]] | None:
        """Have an engine compute prompts and keep them. Return what another one must say of each to
        get them, where it must."""
        if self.hands_over:
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            done = engine.generate(prompts, max_tokens=1, kv_transfer_params=asked, **more)
            told = [dict(one.kv_transfer_params or {}) for one in done]
            for params in told:
                # With it vLLM says how many tokens this engine did not compute, not the next one.
                params.pop("remote_prefill_cached_tokens", None)
            return told
        engine.generate(prompts, **more)
        engine.drain()
        if self.within:
            forget(engine)
        return None

    @property
    def folder(self) -> Path:
        return self.work / "s"

    @property
    def tmp(self) -> Path:
        """Folder for temporary files of the engines, and of what a connector starts."""
        return self.work / "tmp"


def forget(engine: EngineProcess) -> None:
    """Have an engine's own cache forget all that it has; its connector does not."""
    give_up_at = time.monotonic() + RESET_TIMEOUT_S
    while not engine.call("reset", connector=False):
        if time.monotonic() > give_up_at:
            raise RuntimeError("blocks of requests that have ended are held: no cache is forgotten")
        time.sleep(0.1)
        engine.drain()


def _has_ended(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def tokens_of(found: Iterable[Generated]) -> list[list[int]]:
    return [one.tokens for one in found]


def worst(*verdicts: Verdict) -> Verdict:
    """Return the first verdict that is bad, else the first."""
    return next((one for one in verdicts if one.verdict in BAD), verdicts[0])
