"""`kvstore export` copies regions of a node's disks to an object store."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from kvstore.cli import EXIT_FAILED
from kvstore.cli.object_store import EPILOG, URL_HELP, ObjectStore, signing_secrets
from kvstore.segment.disk import exported
from kvstore.segment.disk.file import FILE_NAME, open_read_only
from kvstore.system.filelock import is_locked


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add("url", metavar="URL", help=f"{URL_HELP}: one object a region")
    of = "of a node; while that runs the region that it writes to is left out; once for each"
    add("--disk", action="append", type=Path, required=True, metavar="DIR", help=of)


def run(args: argparse.Namespace) -> int:
    secret = signing_secrets()[0]
    store = ObjectStore(args.url, make=True)
    there = set(store.names())
    done = lost = 0
    for directory in args.disk:
        with contextlib.closing(open_read_only(directory)) as file:
            device = exported.opened(file)
            regions = sorted((one for one in device.states() if one.lap), key=lambda one: one.lap)
            # Asked after they were read: a node that starts later begins another one.
            in_use = is_locked(directory / FILE_NAME)
            for state in regions[: len(regions) - in_use]:
                if exported.object_name(device.uuid, *state) in there:
                    continue
                try:
                    region = exported.RegionObject(file, state)
                    if region.blocks:
                        store.put(region.name, region.pieces(secret))
                        print(f"{region.name}: {len(region.blocks)} blocks", flush=True)
                        done += 1
                except exported.RegionObjectError as e:
                    print(f"kvstore: left out: {e}", file=sys.stderr)
                    lost += 1
    print(f"{done} regions exported, {lost} left out")
    return EXIT_FAILED if lost else 0
