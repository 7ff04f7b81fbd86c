"""`kvstore import` writes regions from an object store to a disk, for its node's next start."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from kvstore.cli import EXIT_FAILED
from kvstore.cli.object_store import EPILOG, URL_HELP, ObjectStore, signing_secrets
from kvstore.cli.options import size_bytes
from kvstore.node.config import DiskConfig
from kvstore.node.disk.disks import open_disk
from kvstore.secret import disk_keys
from kvstore.segment.disk.exported import RegionObjectError
from kvstore.segment.disk.imported import Importer


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add("url", metavar="URL", help=f"{URL_HELP}: what `kvstore export` was told")
    add("--disk", type=Path, required=True, metavar="DIR", help="of a node that does not run")
    add("--disk-size", type=size_bytes, required=True, metavar="SIZE", help="as for the node")
    add("--disk-force", action="store_true", help="as for the node")


def run(args: argparse.Namespace) -> int:
    secrets = signing_secrets()
    store = ObjectStore(args.url)
    names = store.names()
    disk = DiskConfig(args.disk, args.disk_size)
    blocks = refused = 0
    with contextlib.closing(
        open_disk(disk, 0, None, forced=args.disk_force, keys=disk_keys())
    ) as device:
        importer = Importer(device, secrets)
        # The newest, in their order: a node writes the oldest over first.
        chosen = names[max(len(names) - len(importer.free), 0) :]
        for name in chosen:
            try:
                count = importer.take(name, store.reader(name))
                print(f"{name}: {count} blocks", flush=True)
                blocks += count
            except RegionObjectError as e:
                print(f"kvstore: refused: {e}", file=sys.stderr)
                refused += 1
    left = len(names) - len(chosen)
    text = f"{blocks} blocks of {len(chosen) - refused} regions imported, {refused} refused"
    print(f"{device.file.name}: {text}, {left} left out for want of room")
    return EXIT_FAILED if refused else 0
