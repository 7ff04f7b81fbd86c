"""The keys of a prompt's blocks are the same in Python and compiled (compiled/block_keys.c):
chained hashes that anybody can compute."""

from __future__ import annotations

import random
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batch_readers import compiled_module

from kvstore import Namespace, keys
from kvstore.compiled import part
from kvstore.keys import RUN_BLOCKS, hash_blocks, hasher

ROOT = bytes(range(32))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = compiled_module(part.BLOCK_KEYS_SOURCE, tmp_path_factory.mktemp("built"))
    if not module.FAST:
        pytest.skip("this CPU has no instructions for SHA-256")
    return module


def by_hand(root: bytes, raw: bytes, step: int, run_blocks: int) -> list[bytes]:
    made, tags, digest = [], [], root
    for i in range(len(raw) // step):
        if i and i % run_blocks == 0:
            tags.append(digest[:8])
        digest = sha256(digest + raw[i * step : (i + 1) * step]).digest()
        if i == 0:
            tags.append(digest[:8])
        made.append(tags[-1] + digest[:24])
    return made


@pytest.mark.parametrize("step", [*range(1, 300), 1023, 1024, 1025, 4096])
def test_compiled_they_are_the_same_for_every_size_of_a_block(compiled: Any, step: int) -> None:
    """Every place at which a block may end within a part of 64 bytes, with and without room for
    its length."""
    for count in (0, 1, 2, 5):
        raw = random.Random(step).randbytes(step * count)
        expected = by_hand(ROOT, raw, step, RUN_BLOCKS)
        assert hash_blocks(ROOT, raw, step, RUN_BLOCKS) == expected
        assert compiled.block_keys(ROOT, raw, step, RUN_BLOCKS) == expected


@pytest.mark.parametrize("count", [63, 64, 65, 127, 128, 129, 300])
def test_compiled_they_have_the_same_tags(compiled: Any, count: int) -> None:
    raw = random.Random(count).randbytes(64 * count)
    for run_blocks in (1, 3, RUN_BLOCKS):
        expected = by_hand(ROOT, raw, 64, run_blocks)
        assert hash_blocks(ROOT, raw, 64, run_blocks) == expected
        assert compiled.block_keys(ROOT, raw, 64, run_blocks) == expected


def test_a_namespace_has_the_same_keys_by_either(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for one in (hash_blocks, compiled.block_keys):
        monkeypatch.setattr(keys, "HASH_BLOCKS", one)
        made.append(Namespace.named("n").block_keys(range(1000), 16))
    raw = b"".join(i.to_bytes(4, "little") for i in range(992))
    assert made == [by_hand(Namespace.named("n")._of_blocks, raw, 64, RUN_BLOCKS)] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        (ROOT[1:], b"", 4, 64),
        (ROOT + b"x", b"", 4, 64),
        (ROOT, b"", 0, 64),
        (ROOT, b"", -1, 64),
        (ROOT, b"", 4, 0),
    ],
)
def test_what_cannot_be_hashed_is_an_error(compiled: Any, arguments: Any) -> None:
    with pytest.raises(ValueError, match="a root has 32 bytes"):
        compiled.block_keys(*arguments)


def test_the_variable_and_the_cpu_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = SimpleNamespace(FAST=True, SOURCE_CRC32=0, block_keys=lambda *_: [])
    monkeypatch.setitem(sys.modules, "built", fits)
    monkeypatch.setattr(part, "BLOCK_KEYS_SOURCE", Path("not installed.c"))
    assert hasher(None, "built") is fits.block_keys
    assert hasher("yes", "built") is fits.block_keys
    assert hasher("no", "built") is hash_blocks
    assert hasher(None, "not_there") is hash_blocks
    with pytest.raises(ImportError):
        hasher("yes", "not_there")
    fits.FAST = False
    assert hasher("yes", "built") is hash_blocks
    monkeypatch.setattr(part, "BLOCK_KEYS_SOURCE", Path(part.__file__))
    fits.FAST = True
    assert hasher(None, "built") is hash_blocks, "it is of another source"
