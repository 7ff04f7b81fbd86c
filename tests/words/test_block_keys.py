"""The keys of a prompt's blocks, and of names, are the same in Python and compiled
(compiled/block_keys.c): hashes that anybody can compute."""

from __future__ import annotations

import random
import sys
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batch_readers import compiled_module
from each_input import each

from kvstore import Namespace, keys
from kvstore.compiled import part
from kvstore.errors import UsageError
from kvstore.keys import (
    IN_PYTHON,
    RUN_BLOCKS,
    Hasher,
    bind_hashes,
    chain,
    hash_blocks,
    hash_names,
    hasher,
)
from kvstore.limits import USER_KEY_BYTES_MAX

ROOT = bytes(range(32))
COMPILED = ("block_keys", "value_keys", "engine_keys", "chained_hashes")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = compiled_module(part.BLOCK_KEYS_SOURCE, tmp_path_factory.mktemp("built"))
    if not module.FAST:
        pytest.skip("this CPU has no instructions for SHA-256")
    return module


def hasher_of(module: Any) -> Hasher:
    return Hasher(*(getattr(module, name) for name in COMPILED))


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


def test_compiled_they_are_the_same_for_every_size_of_a_block(compiled: Any) -> None:
    """Every place at which a block may end within a part of 64 bytes, with and without room for
    its length."""
    for step, count in product([*range(1, 300), 1023, 1024, 1025, 4096], (0, 1, 2, 5)):
        raw = random.Random(step).randbytes(step * count)
        expected = by_hand(ROOT, raw, step, RUN_BLOCKS)
        assert hash_blocks(ROOT, raw, step, RUN_BLOCKS) == expected, (step, count)
        assert compiled.block_keys(ROOT, raw, step, RUN_BLOCKS) == expected, (step, count)


@each("count", [63, 64, 65, 127, 128, 129, 300])
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
    for one in (IN_PYTHON, hasher_of(compiled)):
        monkeypatch.setattr(keys, "HASHER", one)
        made.append(Namespace.named("n").block_keys(range(1000), 16))
    raw = b"".join(i.to_bytes(4, "little") for i in range(992))
    assert made == [by_hand(Namespace.named("n")._of_blocks, raw, 64, RUN_BLOCKS)] * 2


