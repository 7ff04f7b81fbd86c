"""Under `-X dev -W error`: a client leaves nothing open, whether anybody closes it or not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PUT_AND_GET = """
import gc
from kvstore import Client
with Client() as c:
    assert c.put("a", b"1") and c.get("a") == b"1"
    assert all(c.put_many({"b": bytes(100_000), "c": b"2"}))
    with c.pin("a") as pin:
        assert bytes(pin.buffer) == b"1"
    assert all(c.put_blocks(range(512), [bytes(100), bytes(100)]))
    c.match_prefix(range(512)), c.explain(range(600)), c.stats(), c.delete("a")
gc.collect()
"""
ASYNCIO = """
import asyncio, gc
from kvstore import AsyncClient
async def main():
    async with AsyncClient() as c:
        assert await c.put("k", b"v")
        assert await c.get("k") == b"v"
asyncio.run(main())
gc.collect()
"""
NEVER_CLOSED = """
from kvstore import Client
c = Client()
assert c.put("a", b"1") and c.get("a") == b"1"
"""
DROPPED = """
import gc
from kvstore import Client
def use():
    c = Client()
    assert c.put("a", b"1")
    return c.pin("a")
pin = use()
gc.collect()
assert bytes(pin.buffer) == b"1"
pin.close()
"""
ASYNCIO_NEVER_CLOSED = """
import asyncio
from kvstore import AsyncClient
async def main():
    c = AsyncClient()
    assert await c.put("k", b"v")
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "program",
    [PUT_AND_GET, ASYNCIO, NEVER_CLOSED, DROPPED, ASYNCIO_NEVER_CLOSED],
    ids=["put-and-get", "asyncio", "never-closed", "dropped", "asyncio-never-closed"],
)
def test_the_python_api_leaves_nothing_that_python_warns_of(tmp_path: Path, program: str) -> None:
    env = {k: v for k, v in os.environ.items() if k != "KVSTORE_URL"}
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program],
        env={**env, "KVSTORE_RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, "Warning" in ran.stderr) == (0, False), ran.stderr
