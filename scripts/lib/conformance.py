"""Judges a KV connector by what real vLLM engines answer with it; `scripts/conformance --help`.

A case makes engines share KV, or makes sure that they must not, and compares every answer with
that of an engine without a connector. Prompts are `TOKENS` + 2 long and all engines of one kind
split their prefill at `TOKENS`, so that the same prompt runs through the same kernel shapes with
a hit and without: near-ties of the sampling would differ otherwise, which is no connector's fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from engines import (
    EngineProcess,
    EngineSettings,
    Generated,
    ModelShape,
    build_model,
    cpu_dtype,
    kv_transfer,
)

ROOT = Path(__file__).parents[2]
TOKENS = 512
PROMPTS = 3
FLIP_EVERY_BYTES = 512
FILE_BYTES_MIN = 4096
"""Smaller files of a store are not its payload."""

LOADED, RECOMPUTED, WRONG, SHARED, DIED, NOT_RUN = (
    "loaded",
    "recomputed",
    "WRONG TOKENS",
    "SHARED WHAT IS APART",
    "ENGINE FAILED",
    "not run",
)
BAD = (WRONG, SHARED, DIED)


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
    differ = sum(list(one.tokens) != list(right) for one, right in zip(found, wanted, strict=True))
    if differ:
        detail = f"{differ} of {len(found)} answers differ"
        return Verdict(case, WRONG, cached, asked_tokens, detail)
    if apart and cached:
        return Verdict(case, SHARED, cached, asked_tokens)
    return Verdict(case, LOADED if cached else RECOMPUTED, cached, asked_tokens)


@dataclass(slots=True)
class Bench:
    """Owns the engines and folders of one connector under trial; at its end all are gone."""

    connector: dict[str, Any]
    work: Path
    closing: contextlib.ExitStack
    models: dict[int, Path] = field(default_factory=dict)
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    seed: int = 0

    def model(self, seed: int) -> Path:
        if seed not in self.models:
            self.models[seed] = build_model(self.work / f"model{seed}", ModelShape(seed=seed))
        return self.models[seed]

    def engine(self, name: str, model: Path, *, store: bool, **settings: Any) -> EngineProcess:
        """Return the engine of that name; it is started when it is first asked for."""
        if name not in self.engines:
            path = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
            chosen = EngineSettings(
                connector=self.connector if store else None,
                **{
                    "max_batched_tokens": TOKENS,
                    "env": {"PYTHONPATH": os.pathsep.join(path)},
                    **settings,
                },
            )
            log = self.work / f"{name}.log"
            self.engines[name] = EngineProcess(model, chosen, log=log)
            self.closing.callback(self.engines[name].close)
        return self.engines[name]

    def alone(self, name: str = "alone", model: Path | None = None, **more: Any) -> EngineProcess:
        return self.engine(name, model or self.model(7), store=False, **more)

    def sharing(self, name: str, model: Path | None = None, **more: Any) -> EngineProcess:
        return self.engine(name, model or self.mounted(7), store=True, **more)

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

    @property
    def folder(self) -> Path:
        return self.work / "s"


def tokens_of(found: Iterable[Generated]) -> list[list[int]]:
    return [one.tokens for one in found]


def _pair(
    bench: Bench, case: str, tokens: int, *, spoil: Callable[[Path], str] | None = None
) -> Verdict:
    """Have one engine compute, and ask another for the same."""
    wanted = bench.prompts(tokens)
    reference = tokens_of(bench.alone().generate(wanted))
    first, second = bench.sharing("first"), bench.sharing("second")
    first.generate(wanted)
    first.drain()
    if spoil is not None and (why_not := spoil(bench.folder)):
        return Verdict(case, NOT_RUN, detail=why_not)
    return judge(case, reference, second.generate(wanted), tokens * len(wanted), apart=False)


def shared_prefix(bench: Bench) -> Verdict:
    """What one engine computed another one loads."""
    return _pair(bench, "shared-prefix", TOKENS + 2)


def long_prefix(bench: Bench) -> Verdict:
    """The same over four chunks of prefill."""
    return _pair(bench, "long-prefix", 3 * TOKENS + 2)


def cache_salt(bench: Bench) -> Verdict:
    """Requests with different salts see nothing of each other."""
    wanted = bench.prompts()
    reference = tokens_of(bench.alone().generate(wanted))
    first, second = bench.sharing("first"), bench.sharing("second")
    first.call("generate", prompts=wanted, max_tokens=16, abort_after_s={}, cache_salt="a")
    first.drain()
    found = second.call("generate", prompts=wanted, max_tokens=16, abort_after_s={}, cache_salt="b")
    asked = sum(map(len, wanted))
    return judge("cache-salt", reference, [Generated(**f) for f in found], asked, apart=True)


def aborts(bench: Bench) -> Verdict:
    """Requests that end while their KV is loading leave the engine right."""
    wanted = bench.prompts(count=4)
    reference = tokens_of(bench.alone().generate(wanted))
    first, second = bench.sharing("first"), bench.sharing("second")
    first.generate(wanted)
    first.drain()
    second.generate(wanted, abort_after_s={0: 0.0, 1: 0.002, 2: 0.01})
    asked = sum(map(len, wanted))
    return judge("aborts-while-loading", reference, second.generate(wanted), asked, apart=False)


def preemption(bench: Bench) -> Verdict:
    """An engine whose memory does not hold its requests evicts some while they are saved."""
    wanted = bench.prompts(TOKENS + 64, count=6)
    reference = tokens_of(bench.alone().generate(wanted, max_tokens=64))
    small = bench.sharing("small", kv_blocks=80, max_model_len=1024)
    asked = sum(map(len, wanted))
    found = small.generate(wanted, max_tokens=64)
    small.drain()
    verdict = judge("preemption", reference, found, asked, apart=False)
    if verdict.verdict in BAD:
        return verdict
    second = bench.sharing("second").generate(wanted, max_tokens=64)
    return judge("preemption", reference, second, asked, apart=False)


def killed_while_saving(bench: Bench) -> Verdict:
    """An engine dies (SIGKILL) with saves under way; what it left is whole, or it is not there."""
    wanted = bench.prompts(count=4)
    reference = tokens_of(bench.alone().generate(wanted))
    second = bench.sharing("second")
    victim = bench.sharing("victim")
    victim.generate(wanted, max_tokens=1)
    os.kill(victim.pid, signal.SIGKILL)
    asked = sum(map(len, wanted))
    return judge("killed-while-saving", reference, second.generate(wanted), asked, apart=False)


def other_dtype(bench: Bench) -> Verdict:
    """Engines of another dtype share nothing: bytes of the one are numbers of the other."""
    wanted = bench.prompts()
    dtype = "bfloat16" if cpu_dtype() == "float32" else "float32"
    reference = tokens_of(bench.alone(f"alone in {dtype}", dtype=dtype).generate(wanted))
    first = bench.sharing("first")
    first.generate(wanted)
    first.drain()
    found = bench.sharing(f"in {dtype}", dtype=dtype).generate(wanted)
    return judge("other-dtype", reference, found, sum(map(len, wanted)), apart=True)


def other_block_size(bench: Bench) -> Verdict:
    """Engines with another block size load what they can read, or nothing."""
    wanted = bench.prompts()
    reference = tokens_of(bench.alone("alone in 64s", block_size=64).generate(wanted))
    first = bench.sharing("first")
    first.generate(wanted)
    first.drain()
    found = bench.sharing("in 64s", block_size=64).generate(wanted)
    return judge("other-block-size", reference, found, sum(map(len, wanted)), apart=False)


def flipped_bits(bench: Bench) -> Verdict:
    """Bits flip in the store's memory or files."""
    return _pair(bench, "flipped-bits", TOKENS + 2, spoil=flip_bits)


