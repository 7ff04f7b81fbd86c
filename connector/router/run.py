"""Reads the command line of the router and runs it until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from connector.limits import ROUTER_STOP_S
from connector.router.clients import Acceptor
from connector.router.discovery import SCHEME, Name
from connector.router.options import parse
from connector.router.prefix import Prefixes
from connector.router.routing import Engine, EngineFleet, Role
from connector.router.server import Router, RouterSettings
from kvstore import KVStoreError
from kvstore.spi import Locator, Residency, raise_open_files_limit, start_log

TIMES = ("timeout_s", "save_wait_s")


def is_no_bad_http(record: logging.LogRecord) -> bool:
    """Return whether it tells of more than a client that speaks no HTTP, or whose body cannot be
    unpacked: that one hears so himself, and whoever can connect would fill the log with
    tracebacks."""
    raised = record.exc_info[1] if record.exc_info else None
    return not isinstance(raised, HttpProcessingError | web.RequestPayloadError)


def main() -> int:
    options = parse()
    start_log(logging.INFO, as_json=options.log_json)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(is_no_bad_http)
    try:
        times = {name: vars(options)[name] for name in TIMES if name in options}
        settings = RouterSettings(**times, tokenize=not options.no_tokenize)
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
