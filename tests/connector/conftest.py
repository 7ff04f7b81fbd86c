"""Where the code that starts engines is (scripts/lib), for tests and their processes."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))
