"""Where the code that starts clusters and engines is (scripts/lib), for tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lib"))
