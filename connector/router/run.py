"""Reads the command line of the router and runs it until a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from connector.limits import ROUTER_STOP_S
from connector.router.clients import Acceptor
from connector.router.discovery import SCHEME, Name
from connector.router.prefix import Prefixes
from connector.router.routing import Engine, EngineFleet, Role
from connector.router.server import Router, RouterSettings
from kvstore import KVStoreError, Locator, Residency, raise_open_files_limit

EPILOG = """An engine is http://HOST:PORT, or http://HOST:PORT@NODE, where NODE is the memory node
that it reads without a network: its name, or its host's as `kvstore stat` shows it. Requests go
to the engine beside the longest prefix. dns+http://NAME:PORT is one engine at each address of
NAME, looked up again and again. --prefill and --decode may be given several times."""


def is_no_bad_http(record: logging.LogRecord) -> bool:
    """Return whether it tells of more than a client that speaks no HTTP, or whose body cannot be
    unpacked: that one hears so himself, and whoever can connect would fill the log with
    tracebacks."""
    raised = record.exc_info[1] if record.exc_info else None
    return not isinstance(raised, HttpProcessingError | web.RequestPayloadError)


def main() -> int:
    defaults = RouterSettings()
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
    parser.add_argument("--timeout-s", type=float, default=defaults.timeout_s)
    parser.add_argument("--save-wait-s", type=float, default=defaults.save_wait_s)
    parser.add_argument(
        "--no-tokenize", action="store_true", help="do not ask engines for the tokens of texts"
    )
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(is_no_bad_http)
    try:
        settings = RouterSettings(
            timeout_s=options.timeout_s,
            save_wait_s=options.save_wait_s,
            tokenize=not options.no_tokenize,
        )
        given = [(Role.PREFILL, text) for text in options.prefill]
        given += [(Role.DECODE, text) for text in options.decode]
        names = [Name.parse(*one) for one in given if one[1].startswith(SCHEME)]
        fleet = EngineFleet([Engine.parse(*one) for one in given if not one[1].startswith(SCHEME)])
        residency = Residency(options.events) if options.events else None
        locator = Locator(options.url, key_prefix=options.key_prefix)
    except KVStoreError as e:
        print(f"kvstore-router: {e}", file=sys.stderr)
        return 1
    raise_open_files_limit()
    app = Router(fleet, Prefixes(locator, residency), settings, names).app()
    try:
        asyncio.run(serve(app, options.host, options.port))
    except OSError as e:
        print(f"kvstore-router: {options.host}:{options.port} cannot be used: {e}", file=sys.stderr)
        return 1
    return 0


async def serve(app: web.Application, host: str, port: int) -> None:
    """Serve until a signal says to end. Raises `OSError` when the address cannot be used."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that hangs up ends its request in the engine too
        shutdown_timeout=ROUTER_STOP_S / 2,  # which aiohttp waits twice
    )
    await runner.setup()
    assert runner.server is not None
    clients = Acceptor(runner.server)
    try:
        await clients.listen(host, port)
        await stop.wait()
    finally:
        clients.close()
        await runner.cleanup()