def store_lost(bench: Bench) -> Verdict:
    """The store's process is killed, or its files are removed."""
    return _pair(bench, "store-lost", TOKENS + 2, spoil=lose_store)


def new_weights(bench: Bench) -> Verdict:
    """Another model is put at the same path: the next engine must not load the former one's KV."""
    wanted = bench.prompts()
    reference = tokens_of(bench.alone("alone with others", bench.model(8)).generate(wanted))
    first = bench.sharing("first")
    first.generate(wanted)
    first.drain()
    found = bench.sharing("with others", bench.mounted(8)).generate(wanted)
    return judge("new-weights", reference, found, sum(map(len, wanted)), apart=True)


CASES: dict[str, Callable[[Bench], Verdict]] = {
    "shared-prefix": shared_prefix,
    "long-prefix": long_prefix,
    "cache-salt": cache_salt,
    "aborts-while-loading": aborts,
    "preemption": preemption,
    "killed-while-saving": killed_while_saving,
    "other-dtype": other_dtype,
    "other-block-size": other_block_size,
    "flipped-bits": flipped_bits,
    "new-weights": new_weights,
    "store-lost": store_lost,  # last: it does not come back
}
CONTROL = "control: loads zeros"


def payload_files(folder: Path) -> list[Path]:
    """Return the files that the store under trial keeps KV in: its own in `folder`, or a node's
    memory."""
    found = [Path(json.loads(word.read_text())["data_path"]) for word in _node_words(folder)]
    mine = {word.parent for word in _node_words(folder)}
    for path in folder.rglob("*"):
        plain = path.is_file() and not mine.intersection(path.parents)
        if plain and path.stat().st_size >= FILE_BYTES_MIN:
            found.append(path)
    return [path for path in found if path.exists()]


