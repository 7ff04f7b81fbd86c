"""`kvstore get KEY [-o FILE]` writes a value's bytes as they are."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgpack

from kvstore.cli import EXIT_MISS
from kvstore.cli.options import add_store, run_dir_of
from kvstore.cli.store import open_client
from kvstore.client.client import Client
from kvstore.errors import IndexUnavailableError, UsageError
from kvstore.types import Kind

_LIBRARIES = {Kind.NUMPY: "a numpy array", Kind.TORCH: "a torch tensor"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit codes: 0 it was there, 3 a miss (nothing is written), 1 the store could not be "
        "asked, 2 wrong use."
    )
    parser.add_argument("key", metavar="KEY")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    add_store(parser, namespace=True)


def run(args: argparse.Namespace) -> int:
    with open_client(args, run_dir_of(args)) as client:
        found = read_raw(client, args.key)
    if found is None:
        print(f"kvstore: {args.key}: miss", file=sys.stderr)
        return EXIT_MISS
    value, note = found
    if note:
        print(f"kvstore: {args.key}: {note}", file=sys.stderr)
    if args.output is None or args.output == "-":
        if sys.stdout is None:
            raise UsageError("output", "-", "standard output is closed: give -o FILE")
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
        return 0
    try:
        Path(args.output).write_bytes(value)
    except OSError as e:
        raise UsageError("output", args.output, f"cannot be written: {e.strerror}") from e
    return 0


def read_raw(client: Client, key: str) -> tuple[bytes, str] | None:
    """Return the bytes of a value and what they are if not plain bytes; None on a miss.

    Not `Client.get`: that makes an array or a tensor, and needs numpy or torch for it.
    """
    reader = client.session.reader
    found = reader.search((client.namespace.value_key(key),))
    (view,) = reader.read(found)
    if view is None:
        if found == [None] and reader.index_failures:
            raise IndexUnavailableError(
                "Redis did not answer in time: `kvstore doctor` says what is wrong"
            )
        return None
    payload, kind, data_bytes = bytes(view.buffer), view.kind, view.size_bytes
    if not view.valid():
        return None
    what = _LIBRARIES.get(Kind(kind))
    if what is None:
        return payload[:data_bytes], ""
    dtype, shape = msgpack.unpackb(payload[data_bytes:])
    return payload[:data_bytes], f"raw bytes of {what}, dtype {dtype}, shape {tuple(shape)}"
