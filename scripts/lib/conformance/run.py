"""Judges a KV connector by what real vLLM engines answer with it; `scripts/conformance --help`.

A case makes engines share KV, or makes sure that they must not, and compares every answer with
that of an engine without a connector. Prompts are `TOKENS` + 2 long and all engines of one kind
split their prefill at `TOKENS`, so that the same prompt runs through the same kernel shapes with
a hit and without: near-ties of the sampling would differ otherwise, which is no connector's fault.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines import kv_transfer

from conformance.bench import (
    APPLIES_NOT,
    BAD,
    CALL_TIMEOUT_S,
    DIED,
    LOADED,
    REFUSED,
    ROOT,
    SILENT,
    WRONG,
    Bench,
    Verdict,
)
from conformance.cases import (
    CONTROL,
    aborts,
    cache_salt,
    control,
    flipped_bits,
    killed_while_saving,
    long_prefix,
    new_weights,
    other_block_size,
    other_dtype,
    parts,
    preemption,
    shared_again,
    shared_prefix,
    store_lost,
)
from conformance.faults import end_all_of
from conformance.kinds import KINDS
from conformance.peers import PEERS, peer
from conformance.results import publish

FIRST = "shared-prefix"
"""What is not loaded here is loaded nowhere, and how it is shared is found out."""
CASES: dict[str, Callable[[Bench], Verdict]] = {
    FIRST: shared_prefix,
    CONTROL: control,
    "long-prefix": long_prefix,
    "parts-of-prompts": parts,
    "cache-salt": cache_salt,
    "aborts-while-loading": aborts,
    "preemption": preemption,
    "killed-while-saving": killed_while_saving,
    "other-dtype": other_dtype,
    "other-block-size": other_block_size,
    "flipped-bits": flipped_bits,
    "new-weights": new_weights,
    **KINDS,
    "shared-again": shared_again,
    "store-lost": store_lost,  # last: it does not come back
}
REFUSAL = re.compile(
    r"did not start, .*: (Exception|ValueError|NotImplementedError|UsageError|ValidationError):"
)
"""An engine that does not start for what it was told has said so before anything was wrong."""


def ours() -> dict[str, Any]:
    """Return this project's connector over a Redis and a node of its own, with checksums."""
    return kv_transfer(
        "kv_both",
        run_dir="{dir}",
        key_prefix="kv:{id}",
        node_size_bytes=64 << 20,
        verify="always",
        block_tokens=128,
        load_timeout_s=30.0,
    )


@contextlib.contextmanager
def bench_of(connector: dict[str, Any], **more: Any) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="kvc") as path, contextlib.ExitStack() as closing:
        bench = Bench(connector, Path(path), closing, **more)
        closing.callback(end_all_of, f"TMPDIR={bench.tmp}")  # after the engines
        yield bench


def run(
    connector: dict[str, Any], names: Sequence[str], lock: Path | None = None, **more: Any
) -> Iterator[Verdict]:
    """Yield a verdict for each case; a case that ends an engine, or that is not answered, has a
    verdict too. Nothing follows a `FIRST` that has loaded nothing: no other case would say
    anything. `lock` is held while a case runs. `more` is of `Bench`."""
    with bench_of(connector, **more) as bench:
        for name in names:
            with held(lock):
                verdict = _judged(bench, name)
                if name != "adapters":  # the next case has the same
                    bench.let_go()
            yield verdict
            if name == FIRST and verdict.verdict not in (LOADED, WRONG):
                return


def _judged(bench: Bench, name: str) -> Verdict:
    if why := bench.without.get(name):
        return Verdict(name, APPLIES_NOT, detail=why)
    try:
        verdict = CASES[name](bench)
    except TimeoutError:
        bench.give_up_sharing()
        verdict = Verdict(name, SILENT, detail=f"no answer in {CALL_TIMEOUT_S:.0f} s")
    except (OSError, RuntimeError, ValueError) as e:
        bench.give_up_sharing()
        said = str(e).replace(str(bench.work), "")
        verdict = Verdict(name, REFUSED if REFUSAL.search(said) else DIED, detail=said)
    if name != "store-lost" and verdict.verdict not in BAD and bench.store_has_ended():
        return Verdict(name, DIED, detail="a process of the store has ended by itself")
    return verdict


@contextlib.contextmanager
def held(lock: Path | None) -> Iterator[None]:
    """Hold the lock of a file, waiting for it: who else tries engines here gets in between."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def failed(verdicts: Sequence[Verdict]) -> bool:
    """Tell whether something was wrong, or nothing was shared where all is alike: then no case says
    anything."""
    must_be = {CONTROL: WRONG, FIRST: LOADED, "shared-again": LOADED}
    return any(
        verdict.verdict != must_be[verdict.case]
        if verdict.case in must_be
        else verdict.verdict in BAD
        for verdict in verdicts
    )


def line(verdict: Verdict) -> str:
    share = f"{verdict.cached_tokens} of {verdict.asked_tokens}" if verdict.asked_tokens else ""
    return f"{verdict.case:24}{verdict.verdict:24}{share:>16}  {verdict.detail}".rstrip()


def transfer_config(text: str) -> dict[str, Any]:
    """Read CONNECTOR_JSON. Raises `ArgumentTypeError` that says what is wrong with it."""
    try:
        given = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"CONNECTOR_JSON: {e}") from e
    if not isinstance(given, dict) or not isinstance(given.get("kv_connector"), str):
        raise argparse.ArgumentTypeError('CONNECTOR_JSON: must be {"kv_connector": NAME, ...}')
    return given


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/conformance")
    parser.add_argument("connector", nargs="?", type=transfer_config)
    parser.add_argument("--peer", choices=list(PEERS))
    parser.add_argument("--peers-venv", type=Path, default=ROOT / ".venv-peers")
    parser.add_argument("--python", type=Path)
    parser.add_argument("--payload", action="append", type=Path, default=[])
    parser.add_argument("--pid", action="append", type=int, default=[])
    parser.add_argument("--store-mib", type=int, default=64)
    parser.add_argument("--older", default="")
    parser.add_argument("--only", action="append", choices=list(CASES), default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args(argv)
    # Engines run in another folder. Not resolved: the python of an environment is a link.
    args.peers_venv = args.peers_venv.absolute()
    args.python = args.python and args.python.absolute()
    if args.peer and args.connector:
        parser.error("--peer names the connector: no CONNECTOR_JSON beside it")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    verdicts: list[Verdict] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended then too
    with contextlib.ExitStack() as closing:
        if args.peer:
            connector, more = closing.enter_context(peer(args.peer, args.peers_venv))
        else:
            connector = args.connector or ours()
            more = {"payload": args.payload, "pids": args.pid, "store_mib": args.store_mib}
            more["python"] = args.python
        if args.older:
            more["older"] = args.older
        names = dict.fromkeys([FIRST, CONTROL, *(args.only or CASES)])
        for verdict in run(connector, list(names), args.lock, logs=args.logs, **more):
            verdicts.append(verdict)
            print(line(verdict), file=sys.stderr if args.json else sys.stdout, flush=True)
            if args.publish:
                publish(
                    connector["kv_connector"], more.get("version", ""), argv, verdict, list(CASES)
                )
    if len(verdicts) < len(names):
        print(f"{FIRST} was not loaded: no other case would say anything", file=sys.stderr)
    if args.json:
        print(json.dumps({"ok": not failed(verdicts), "cases": [asdict(v) for v in verdicts]}))
    return int(failed(verdicts))


if __name__ == "__main__":
    sys.exit(main())