@each(
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


@each("step", [1, 4, 31, 32, 33, 64, 256, 1024])
@each("count", [0, 1, 2, 5])
def test_hashes_are_chained_over_blocks_and_what_else_there_is(
    compiled: Any, step: int, count: int
) -> None:
    draw = random.Random(step)
    blocks = draw.randbytes(step * count + step - 1)  # a part of a block is no block
    others = [draw.randbytes(draw.choice([0, 1, 1, 5, 90])) for _ in range(count)]
    expected, last = [], ROOT
    for i, other in enumerate(others):
        last = sha256(last + blocks[i * step : (i + 1) * step] + other).digest()
        expected.append(last)
    for made in (chain, compiled.chained_hashes):
        assert made(ROOT, blocks, step, others) == expected
        assert made(ROOT, bytearray(blocks), step, others) == expected


@pytest.mark.parametrize(
    "arguments",
    [(ROOT[1:], b"abcd", 4, [b""]), (ROOT, b"abcd", 0, [b""]), (ROOT, b"abc", 4, [b""])],
)
def test_what_cannot_be_chained_is_an_error(compiled: Any, arguments: Any) -> None:
    with pytest.raises(ValueError, match="a hash has 32 bytes"):
        compiled.chained_hashes(*arguments)
    with pytest.raises(TypeError):
        compiled.chained_hashes(ROOT, b"abcdefgh", 4, [b"", "text"])


@each("count", [0, 1, 63, 64, 65, 129])
def test_an_engines_hashes_have_the_same_keys_by_either(compiled: Any, count: int) -> None:
    hashes = [random.Random(i).randbytes(i % 70) for i in range(count)]
    digests = [sha256(ROOT + one).digest()[:24] for one in hashes]
    for run_blocks in (1, 3, RUN_BLOCKS):
        heads = [max(i - i % run_blocks - 1, 0) for i in range(count)]
        expected = [digests[at][:8] + digest for at, digest in zip(heads, digests, strict=True)]
        for made in (bind_hashes, compiled.engine_keys):
            assert made(ROOT, hashes, run_blocks) == expected


def test_what_is_no_hash_of_an_engine_is_an_error(compiled: Any) -> None:
    for root, run_blocks in ((ROOT[1:], 64), (ROOT, 0)):
        with pytest.raises(ValueError, match="a root has 32 bytes"):
            compiled.engine_keys(root, [b"h"], run_blocks)
    with pytest.raises(TypeError):
        compiled.engine_keys(ROOT, [b"h", 7], 64)


def name_by_hand(root: bytes, raw: bytes) -> bytes:
    digest = sha256(root + raw).digest()
    return digest[:8] + digest[:24]


def test_names_of_every_length_have_the_same_keys(compiled: Any) -> None:
    """Every place at which a name may end within a part of 64 bytes."""
    raws = [random.Random(n).randbytes(n) for n in [*range(1, 300), USER_KEY_BYTES_MAX]]
    expected = [name_by_hand(ROOT, raw) for raw in raws]
    for made in (hash_names, compiled.value_keys):
        assert made(ROOT, raws, USER_KEY_BYTES_MAX) == expected


def test_text_has_the_key_of_its_utf8(compiled: Any) -> None:
    texts = ["a", "ünïcode", "漢字", "\N{GRINNING FACE}", "with\0zero"]
    for made in (hash_names, compiled.value_keys):
        assert made(ROOT, texts, 100) == made(ROOT, [t.encode() for t in texts], 100)


class Text(str):
    __slots__ = ()


class Raw(bytes):
    pass


@each(
    ("name", "why"),
    [
        (b"", "must have 1 to"),
        ("", "must have 1 to"),
        (b"x" * (USER_KEY_BYTES_MAX + 1), "must have 1 to"),
        ("ü" * (USER_KEY_BYTES_MAX // 2 + 1), "must have 1 to"),
        ("\ud800", "lone surrogates"),
        (7, "must be str or bytes"),
        (None, "must be str or bytes"),
        (bytearray(b"x"), "must be str or bytes"),
        (memoryview(b"x"), "must be str or bytes"),
    ],
)
def test_what_is_no_name_has_no_key_and_is_refused_by_either(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, name: Any, why: str
) -> None:
    names = ["a", name, Text("b"), Raw(b"c")]
    for one in (IN_PYTHON, hasher_of(compiled)):
        right = [name_by_hand(ROOT, raw) for raw in (b"a", b"b", b"c")]
        assert one.names(ROOT, names, USER_KEY_BYTES_MAX) == [right[0], None, *right[1:]]
        monkeypatch.setattr(keys, "HASHER", one)
        with pytest.raises(UsageError, match=why):
            Namespace.named("n").value_keys(names)


def test_a_root_of_another_length_is_an_error_for_names_too(compiled: Any) -> None:
    for root in (ROOT[1:], ROOT + b"x"):
        with pytest.raises(ValueError, match="a root has 32 bytes"):
            compiled.value_keys(root, ["a"], 100)


def test_the_variable_and_the_cpu_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: Any = SimpleNamespace(FAST=True, SOURCE_CRC32=0, **{name: name for name in COMPILED})
    monkeypatch.setitem(sys.modules, "built", fits)
    monkeypatch.setattr(part, "BLOCK_KEYS_SOURCE", Path("not installed.c"))
    assert hasher(None, "built") == COMPILED
    assert hasher("yes", "built") == COMPILED
    assert hasher("no", "built") is IN_PYTHON
    assert hasher(None, "not_there") is IN_PYTHON
    with pytest.raises(ImportError):
        hasher("yes", "not_there")
    fits.FAST = False
    assert hasher("yes", "built") is IN_PYTHON
    monkeypatch.setattr(part, "BLOCK_KEYS_SOURCE", Path(part.__file__))
    fits.FAST = True
    assert hasher(None, "built") is IN_PYTHON, "it is of another source"
