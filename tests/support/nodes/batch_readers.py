"""The readers of a batch of blocks (kvstore/segment/batch_read.py), and one that does nothing."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hatch_build
from kvstore.segment import batch_read
from kvstore.segment.batch_read import BatchReader, CompiledReader, PythonReader, Values


class LeavesAll:
    """Leaves every block to who reads one by one."""

    name = "none"
    suits_one = False

    def read(self, segment: Any, keys: list[Any], *_: Any) -> Values:
        return [None] * len(keys), 0

    def copy_each(self, targets: list[memoryview], sources: list[memoryview]) -> None:
        PythonReader().copy_each(targets, sources)

    def records(self, *_: Any) -> None:
        return None


class CopiesBy(LeavesAll):
    """Calls `copy` for each copy of a put."""

    def __init__(self, copy: Callable[[memoryview, memoryview], object]) -> None:
        self._copy = copy

    def copy_each(self, targets: list[memoryview], sources: list[memoryview]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._copy(target, source)


class Meddled:
    """Reads as the process's own reader does, and calls `copied` after each copy."""

    def __init__(self, copied: Callable[[], object]) -> None:
        self._reader = batch_read.READER
        self.name, self.suits_one = self._reader.name, self._reader.suits_one
        self._copied = copied

    def read(self, *arguments: Any) -> Values:
        return self._reader.read(*arguments, copied=self._copied)

    def copy_each(self, targets: list[memoryview], sources: list[memoryview]) -> None:
        self._reader.copy_each(targets, sources)

    def records(self, *arguments: Any) -> list[bytes | None] | None:
        return self._reader.records(*arguments)


def compiled_module(source: Path, where: Path) -> Any:
    """Build a compiled part and load it; skips where that cannot be."""
    name = f"_{source.stem}"
    target = where / f"{name}.abi3.so"
    try:
        hatch_build.build(source, target)
    except hatch_build.CannotBuildError as e:
        pytest.skip(f"the compiled part cannot be built here: {e}")
    spec = importlib.util.spec_from_file_location(name, target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _module() -> Any:
    with tempfile.TemporaryDirectory(prefix="kvb-") as where:
        return compiled_module(batch_read.SOURCE, Path(where))


def streaming_reader(pages: bool) -> BatchReader:
    """The compiled reader, streaming as it does on processors of Intel's (`pages`) or of others."""
    _module().stream_pages(pages)
    return CompiledReader(_module())


READERS = ("Python", "compiled")


def reader_of(name: str) -> BatchReader:
    """The reader of that name, built of the source as it is now."""
    return PythonReader() if name == "Python" else CompiledReader(_module())
