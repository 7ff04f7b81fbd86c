"""`kvstore doctor` runs every check and says what it found and what to do. It starts nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.cli.checks import copies, machine, redis, software
from kvstore.cli.checks.base import Check, Context, Finding, Level, run_check
from kvstore.cli.options import add_store
from kvstore.cli.output import as_json

CHECKS = (
    Check("python", machine.python),
    Check("packages", software.packages),
    Check("redis", redis.look, timeout_s=10.0),
    Check("run dir", machine.run_directory),
    Check("shared memory", machine.shared_memory),
    Check("leftovers", machine.leftovers),
    Check("nodes", machine.nodes, timeout_s=30.0),
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


class Row(NamedTuple):
    """Holds a finding, and the check that made it."""

    check: str
    finding: Finding


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    context = Context(args.url, args.key_prefix, args.run_dir)
    rows: list[Row] = []
    for row in _rows(context):
        rows.append(row)
        if not args.json:
            print(_text(row), flush=True)
    counts = {level: sum(row.finding.level is level for row in rows) for level in Level}
    failed = counts[Level.FAIL] > 0
    if args.json:
        checks = [{"check": row.check, **row.finding._asdict()} for row in rows]
        print(as_json({"ok": not failed, "counts": counts, "checks": checks}))
    else:
        print(f"\n{counts[Level.FAIL]} failed, {counts[Level.WARN]} to look at")
    return 1 if failed else 0


def _rows(context: Context) -> Iterator[Row]:
    for check in CHECKS:
        for finding in run_check(check, context):
            yield Row(check.name, finding)


def _text(row: Row) -> str:
    width = max(len(check.name) for check in CHECKS)
    level = row.finding.level.value
    text = f"{level:<4}  {row.check:<{width}}  {row.finding.found}"
    return f"{text}\n{'':<{width + 8}}-> {row.finding.do}" if row.finding.do else text
