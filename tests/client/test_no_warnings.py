"""Under `-X dev -W error`: a client that was closed has left nothing open."""

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


@pytest.mark.parametrize(
    "program",
    [PUT_AND_GET, ASYNCIO],
    ids=["put-and-get", "asyncio"],
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
