"""Defines options that several commands share."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import TextIO

from kvstore import rundir
from kvstore.errors import UsageError
from kvstore.index.open import URL_VARIABLE
from kvstore.settings.toml_file import CONFIG
from kvstore.system.last_resort import start_log

KEY_PREFIX_DEFAULT = "kv:default"
NAMESPACE_DEFAULT = "default"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,19})?)\s*([kmgtp]?)(?:(i?)b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def size_bytes(text: str) -> int:
    """Return bytes of `1GiB`, `512MiB`, `1.5G` or a number. Units are powers of two, as memory is
    bought in them."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1GiB, 512MiB or 1048576")
    return int(float(found[1]) * 1024 ** _POWERS[found[2].lower()])


def add_store(
    parser: argparse.ArgumentParser, *, namespace: bool = False, file: bool = False
) -> None:
    """Add the options that say which store: its Redis, its prefix there, its run directory.

    With `file`, what is not given is left to the operator's file.
    """
    parser.add_argument(
        "--url", help=f"the index's Redis (default: {URL_VARIABLE}, else the embedded Redis)"
    )
    parser.add_argument(
        "--key-prefix",
        default=None if file else KEY_PREFIX_DEFAULT,
        metavar="PREFIX",
        help="of the index's keys; stores with different ones are apart "
        f"(default: {KEY_PREFIX_DEFAULT})",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help=f"where processes of this host find each other (default: {rundir.RUN_DIR_ENV}, "
        "else one for this user)",
    )
    if namespace:
        parser.add_argument(
            "--namespace",
            default=NAMESPACE_DEFAULT,
            metavar="NAME",
            help="keys in different ones are apart (default: %(default)s)",
        )


def add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v", "--verbose", action="count", default=0, help="say more on standard error (-vv: all)"
    )
    parser.add_argument(
        "--log-json", action="store_true", help="log one JSON object a line on standard error"
    )


def log_options(args: argparse.Namespace) -> list[str]:
    """Return the options of `add_verbose` for a process that logs as this one does."""
    return [*("-v" for _ in range(args.verbose)), *(["--log-json"] if args.log_json else [])]


def start_logging(args: argparse.Namespace) -> None:
    """Log to standard error; a command's own output stays alone on standard output."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(args.verbose, 2)]
    start_log(level, as_json=args.log_json)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def run_dir_of(args: argparse.Namespace) -> Path:
    return rundir.run_dir(args.run_dir)


def at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return number


def no_password(url: str) -> str:
    """`url` without user name and password, for messages."""
    from kvstore.index.redis.url import parse_url

    try:
        return parse_url(url).label
    except UsageError:
        return "(not a URL)"


def use_config(path: Path) -> None:
    """Make `path` the operator's file of this process and of those that it starts."""
    os.environ[CONFIG] = str(path)


def standard_input(field: str) -> TextIO:
    """Return it. Raises `UsageError` where whoever started this has closed it."""
    if sys.stdin is None:
        raise UsageError(field, "-", "standard input is closed: name a file")
    return sys.stdin
