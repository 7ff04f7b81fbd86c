"""`kvstore ls` lists the blocks on this host's nodes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.cli.options import KEY_PREFIX_DEFAULT, add_store, at_least_one, run_dir_of
from kvstore.cli.output import as_json, human_age, human_bytes, printable, table
from kvstore.cli.store import LocalNode, local_nodes
from kvstore.errors import NodeUnavailableError
from kvstore.index.redis.url import parse_url
from kvstore.keys import Namespace
from kvstore.limits import LIST_ROWS_MAX
from kvstore.protocol.control import Op
from kvstore.protocol.control_replies import block_rows, namespaces

LIMIT_DEFAULT = 1000
COLUMNS = ("KEY", "KIND", "SIZE", "AGE", "USED", "NAMESPACE", "PINS", "NODE")
LEFT = 1
ELASTIC = (0, 5, 7)
EPILOG = """\
KEY is what a value was saved under; of blocks, and of values saved before the node's last start,
only the hash is known. AGE is the time since it was saved, USED since it was last used ("-":
before the node's last start). NAMESPACE is a name, or the model where it is made of fields; an id
where no client has told since that start. --json has them in full.
"""


class Block(NamedTuple):
    """Describes one block as a node lists it."""

    key: str
    """The hash, in hexadecimal."""
    name: str | None
    """What its user calls it; None when the node does not know."""
    kind: str
    size_bytes: int
    age_s: float | None
    idle_s: float | None
    namespace_id: str
    namespace: dict[str, object] | None
    """Its fields; None when the node does not know."""
    pins: int
    node: str


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
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
    if args.url is not None:
        parse_url(args.url)  # nodes are found without it: it has to be one all the same
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
        print(table(COLUMNS, [_row(block) for block in blocks], left=LEFT, elastic=ELASTIC))
    if more:
        print(
            f"kvstore: there are more blocks than --limit {args.limit}: ask for more",
            file=sys.stderr,
        )
    return 0


def _row(block: Block) -> tuple[object, ...]:
    return (
        block.key if block.name is None else printable(block.name),
        block.kind,
        human_bytes(block.size_bytes),
        human_age(block.age_s),
        human_age(block.idle_s),
        printable(_named(block)),
        block.pins,
        block.node,
    )


def _named(block: Block) -> str:
    fields = block.namespace or {}
    return str(fields.get("name") or fields.get("model") or block.namespace_id)


def _blocks(node: LocalNode, namespace_id: int | None) -> Iterator[Block]:
    after = b""
    with node.asked() as channel:
        known = channel.request(Op.EXPLAIN, b"", accept=namespaces)
        fields = {number: json.loads(raw) for number, raw in known.items() if raw}
        while True:
            rows = channel.request(Op.LIST, after, LIST_ROWS_MAX, accept=block_rows)
            for row in rows:
                if namespace_id is not None and row.namespace_id != namespace_id:
                    continue
                yield Block(
                    row.key.hex(),
                    row.name.decode(errors="backslashreplace") if row.name else None,
                    row.kind.name.lower(),
                    row.size_bytes,
                    row.age_s,
                    row.idle_s,
                    f"{row.namespace_id:08x}",
                    fields.get(row.namespace_id),
                    row.pins,
                    node.announcement.name,
                )
            if len(rows) < LIST_ROWS_MAX:
                return
            after = rows[-1].key
