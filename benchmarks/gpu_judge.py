"""Judges what a run of scripts/gpu-check measured: figures in, verdicts out.

    python -m benchmarks.gpu_judge FOLDER

`FOLDER` has what the benchmarks wrote there. The exit status is 1 when an aim is missed or
nothing was measured at all; an aim without a figure is named as skipped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from connector.limits import DEVICE_BLOCKS_MAX

ROWS = "rows.jsonl"
"""What stages of scripts/lib/gpu/probe.py and rungs.py write, a row a line; those with `least` or
`most` are judged."""
BENCH, PULLS, LOCKS, ENGINES = "bench.json", "ipc.json", "locking.json", "engines.json"
"""What `benchmarks.suites.gpu`, `gpu_ipc`, `gpu_locking` and scripts/lib/gpu/engine_figures.py
write with `--out`."""


class Aim(NamedTuple):
    """Says what a figure must be: `least` or more, or `most` or less."""

    name: str
    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        """Tell whether a value meets the aim; one that is no number meets nothing."""
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )

    def __str__(self) -> str:
        bound = f"at least {self.least}" if self.most is None else f"at most {self.most}"
        return f"{self.name} {bound}"


IDLE = {way: Aim(f"{way} of the bus, device idle", least=0.95) for way in ("d2h", "h2d")}
BUSY = {way: Aim(f"{way} of the bus, beside prefill", least=0.8) for way in ("d2h", "h2d")}
PULL = Aim("pull from VRAM of the same device, of plain copies", least=0.8)
WHOLE_FROM_MIB = 4
"""Of a block: the call for a smaller one may take longer than its bytes."""
PULL_WHOLE = Aim(
    f"pull of blocks of {WHOLE_FROM_MIB} MiB and more from VRAM, of one copy of all",
    least=0.8,
)
LOCKED = Aim("share of the memory that is page-locked", least=1.0)
HIT = Aim("time to first token of a hit, of vLLM's own offloading", most=1.05)
PRODUCER = Aim("producer's throughput, percent lost", most=1.0)
AIMS = (*IDLE.values(), *BUSY.values(), PULL, PULL_WHOLE, LOCKED, HIT, PRODUCER)


class Figure(NamedTuple):
    """Holds one measured value, and in which case it was measured."""

    aim: Aim
    case: str
    value: float


def figures_of_copies(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """Take from the rows of `benchmarks.suites.gpu` those of the kernel's grid that engines use."""
    rows = list(rows)
    bus = {(row["shape"], row["way"]): row["GB/s"] for row in rows}
    beside = {"matmul beside saves": "d2h", "matmul beside loads": "h2d"}
    for row in rows:
        way, _, kind = row["way"].partition(" ")
        if way in IDLE and kind == "pool":
            yield Figure(IDLE[way], row["shape"], row["plain_ratio"])
        elif row["way"] in beside and row["thread_blocks"] == DEVICE_BLOCKS_MAX:
            way = beside[row["way"]]
            plain = bus[row["shape"], f"{way} plain"]
            yield Figure(BUSY[way], row["shape"], round(row["GB/s"] / plain, 3))


def figures_of_pulls(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """Take from the rows of `benchmarks.gpu_ipc` the rates over those of plain copies, one each
    and, where blocks are large, one for all: single calls may slow the first yardstick, too."""
    for row in rows:
        case = f"{row['blocks']} x {row['MiB']:g} MiB"
        yield Figure(PULL, case, row["ratio"])
        if row["MiB"] >= WHOLE_FROM_MIB:
            yield Figure(PULL_WHOLE, case, row["whole_ratio"])


def figures_of_locks(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """Take how much was locked; what launches of another process took is shown, without an aim."""
    for row in rows:
        launch = f"longest launch {row['alone_us_max']} us alone, {row['beside_us_max']} beside it"
        yield Figure(LOCKED, f"{row['MiB']} MiB, {launch}", row["locked_MiB"] / row["MiB"])


def figures_of_engines(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """Take both figures of scripts/lib/gpu/engine_figures.py."""
    for row in rows:
        aim = {"hit": HIT, "producer": PRODUCER}[row["figure"]]
        yield Figure(aim, f"prompts of {row['tokens']} tokens", row["value"])


def figures_of_rows(rows: Iterable[dict[str, Any]]) -> Iterator[Figure]:
    """Take the rows that say what their value must be."""
    for row in rows:
        least, most = row.get("least"), row.get("most")
        if least is not None or most is not None:
            value = float("nan") if row["value"] is None else row["value"]
            yield Figure(Aim(f"{row['stage']}: {row['name']}", least, most), "", value)


class Judgement(NamedTuple):
    """Holds what came out: a line for each figure and each aim without one."""

    lines: list[str]
    passed: bool


def judge(figures: Sequence[Figure], aims: Sequence[Aim] = AIMS) -> Judgement:
    """Compare every figure with its aim."""
    lines = [
        f"{'met' if aim.met(value) else 'MISSED'}: {aim}{f' ({case})' * bool(case)}: {value}"
        for aim, case, value in figures
    ]
    seen = {figure.aim for figure in figures}
    lines += [f"SKIPPED {aim}: not measured" for aim in aims if aim not in seen]
    return Judgement(lines, bool(figures) and all(f.aim.met(f.value) for f in figures))


def figures_in(folder: Path) -> list[Figure]:
    """Read all that was written to `folder`."""
    found: list[Figure] = []
    kinds = {
        BENCH: figures_of_copies,
        PULLS: figures_of_pulls,
        LOCKS: figures_of_locks,
        ENGINES: figures_of_engines,
    }
    for name, taken in kinds.items():
        path = folder / name
        if path.exists():
            found += taken(json.loads(path.read_text())["rows"])
    if (folder / ROWS).exists():
        lines = (folder / ROWS).read_text().splitlines()
        found += figures_of_rows(map(json.loads, lines))
    return found


def main(arguments: Sequence[str]) -> int:
    judgement = judge(figures_in(Path(arguments[0])))
    print("\n".join(judgement.lines))
    return 0 if judgement.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