def _node_words(folder: Path) -> list[Path]:
    return list(folder.glob("**/nodes/*/node.json"))


def flip_bits(folder: Path) -> str:
    """Flip one bit in every few hundred bytes that are not 0. Return why it could not be done, or
    nothing."""
    flipped = 0
    for path in payload_files(folder):
        with path.open("r+b") as file:
            for start in range(0, path.stat().st_size, FLIP_EVERY_BYTES):
                file.seek(start)
                byte = file.read(1)
                if byte != b"\0":
                    file.seek(start)
                    file.write(bytes([byte[0] ^ 0x40]))
                    flipped += 1
    return "" if flipped else "its bytes are in no file of {dir} and no memory node of it"


def lose_store(folder: Path) -> str:
    """Kill the store's nodes (SIGKILL), or remove its files. Return why it could not be done, or
    nothing."""
    words = _node_words(folder)
    for word in words:
        os.kill(json.loads(word.read_text())["pid"], signal.SIGKILL)
    files = [] if words else payload_files(folder)
    for path in files:
        path.unlink()
    return "" if words or files else "it has no file in {dir} and no memory node"


def ours(name: str = "KVStoreConnector", module: str = "connector.adapters.vllm") -> dict[str, Any]:
    """Yield this project's connector over a Redis and a node of its own, with checksums."""
    transfer = kv_transfer(
        "kv_both",
        run_dir="{dir}",
        key_prefix="kv:{id}",
        node_size_bytes=256 << 20,
        verify="always",
        block_tokens=64,
        load_timeout_s=30.0,
    )
    return {**transfer, "kv_connector": name, "kv_connector_module_path": module}


def filled_in(connector: Any, folder: Path, name: str) -> Any:
    """Return `connector` with {dir} and {id} replaced in all its texts."""
    if isinstance(connector, str):
        return connector.replace("{dir}", str(folder)).replace("{id}", name)
    if isinstance(connector, dict):
        return {key: filled_in(value, folder, name) for key, value in connector.items()}
    if isinstance(connector, list):
        return [filled_in(value, folder, name) for value in connector]
    return connector


@contextlib.contextmanager
def bench_of(connector: dict[str, Any]) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="kvc") as path, contextlib.ExitStack() as closing:
        work = Path(path)
        (work / "s").mkdir(mode=0o700)
        yield Bench(filled_in(connector, work / "s", uuid4().hex), work, closing)


def run(connector: dict[str, Any], names: Sequence[str]) -> Iterator[Verdict]:
    """Return a verdict for each case; a case that ends an engine has a verdict too."""
    with bench_of(connector) as bench:
        for name in names:
            try:
                yield CASES[name](bench)
            except (OSError, RuntimeError) as e:
                yield Verdict(name, DIED, detail=str(e))
                bench.engines = {}  # who died is not asked again; the others end with the rest


def control() -> Verdict:
    """Try a connector that loads zeros: a judge that lets it pass is no judge."""
    (verdict,) = run(ours("GarbageConnector", "garbage_connector"), ["shared-prefix"])
    return Verdict(CONTROL, verdict.verdict, verdict.cached_tokens, verdict.asked_tokens)


def failed(verdicts: Sequence[Verdict]) -> bool:
    """Tell whether something was wrong, or nothing was shared where all is alike: then no case says
    anything."""
    must_be = {CONTROL: WRONG, "shared-prefix": LOADED}
    return any(
        verdict.verdict != must_be[verdict.case]
        if verdict.case in must_be
        else verdict.verdict in BAD
        for verdict in verdicts
    )


def line(verdict: Verdict) -> str:
    share = f"{verdict.cached_tokens} of {verdict.asked_tokens}" if verdict.asked_tokens else ""
    return f"{verdict.case:24}{verdict.verdict:24}{share:>16}  {verdict.detail}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/conformance")
    parser.add_argument("connector", nargs="?", type=json.loads)
    parser.add_argument("--only", action="append", choices=list(CASES), default=[])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    verdicts: list[Verdict] = []

    def tell(verdict: Verdict) -> None:
        verdicts.append(verdict)
        print(line(verdict), file=sys.stderr if args.json else sys.stdout, flush=True)

    for verdict in run(args.connector or ours(), args.only or list(CASES)):
        tell(verdict)
    if args.connector is None:
        tell(control())
    if args.json:
        print(json.dumps({"ok": not failed(verdicts), "cases": [asdict(v) for v in verdicts]}))
    return int(failed(verdicts))


if __name__ == "__main__":
    sys.exit(main())
