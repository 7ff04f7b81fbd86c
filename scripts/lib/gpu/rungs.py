"""Runs one kind of engines on this machine's device.

    python scripts/lib gpu.rungs NAME [--rows FILE] [--folder FOLDER]

eager     one engine without CUDA graphs saves, forgets and loads
graphs    the same with CUDA graphs, nothing compiled
vram      a consumer reads a producer's VRAM; the producer is killed
default   as users start them: one only saves, a second only loads, a third does both
cliff     throughput when there are more users than the engine's KV memory has room for, without
          a store, with this one and with vLLM's own (see cliff.py)
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path

from gpu import cliff, engine
from gpu.rows import Rows

BY_DEFAULT = {"eager": 120, "graphs": 130, "vram": 150, "default": 240}
"""Seconds that each may take, in their order."""
CLIFF = {"cliff": cliff.LIMIT_S}


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*BY_DEFAULT, *CLIFF])
    parser.add_argument("--rows", type=Path, help="write rows to the end of this file too")
    parser.add_argument("--folder", type=Path, help="for models and the engines' logs; it stays")
    options = parser.parse_args()
    if find_spec("vllm") is None:
        print(f"SKIPPED real engines ({options.name}): this Python has no vLLM")
        return 0
    rows = Rows(options.name, options.rows)
    with tempfile.TemporaryDirectory() as name:
        # Not removed where it is given: what is ended in the middle has left its logs, too.
        folder: Path = options.folder or Path(name)
        folder.mkdir(exist_ok=True)
        try:
            if options.name in CLIFF:
                wrong = cliff.run(folder, rows.say)
            else:
                wrong = engine.RUNGS[options.name](folder)
                rows.say("what was wrong", len(wrong), most=0)
        except engine.DidNotStartError as e:
            wrong = str(e).splitlines()
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
