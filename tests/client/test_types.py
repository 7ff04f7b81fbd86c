"""What a type checker says of code that calls the client, README's first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("mypy")
# The whole of `kvstore` is read, which takes most of a minute where nobody has done so before.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CALLS = """
import os
from array import array
from pathlib import Path
from typing import assert_type

import numpy as np
from kvstore import AsyncClient, Client, Explanation, Pinned, Retained, StreamSecurity
from kvstore.types import Array

with Client(run_dir="a") as c, Client(run_dir=Path("a")) as d:
    c.put("k", b"v")
    for value in (bytearray(1), memoryview(b"v"), array("i", [1]), np.zeros(3), np.float32(1)):
        c.put("k", value)
    c.put_many({"k": b"v", "a": np.zeros(3)})
    c.put_many([("k", b"v"), (b"l", bytearray(2))])
    assert_type(c.get("k"), bytes | Array | None)
    assert_type(c.get("k", out=bytearray(5)), memoryview | None)
    assert_type(c.get_many(["k"], out=[bytearray(5)]), list[memoryview | None])
    filled = c.get("k", out=np.zeros(3))
    print(filled.sum() if filled is not None else None)
    for one in c.get_many(["k"], out=[np.zeros(3)]):
        print(one.shape if one is not None else None)
    found = c.get("k")
    if isinstance(found, np.ndarray):
        print(found.dtype)
    c.get_many(["k", "l"], out=np.zeros((2, 8), np.uint8))
    for tokens in (range(256), [1, 2], (1, 2), np.arange(256), array("i", [1])):
        c.put_blocks(tokens, [b"block"])
        c.match_prefix(tokens)
        c.get_blocks(tokens, [bytearray(5)])
        assert_type(c.explain(tokens), Explanation)
    c.put_blocks(range(256), np.zeros((1, 8)))
    assert_type(c.explain_key("k"), Explanation)
    assert_type(c.delete_many(["k", b"l"]), list[bool])
    assert_type(c.retain("k", for_s=5), Retained)
    with c.pin("k") as p:
        assert_type(p, Pinned | None)
    pinned = c.pin("k")
    if pinned:
        assert_type(pinned, Pinned)
    if not pinned:
        raise SystemExit
    print(pinned.buffer)
    StreamSecurity(secret=b"x" * 16, tls_ca="ca.pem")


async def same(c: AsyncClient) -> None:
    assert_type(await c.get("k"), bytes | Array | None)
    assert_type(await c.get("k", out=bytearray(5)), memoryview | None)
    assert_type(await c.get_many(["k"], out=[bytearray(5)]), list[memoryview | None])
    assert_type(await c.explain_key("k"), Explanation)
    assert_type(await c.delete_many(["k"]), list[bool])
    with await c.pin("k") as p:
        assert_type(p, Pinned | None)
"""
WRONG = {
    "a pin that may be a miss": ('with c.pin("k") as p:\n        p.buffer', "union-attr"),
    "a default taken for out": ('c.get("k", b"default")', "call-overload"),
    "a time that bounds": ('c.retain("k", ttl_s=5)', "call-arg"),
    "a value of no kind": ('c.put("k", object())', "arg-type"),
    "text as tokens": ('c.match_prefix("text")', "arg-type"),
    "a path that is none": ("Client(run_dir=5)", "arg-type"),
}


def said(code: str, tmp_path: Path) -> str:
    """What mypy says with --strict; empty when it is content."""
    program = tmp_path / "program.py"
    program.write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_readmes_python_is_strictly_typed(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert said(block, tmp_path) == ""


def test_what_is_accepted_and_returned_has_its_type(tmp_path: Path) -> None:
    assert said(CALLS, tmp_path) == ""


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told(case: str, tmp_path: Path) -> None:
    call, code = WRONG[case]
    told = said(f"from kvstore import Client\n\nwith Client() as c:\n    {call}\n", tmp_path)
    assert f"[{code}]" in told, told
