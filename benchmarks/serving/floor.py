"""Says of each prompt how many of its tokens an unlimited cache would have: row `floor`.

What a store can win at most is the prompts' computing. A connector that answers with these tokens
at once, and loads and saves nothing, shows how fast the engines are with a store that costs no
time at all; their answers are wrong on purpose, and are as long as all others.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.serving.sessions import Session

SETTING = "possible"
"""In kv_connector_extra_config: the file that `write_possible` wrote."""


def name_of(prompt: Iterable[int]) -> str:
    """Return the name of a prompt in the file."""
    return hashlib.sha256(array("I", prompt).tobytes()).hexdigest()


def write_possible(path: Path, sessions: Sequence[Session], block_tokens: int) -> None:
    """Write which tokens of each prompt an unlimited shared cache of such blocks would have."""
    possible = {
        name_of(request.prompt): request.possible_tokens(block_tokens)
        for session in sessions
        for request in session
    }
    path.write_text(json.dumps(possible))


def read_possible(path: Path) -> dict[str, int]:
    possible: dict[str, int] = json.loads(path.read_text())
    return possible


def matched_tokens(possible: Mapping[str, int], prompt: Iterable[int], computed: int) -> int:
    """Return how many tokens beyond those that the engine has such a cache would bring."""
    return max(possible.get(name_of(prompt), 0) - computed, 0)
