"""Defines the command line of the router, which needs nothing that may not be installed."""

from __future__ import annotations

import argparse

EPILOG = """An engine is http://HOST:PORT, or http://HOST:PORT@NODE, where NODE is the memory node
that it reads without a network: its name, or its host's as `kvstore stat` shows it. Requests go
to the engine beside the longest prefix. dns+http://NAME:PORT is one engine at each address of
NAME, looked up again and again. --prefill and --decode may be given several times."""


def parse() -> argparse.Namespace:
    """Return the options of the command line; a time that it does not contain is left out."""
    parser = argparse.ArgumentParser(
        prog="kvstore-router",
        description="Send requests to prefill and decode engines that share a store.",
        epilog=EPILOG,
    )
    parser.add_argument("--prefill", action="append", default=[], metavar="ENGINE")
    parser.add_argument("--decode", action="append", default=[], metavar="ENGINE", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--url", help="the index's Redis (default: KVSTORE_URL, else the embedded)")
    parser.add_argument("--key-prefix", default="kv:default")
    parser.add_argument(
        "--events",
        action="append",
        default=[],
        metavar="ENDPOINT",
        help="of every node, as `kvstore node --events` has it: finds prefixes without the index",
    )
    parser.add_argument("--timeout-s", type=float, default=argparse.SUPPRESS)
    parser.add_argument("--save-wait-s", type=float, default=argparse.SUPPRESS)
    parser.add_argument(
        "--no-tokenize", action="store_true", help="do not ask engines for the tokens of texts"
    )
    parser.add_argument(
        "--log-json", action="store_true", help="log one JSON object a line on standard error"
    )
    return parser.parse_args()
