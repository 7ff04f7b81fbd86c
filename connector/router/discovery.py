"""Looks up names that stand for several engines: `dns+http://NAME:PORT` is one at each address.

So engines may come and go (`docker compose up --scale`, a headless Kubernetes service).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from connector.router.routing import DOWN_S, Engine, EngineFleet, Role
from kvstore import UsageError

log = logging.getLogger("kvstore.router")

SCHEME = "dns+http://"
EVERY_S = 2.0
LOOK_UP_TIMEOUT_S = 5.0
"""Time to wait for a name's addresses; the next look-up waits again."""
UNKNOWN = (socket.EAI_NONAME, socket.EAI_NODATA)
"""Answers of a name server that mean that nobody has the name; after other errors nothing is
known."""


@dataclass(slots=True)
class Name:
    """Holds one name, and what its engines have in common."""

    host: str
    port: int
    role: Role
    at: str
    found: list[Engine] = field(default_factory=list)
    """Engines at the last look-up that was answered."""
    _asked: asyncio.Future[list[Any]] | None = None
    """A question without an answer yet. It holds a thread, so there is one at a time."""

    @classmethod
    def parse(cls, role: Role, text: str) -> Name:
        where, _, at = text.partition("@")
        try:
            parts = urlsplit(where)
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError:
            host = port = None
        if not where.startswith(SCHEME) or not host or not port:
            raise UsageError(role.value, text, f"must be {SCHEME}NAME:PORT, or that and @NODE")
        return cls(host, port, role, at)

    async def engines(self) -> list[Engine]:
        """Return no engine while there is no such name, and the former ones while no name server
        can be asked. New ones are passed over until they have answered a probe."""
        down_until = time.monotonic() + DOWN_S
        try:
            found = await self._look_up()
        except TimeoutError:
            log.warning("%s: no name server answers", self.host)
            return self.found
        except OSError as e:
            if e.errno in UNKNOWN:
                self.found = []
            else:
                log.warning("%s cannot be looked up: %s", self.host, e)
            return self.found
        addresses = sorted({str(entry[4][0]) for entry in found})
        hosts = [f"[{address}]" if ":" in address else address for address in addresses]
        self.found = [
            Engine(f"http://{host}:{self.port}", self.role, self.at, down_until=down_until)
            for host in hosts
        ]
        return self.found

    async def _look_up(self) -> list[Any]:
        if self._asked is None:
            question = asyncio.get_running_loop().getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM
            )
            self._asked = asyncio.ensure_future(question)
        done, _ = await asyncio.wait([self._asked], timeout=LOOK_UP_TIMEOUT_S)
        if not done:
            raise TimeoutError
        asked, self._asked = self._asked, None
        return asked.result()


async def resolve(names: list[Name], fleet: EngineFleet) -> None:
    """Look all names up once: the fleet then has the fixed engines and those at their addresses."""
    found = await asyncio.gather(*(name.engines() for name in names))
    before = {engine.url for engine in fleet.engines}
    fleet.replace([engine for engines in found for engine in engines])
    after = {engine.url for engine in fleet.engines}
    for url in sorted(after ^ before):
        log.info("engine %s %s", url, "joins" if url in after else "leaves")


async def keep_resolving(names: list[Name], fleet: EngineFleet) -> None:
    while True:
        await asyncio.sleep(EVERY_S)
        await resolve(names, fleet)
