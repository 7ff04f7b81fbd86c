"""What a node writes for many blocks at once (kvstore/compiled/block_writes.c), built of the source
as it is now."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from batch_readers import compiled_module

from kvstore.compiled import part


@functools.cache
def block_writes() -> Any:
    """The module; skips where it cannot be built."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as where:
        return compiled_module(part.BLOCK_WRITES_SOURCE, Path(where))
