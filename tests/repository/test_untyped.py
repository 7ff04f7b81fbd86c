"""`Any` stands where a value really has no type, and no room gets more of it than it has.

What nobody looks into is `object`. What engines, CUDA and callers have of their own is a protocol
with what is used of it, the engine's own class, or one name for it (`kvstore.types.Value`,
`kvstore.cuda.base.Handle`, `connector.transfer.base_v1.VllmConfig`).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

from test_house import ROOT, tracked

SLACK = 3
"""How many more a room may be listed with than it has: who takes some out need not count."""
UNTYPED = {
    "connector": (4, "counters beside samples, values of an operator's JSON"),
    "connector/adapters/sglang": (1, "values of an operator's JSON"),
    "connector/adapters/tensorrt_llm": (2, "base classes that have moved between releases"),
    "connector/adapters/vllm": (5, "data of vLLM's statistics and settings, what tests stand in"),
    "connector/copiers": (6, "NVRTC's answers; payloads, which numpy takes as any buffer"),
    "connector/layout": (1, "vLLM's class of the attention backend"),
    "connector/router": (3, "answers of name servers, JSON of engines"),
    "connector/scheduler": (16, "what lock-step processes say to each other, JSON of requests"),
    "connector/transfer": (19, "an engine's own, under vLLM's names; a connector's own metadata"),
    "connector/worker": (9, "tasks of threads that do several kinds; options passed on"),
    "kvstore": (7, "values and rows of callers; JSON of other processes, TOML of operators"),
    "kvstore/cli": (2, "what --json prints; engines' settings in JSON"),
    "kvstore/client": (24, "values of callers before they are checked; bodies of answers; pyzmq"),
    "kvstore/core": (4, "bodies of answers in parts; options passed on"),
    "kvstore/cuda": (3, "cuda-python's module, and what its functions take and give"),
    "kvstore/index": (3, "replies of Redis; keys or records"),
    "kvstore/node": (3, "an answer of any kind; a word of an announcement that may be anything"),
    "kvstore/protocol": (3, "fields that a struct unpacks; tuples of the width that is asked for"),
    "kvstore/segment": (1, "an `out` with its descriptions, as a caller gave it"),
    "kvstore/settings": (5, "annotations as they are read; values of TOML"),
    "kvstore/system": (2, "JSON of other processes; options of Popen"),
    "kvstore/testing": (15, "stand-ins in places of other types; options passed on"),
    "kvstore/transport": (3, "NIXL's agent, which has no types, and packets of the parent's"),
    "kvstore/vram": (1, "options passed on"),
}
"""By room: how often `Any` may be used there, imports left out, and for what."""


def room_of(name: str) -> str:
    """A folder of the house, of `adapters` the engine's."""
    parts = PurePosixPath(name).parent.parts
    return "/".join(parts[: 3 if parts[1:2] == ("adapters",) else 2])


def uses(text: str) -> int:
    """How often a module names `Any`, texts and comments left out."""
    return sum(
        (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
        for node in ast.walk(ast.parse(text))
    )


def counted(texts: Mapping[str, str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, text in texts.items():
        found[room_of(name)] += uses(text)
    return found


def wrong(found: Mapping[str, int], listed: Mapping[str, int]) -> list[str]:
    """Rooms with more than they are listed with, and those listed with many more than they have."""
    rooms = sorted({*found, *listed})
    told = [(room, found.get(room, 0), listed.get(room, 0)) for room in rooms]
    return [f"{room}: {has}, and {may} are allowed" for room, has, may in told if has > may] + [
        f"{room}: {has}, list no more than that" for room, has, may in told if may > has + SLACK
    ]


def test_no_room_has_more_values_without_a_type_than_it_has_reasons_for() -> None:
    names = [name for name in tracked(ROOT, "kvstore", "connector") if name.endswith(".py")]
    found = counted({name: (ROOT / name).read_text() for name in names})
    assert not wrong(found, {room: most for room, (most, _) in UNTYPED.items()}), "name a type"


def test_a_use_in_any_place_counts_and_an_import_or_a_word_does_not() -> None:
    text = '"""Any."""\nfrom typing import Any\nimport typing\nX = Any\n'
    text += 'def f(a: dict[str, Any], b: typing.Any) -> "object": ...  # Any\n'
    texts = {
        "connector/adapters/e/g/m.py": text,
        "connector/adapters/e.py": text,
        "kvstore/m.py": "",
    }
    assert counted(texts) == {"connector/adapters/e": 3, "connector/adapters": 3, "kvstore": 0}


def test_a_room_that_grows_is_found_and_so_is_one_that_shrinks_far() -> None:
    found = {"kvstore/a": 3, "kvstore/b": 2, "kvstore/c": 1}
    listed = {"kvstore/a": 3, "kvstore/b": 1, "kvstore/c": 5, "kvstore/d": 4, "kvstore/e": 3}
    assert wrong(found, listed) == [
        "kvstore/b: 2, and 1 are allowed",
        "kvstore/c: 1, list no more than that",
        "kvstore/d: 0, list no more than that",
    ]
