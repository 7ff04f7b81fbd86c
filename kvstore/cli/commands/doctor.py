"""`kvstore doctor` runs every check and says what it found and what to do, the worst first.

It starts nothing. What it writes, into /dev/shm, it removes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.cli.checks import copies, machine, reach, redis, settings, software
from kvstore.cli.checks.base import Check, Context, Finding, Level, run_check
from kvstore.cli.options import add_store
from kvstore.cli.output import as_json

CHECKS = (
    Check("python", machine.python),
    Check("packages", software.packages),
    Check("settings", settings.look),
    Check("redis", redis.look, timeout_s=10.0),
    Check("run dir", machine.run_directory),
    Check("shared memory", machine.shared_memory),
    Check("leftovers", machine.leftovers),
    Check("nodes", machine.nodes, timeout_s=30.0),
    Check("nodes", reach.look, timeout_s=10.0),
    Check("descriptors", settings.descriptors),
    Check("transports", software.transports),
    Check("memlock", machine.memlock),
    Check("huge pages", machine.huge_pages),
    Check("copies", copies.look),
    Check("cuda", software.cuda, timeout_s=3 * software.TRY_TIMEOUT_S + 5),
    Check("nixl", software.nixl, timeout_s=software.TRY_TIMEOUT_S + 5),
    Check("gpu direct", software.gpu_direct),
    Check("rdma to vram", software.to_vram, timeout_s=software.TRY_TIMEOUT_S + 5),
    Check("vllm", software.vllm),
)
WORST_FIRST = (Level.FAIL, Level.WARN, Level.OK, Level.INFO)


class Row(NamedTuple):
    """Holds a finding, and the check that made it."""

    check: str
    finding: Finding


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="only what failed and what to look at"
    )
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    context = Context(args.url, args.key_prefix, args.run_dir)
    rows = sorted(_rows(context), key=lambda row: WORST_FIRST.index(row.finding.level))
    if args.quiet:
        rows = [row for row in rows if row.finding.level in WORST_FIRST[:2]]
    counts = {level: sum(row.finding.level is level for row in rows) for level in Level}
    failed = counts[Level.FAIL] > 0
    if args.json:
        checks = [{"check": row.check, **row.finding._asdict()} for row in rows]
        print(as_json({"ok": not failed, "counts": counts, "checks": checks}))
    else:
        for row in rows:
            print(_text(row))
        print(f"\n{counts[Level.FAIL]} failed, {counts[Level.WARN]} to look at")
    return 1 if failed else 0


def _rows(context: Context) -> Iterator[Row]:
    shown = sys.stderr is not None and sys.stderr.isatty()
    for check in CHECKS:
        if shown:  # a driver may take half a minute
            print(f"\r\033[Kchecking {check.name}", end="", file=sys.stderr, flush=True)
        for finding in run_check(check, context):
            yield Row(check.name, finding)
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _text(row: Row) -> str:
    width = max(len(check.name) for check in CHECKS)
    level = row.finding.level.value
    text = f"{level:<4}  {row.check:<{width}}  {row.finding.found}"
    return f"{text}\n{'':<{width + 8}}-> {row.finding.do}" if row.finding.do else text
