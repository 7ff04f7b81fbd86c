"""`kvstore put KEY [FILE|-]` saves a value: the bytes of a file or of standard input."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvstore.cli.options import add_store, run_dir_of, standard_input
from kvstore.cli.store import open_client
from kvstore.errors import UsageError
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.types import PutStatus


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY")
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="default: -, stdin")
    parser.add_argument("--replace", action="store_true", help="replace another value")
    parser.add_argument("--node", metavar="NAME", help="the node of this host to save to")
    add_store(parser, namespace=True)


def run(args: argparse.Namespace) -> int:
    value = _read(args.file)
    with open_client(args, run_dir_of(args), node=args.node) as client:
        result = client.put(args.key, value, replace=args.replace)
    if result:
        print(result.status.value)
        return 0
    why = {
        PutStatus.IN_PROGRESS: "another writer is saving this key",
        PutStatus.DIFFERS: "another value is stored under this key; --replace replaces it",
    }.get(result.status, result.reason)
    print(f"kvstore: {args.key}: not stored: {why}", file=sys.stderr)
    return 1


def _read(name: str) -> bytes:
    try:
        if name == "-":
            value = standard_input("file").buffer.read(VALUE_BYTES_MAX + 1)
        else:
            with Path(name).open("rb") as file:
                value = file.read(VALUE_BYTES_MAX + 1)
    except OSError as e:
        raise UsageError("file", name, f"cannot be read: {e.strerror}") from e
    if len(value) > VALUE_BYTES_MAX:
        raise UsageError("file", name, f"at most {VALUE_BYTES_MAX} bytes fit under one key")
    return value
