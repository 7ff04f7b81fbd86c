"""`kvstore replay` says what a store of another size or policy would have found of a trace."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvstore.cli.options import at_least_one, size_bytes
from kvstore.cli.output import human_bytes, table
from kvstore.cli.replay.optimum import next_uses, optimum
from kvstore.cli.replay.replayed import hints_of, keys_of, replayed, slot_bytes
from kvstore.cli.replay.traces import (
    DISTINCT_MAX,
    LIVE_DEFAULT,
    REFERENCES_MAX,
    SEED_DEFAULT,
    PromptTrace,
    read_trace,
)
from kvstore.core.disk.tier import VALUE_BYTES_MIN
from kvstore.core.memory.eviction import POLICIES
from kvstore.errors import UsageError
from kvstore.limits import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SLOT_BYTES_MIN, VALUE_BYTES_MAX

COLUMNS = ("CAPACITY", "BLOCKS", "POLICY", "HIT RATE", "OPTIMUM", "OF IT", "")
DISK_COLUMNS = ("WRITTEN", "READ", "AGAIN")
"""Blocks: of the disk, and written to it once more since they were saved."""
BAR = 30
DISK_BYTES_MIN = 4 << 20
PARTS = (64, 16, 4, 1)
"""Without --capacity: room for these parts of all different blocks."""
EPILOG = f"""\
TRACE has a request a line, {{"timestamp": MS, "hash_ids": [...]}} (Mooncake's traces, or block
hashes that were recorded live), or a session a line, [[SECONDS, BLOCKS KEPT, BLOCKS, ...], ...].
HIT RATE is the blocks of leading runs that were found, of all blocks; the optimum knows the future.
The bar shows the hit rate, | the optimum. At most {REFERENCES_MAX} blocks, {DISTINCT_MAX} different
ones: about 4 GiB of memory. docs/capacity.md has more.
"""
_T = TypeVar("_T")


class ReplayRow(NamedTuple):
    """One row of the answer, as `--json` has it."""

    trace: str
    capacity_blocks: int
    disk_blocks: int
    policy: str
    hit_rate: float
    optimum: float
    fraction_of_optimum: float
    disk_written_blocks: int
    disk_read_blocks: int
    disk_again_blocks: int


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file of JSON lines")
    parser.add_argument(
        "--capacity",
        type=_each(size_bytes),
        metavar="BYTES[,BYTES]",
        help="of the node's memory: 64GiB,128GiB (default: room for a 64th, a 16th, a quarter and "
        "all of the different blocks)",
    )
    parser.add_argument(
        "--block-bytes",
        type=size_bytes,
        default=VALUE_BYTES_MIN,
        metavar="BYTES",
        help="of one block of the trace; `kvstore plan` tells those of your models "
        f"(default: {VALUE_BYTES_MIN}, the least that goes to a disk)",
    )
    parser.add_argument(
        "--policy",
        type=_each(_policy),
        default=sorted(POLICIES),
        metavar="NAME[,NAME]",
        help=f"of eviction (default: {','.join(sorted(POLICIES))})",
    )
    parser.add_argument(
        "--hints",
        type=_share,
        metavar="RIGHT",
        help="after each prompt somebody says whether it goes on, right in this share (0.9): its "
        "blocks are retained, or released",
    )
    parser.add_argument(
        "--disk",
        type=size_bytes,
        default=0,
        metavar="BYTES",
        help="of a disk, which is written to as by a node",
    )
    parser.add_argument(
        "--disk-writes-per-day",
        type=float,
        default=1.0,
        metavar="NUMBER",
        help="write the disk over at most so often in 24 hours; 0: without limit (default: 1)",
    )
    parser.add_argument(
        "--live",
        type=at_least_one,
        metavar="N",
        help=f"sessions begin so often that N are live at once (default: {LIVE_DEFAULT})",
    )
    parser.add_argument(
        "--seed", type=int, help=f"draws when sessions begin (default: {SEED_DEFAULT})"
    )
    parser.add_argument(
        "--join", type=at_least_one, default=1, metavar="N", help="N blocks of the trace are one"
    )
    parser.add_argument("--json", action="store_true", help='one line: {"rows": [...]}')


def run(args: argparse.Namespace) -> int:
    if args.disk and (args.disk < DISK_BYTES_MIN or args.block_bytes < VALUE_BYTES_MIN):
        must = f"must be at least {DISK_BYTES_MIN}, with --block-bytes {VALUE_BYTES_MIN} or more"
        raise UsageError("--disk", args.disk, must)
    if not 0 <= args.disk_writes_per_day < math.inf:
        raise UsageError("--disk-writes-per-day", args.disk_writes_per_day, "must be 0 or more")
    asked = args.capacity or []
    sizes = [_checked("--capacity", size) // SLOT_BYTES_MIN * SLOT_BYTES_MIN for size in asked]
    each = slot_bytes(args.block_bytes)
    if not 0 < args.block_bytes <= VALUE_BYTES_MAX or each > min(sizes, default=each):
        must = f"must be 1 to {VALUE_BYTES_MAX}, and at most --capacity"
        raise UsageError("--block-bytes", args.block_bytes, must)
    trace = read_trace(args.trace, join=args.join, live=args.live, seed=args.seed)
    if not sizes:
        sizes = [max(-(-trace.distinct // part) * each, SEGMENT_BYTES_MIN) for part in PARTS]
        sizes = sorted({-(-size // SLOT_BYTES_MIN) * SLOT_BYTES_MIN for size in sizes})
    rows = _rows(args, trace, sizes)
    if args.json:
        print(json.dumps({"rows": [row._asdict() for row in rows]}))
    else:
        print(_text(args, trace, rows))
    return 0


def _rows(args: argparse.Namespace, trace: PromptTrace, sizes: Sequence[int]) -> list[ReplayRow]:
    uses, keys, blocks = next_uses(trace), keys_of(trace), trace.references
    seed = SEED_DEFAULT if args.seed is None else args.seed
    hints = None if args.hints is None else hints_of(uses, args.hints, seed)
    rows: list[ReplayRow] = []
    for size in sizes:
        capacity = size // slot_bytes(args.block_bytes)
        disk = args.disk // slot_bytes(args.block_bytes)
        best = optimum(uses, capacity + disk)
        for policy in args.policy:
            found = replayed(
                trace,
                keys,
                size_bytes=size,
                block_bytes=args.block_bytes,
                policy=policy,
                disk_bytes=args.disk,
                disk_writes_per_day=args.disk_writes_per_day,
                hints=hints,
            )
            of_it = found.hits / best if best else 1.0
            shares = (found.hits / blocks, best / blocks, of_it)
            hit, bound, part = (round(share, 6) for share in shares)
            told = (trace.name, capacity, disk, policy, hit, bound, part)
            rows.append(ReplayRow(*told, *found[1:]))
    return rows


def _text(args: argparse.Namespace, trace: PromptTrace, rows: Sequence[ReplayRow]) -> str:
    each = slot_bytes(args.block_bytes)
    shown = [
        (
            human_bytes(row.capacity_blocks * each),
            row.capacity_blocks,
            row.policy,
            f"{row.hit_rate:.3f}",
            f"{row.optimum:.3f}",
            f"{row.fraction_of_optimum:.3f}",
            *(row[-3:] if args.disk else ()),
            _bar(row),
        )
        for row in rows
    ]
    told = DISK_COLUMNS if args.disk else ()
    head = (*COLUMNS[:-1], *told, COLUMNS[-1])
    hours = (trace.times[-1] - trace.times[0]) / 3600
    unlimited = 1 - trace.distinct / trace.references
    return (
        f"{trace.name}: {len(trace.prompts)} prompts in {hours:.1f} hours, {trace.references} "
        f"blocks of {human_bytes(each)}, {trace.distinct} different: an unlimited store finds "
        f"{unlimited:.3f}\n\n" + table(head, shown, left=0)
    )


def _bar(row: ReplayRow) -> str:
    marks = list(("#" * round(row.hit_rate * BAR)).ljust(BAR + 1, "."))
    marks[round(row.optimum * BAR)] = "|"
    return "".join(marks)


def _each(kind: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Return what reads a list with commas between."""
    return lambda text: [kind(one) for one in text.split(",")]


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(sorted(POLICIES))}")
    return text


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1, such as 0.9")
    return share


def _checked(field: str, size: int) -> int:
    if not SEGMENT_BYTES_MIN <= size <= SEGMENT_BYTES_MAX:
        least, most = human_bytes(SEGMENT_BYTES_MIN), human_bytes(SEGMENT_BYTES_MAX)
        raise UsageError(field, size, f"must be {least} to {most}, as that of a node")
    return size
