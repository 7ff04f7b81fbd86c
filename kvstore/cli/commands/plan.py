"""`kvstore plan` says how much memory this host's nodes should have, from what they have seen."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.cli.options import KEY_PREFIX_DEFAULT, add_store, run_dir_of
from kvstore.cli.output import as_json, human_bytes, table
from kvstore.cli.store import LocalNode, local_nodes
from kvstore.core.reuse import TIMES
from kvstore.errors import NodeUnavailableError
from kvstore.keys import Field
from kvstore.limits import LIST_ROWS_MAX
from kvstore.protocol.control import Op
from kvstore.protocol.control_replies import block_rows, namespaces

ENOUGH = 0.95
"""Share of an unlimited node's hits that a recommended size finds."""
SAMPLED_MIN = 1000
"""Sampled uses below which nothing is recommended."""
PAGES_MAX = 16
"""Pages of a node's list that block sizes are measured from."""
OF_SHARDS = ("dcp_rank", "head_first", "pp_rank", "tp_rank", "cp_rank")
"""Fields by which the namespaces of one model's shards differ."""
TOKENS = ("block_tokens", "page_tokens")
"""Fields that say how many tokens a block has."""
MODEL_COLUMNS = ("MODEL", "SHARDS", "BLOCK", "TOKENS", "A TOKEN", "A GiB HOLDS")
SHOWN = (0.5, 1, 2, 4, 8)
NODE_COLUMNS = ("NODE", "SIZE", *(f"x{times:g}" for times in SHOWN), "UNLIMITED", "RECOMMENDED")
EPILOG = f"""\
BLOCK is the mean of a shard's blocks that nodes have now, A TOKEN is of all shards that are here.
x2 is the share of uses that a node of twice the size would have found under LRU, estimated from a
sample of keys since the node's start. It is of blocks saved to and read from this host's nodes: a
block counts as missed when it is saved, one of generated tokens too; look-ups that no save followed
and hits in an engine's own cache are not known to a node. RECOMMENDED finds at least {ENOUGH:g} of
what an unlimited node would have, in memory and on disk together. docs/capacity.md has more.
"""


class Model(NamedTuple):
    """The blocks of one KV cache group of one model."""

    model: str
    shards: int
    """Namespaces that differ by rank alone."""
    block_bytes: int
    block_tokens: int | None
    token_bytes: float | None
    fields: Mapping[str, Field]


class Planned(NamedTuple):
    node: str
    size_bytes: int
    sampled_uses: int
    hit_rate: dict[str, float]
    """By times the node's size."""
    unlimited_hit_rate: float | None
    recommended_bytes: int | None
    """None: too few uses yet, or more than the curve reaches."""
    why_not: str


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    nodes = local_nodes(run_dir_of(args), args.key_prefix)
    if not nodes:
        prefix = f" with key prefix {args.key_prefix}" * (args.key_prefix != KEY_PREFIX_DEFAULT)
        raise NodeUnavailableError(f"no memory node{prefix} on this host: `kvstore up` starts one")
    planned = [plan_of(node.announcement.name, node.stats()) for node in nodes]
    models = _models(nodes)
    if args.json:
        told = {name: [one._asdict() for one in rows] for name, rows in
                (("models", models), ("nodes", planned))}  # fmt: skip
        print(as_json(told))
    else:
        print(_text(models, planned))
    return 0


def plan_of(name: str, stats: Mapping[str, int | float]) -> Planned:
    """Return what a node's counters say of its size."""
    size, sampled = int(stats["capacity_bytes"]), int(stats.get("reuse_sampled", 0))
    rates = {f"{t:g}": stats[f"reuse_hit_rate:{t:g}"] for t in TIMES} if sampled else {}
    unlimited = stats.get("reuse_hit_rate:unlimited")
    recommended, why_not = None, ""
    if unlimited is None or sampled < SAMPLED_MIN:
        why_not = f"too few uses yet: {sampled} in the sample, {SAMPLED_MIN} are needed"
    elif not unlimited:
        why_not = "no block was used again"
    else:
        enough = (t for t in TIMES if rates[f"{t:g}"] >= ENOUGH * unlimited)
        times = next(enough, None)
        recommended = None if times is None else int(times * size)
        why_not = f"more than {TIMES[-1]:g} times its size" if times is None else ""
    return Planned(name, size, sampled, rates, unlimited, recommended, why_not)


def _models(nodes: Sequence[LocalNode]) -> list[Model]:
    lengths: dict[int, list[int]] = {}
    fields: dict[int, dict[str, Field]] = {}
    for node in nodes:
        with node.asked() as channel:
            known = channel.request(Op.EXPLAIN, b"", accept=namespaces)
            fields |= {number: json.loads(raw) for number, raw in known.items() if raw}
            after = b""
            for _ in range(PAGES_MAX):
                rows = channel.request(Op.LIST, after, LIST_ROWS_MAX, accept=block_rows)
                for row in rows:
                    lengths.setdefault(row.namespace_id, []).append(row.size_bytes)
                if len(rows) < LIST_ROWS_MAX:
                    break
                after = rows[-1].key
    shards: dict[str, list[int]] = {}
    for number in lengths:
        of = {n: v for n, v in fields.get(number, {"id": f"{number:08x}"}).items()
              if n not in OF_SHARDS}  # fmt: skip
        shards.setdefault(json.dumps(of), []).append(number)
    return [_model(json.loads(of), [lengths[number] for number in numbers])
            for of, numbers in shards.items()]  # fmt: skip


def _model(fields: dict[str, Field], lengths: Sequence[Sequence[int]]) -> Model:
    means = [sum(each) / len(each) for each in lengths]
    tokens = next((n for name in TOKENS if isinstance(n := fields.get(name), int) and n > 0), None)
    a_token = sum(means) / tokens if tokens else None
    name = str(fields.get("model") or fields.get("name") or fields.get("weights") or fields["id"])
    return Model(name, len(means), round(sum(means) / len(means)), tokens, a_token, fields)


def _text(models: Sequence[Model], planned: Sequence[Planned]) -> str:
    seen = [
        (
            one.model,
            one.shards,
            human_bytes(one.block_bytes),
            one.block_tokens or "-",
            human_bytes(one.token_bytes) if one.token_bytes else "-",
            f"{(1 << 30) / one.token_bytes:.0f} tokens" if one.token_bytes else "-",
        )
        for one in models
    ]
    curves = [
        (
            one.node,
            human_bytes(one.size_bytes),
            *(f"{one.hit_rate[f'{t:g}']:.2f}" if one.hit_rate else "-" for t in SHOWN),
            "-" if one.unlimited_hit_rate is None else f"{one.unlimited_hit_rate:.2f}",
            "-" if one.recommended_bytes is None else human_bytes(one.recommended_bytes),
        )
        for one in planned
    ]
    lines = [table(MODEL_COLUMNS, seen), ""] if seen else ["no blocks yet", ""]
    lines += [table(NODE_COLUMNS, curves)]
    lines += [f"{one.node}: {one.why_not}" for one in planned if one.why_not]
    return "\n".join(
        [
            *lines,
            "",
            "x2: what twice the size would find, of blocks saved to and read from these nodes; a "
            "save counts",
            "as a miss, also of generated tokens. Hits in engines' own caches are not in it.",
        ]
    )
