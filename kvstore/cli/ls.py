"""`kvstore ls`: the blocks on this host's nodes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.cli.options import KEY_PREFIX_DEFAULT, add_store, at_least_one, run_dir_of
from kvstore.cli.output import as_json, table
from kvstore.cli.store import LocalNode, local_nodes
from kvstore.client.answers import block_rows
from kvstore.core.wire import Op
from kvstore.errors import NodeUnavailableError
from kvstore.hashing import Namespace
from kvstore.limits import BATCH_KEYS_MAX

LIMIT_DEFAULT = 1000


class Block(NamedTuple):
    key: str
    size_bytes: int
    namespace_id: str
    pins: int
    node: str


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        type=at_least_one,
        default=LIMIT_DEFAULT,
        metavar="N",
        help="show at most so many (default: %(default)s)",
    )
    parser.add_argument("--namespace", metavar="NAME", help="only those of this namespace")
    parser.add_argument("--json", action="store_true", help="one JSON list")
    add_store(parser)


def run(args: argparse.Namespace) -> int:
    nodes = local_nodes(run_dir_of(args), args.key_prefix)
    if not nodes:
        prefix = f" with key prefix {args.key_prefix}" * (args.key_prefix != KEY_PREFIX_DEFAULT)
        raise NodeUnavailableError(f"no memory node{prefix} on this host: `kvstore up` starts one")
    wanted = Namespace.named(args.namespace).id if args.namespace else None
    blocks: list[Block] = []
    more = False
    for node in nodes:
        for block in _blocks(node, wanted):
            if len(blocks) == args.limit:
                more = True
                break
            blocks.append(block)
    if args.json:
        print(as_json([block._asdict() for block in blocks]))
    else:
        print(table(("KEY", "BYTES", "NAMESPACE", "PINS", "NODE"), blocks))
    if more:
        print(f"kvstore: there are more; --limit is {args.limit}", file=sys.stderr)
    return 0


def _blocks(node: LocalNode, namespace_id: int | None) -> Iterator[Block]:
    after = b""
    with node.asked() as channel:
        while True:
            rows = channel.request(Op.LIST, after, BATCH_KEYS_MAX, accept=block_rows)
            for key, length, block_namespace_id, pins in rows:
                if namespace_id is None or block_namespace_id == namespace_id:
                    yield Block(
                        key.hex(), length, f"{block_namespace_id:08x}", pins, node.word.name
                    )
            if len(rows) < BATCH_KEYS_MAX:
                return
            after = rows[-1][0]
