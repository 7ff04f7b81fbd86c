"""Where the code of scripts is (scripts/lib), for tests that import it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lib"))
