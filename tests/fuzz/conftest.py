"""Every failure of this folder shows the seed that finds it again."""

from __future__ import annotations

import pytest
from seeds import SEED


@pytest.fixture(autouse=True)
def seed_is_shown() -> None:
    print(f"again: KVSTORE_FUZZ_SEED={SEED}")
