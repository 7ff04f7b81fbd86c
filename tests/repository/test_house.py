"""No file and no function grows beyond what a reader takes in at once, and one name is
one class."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
import settings_reference

from kvstore.settings.reader import allowed_in

ROOT = Path(__file__).parents[2]
HOUSES = ("kvstore", "connector", "scripts")
FILE_LINES_MAX, FUNCTION_LINES_MAX = 800, 70
"""A class is one file; 400 lines of it and 16 files of a folder are advice (CONTRIBUTING.md)."""
LONG_FUNCTIONS = {
    "kvstore/client/client.py: __init__": 95,
    "kvstore/client/session.py: __init__": 120,
}
"""Functions that may be longer, and how long. Why, a comment in each says."""
SAME_NAMES = {
    "KVStoreConnector": "engines' configurations say it, those of vLLM and those of the package",
}
"""Names that two public classes have, and why."""
SUMS_MAX = {
    "kvstore": 54_090,
    "connector": 22_455,
    "tests": 118_610,
    "pokes": 497,
}
"""Lines by house, without the simulator and with C; and how often a test looks at a private name
of something else. A change that raises one says in its commit what it takes out instead, or why
not; one that lowers it lowers the number here. How many items pytest collects, scripts/test
holds."""
SIMULATOR = "kvstore/testing/sim/"
SETTINGS = 78
"""How many there are: fewer than 80. One more takes another out, or has its reason here."""
TABLES_OF_OTHERS = {"connector.limits", "transfer.kv_connector_extra_config"}
"""Names of a table that stand for one, whose names are counted there."""
OTHER_WAYS = re.compile(
    "KVSTORE_(URL|RUN_DIR|KV_[A-Z_]*|ENGINE_ID|TENSORRT_LLM|TLS_[A-Z_]*"
    "|(SECRET|SALT|SIGNING_KEY|DISK_KEYS)(_FILE)?)"
)
"""Variables that stand for names of tables: of one, or as a document of all names of one."""
OF_SCRIPTS = {"KVSTORE_VENV", "KVSTORE_VLLM", "KVSTORE_NIXL", "KVSTORE_NVRTC"}
"""Variables that the product knows and does not read (cli/checks/settings.py)."""
FUNCTIONS_REASON = "# Longer than other functions: "

Found = Iterator[tuple[str, int, str]]
"""What it is, how much of it there is, and the text in which the reason must stand."""


@cache
def tree_of(text: str) -> ast.Module:
    """Parse a file once for all that is asked of it."""
    return ast.parse(text)


def tracked(root: Path, *houses: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *houses],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (root / name).is_file()]


def functions(texts: Mapping[str, str]) -> Found:
    for name, text in texts.items():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(tree_of(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                body = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
                yield f"{name}: {node.name}", lines, body


def wrong(found: Found, most: int, listed: Mapping[str, int], reason: re.Pattern[str]) -> list[str]:
    """What is larger than `most`, and not listed or without a reason; what is listed in vain."""
    told, large = [], set()
    for name, size, text in found:
        if size <= most:
            continue
        large.add(name)
        if size > listed.get(name, most):
            told.append(f"{name}: {size}, and {listed.get(name, most)} are allowed")
        elif not reason.search(text):
            told.append(f"{name}: {size}, and no reason is given there")
    return told + [f"{name}: is not larger than {most} any more" for name in set(listed) - large]


DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_exit", "_getframe"}
"""Names of Python's own that are public though they begin like private ones."""


def pokes(text: str) -> int:
    """How often `text` looks at a private name of what is not its own `self` or `cls`."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in DOCUMENTED
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in ast.walk(ast.parse(text))
    )


@pytest.fixture(scope="module")
def names() -> list[str]:
    return tracked(ROOT, *HOUSES, "tests")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {name: (ROOT / name).read_text() for name in tracked(ROOT, *HOUSES)}


def test_helpers_of_tests_lie_in_rooms(names: list[str]) -> None:
    """What lies beside the rooms is not on the path (pyproject.toml), and no test would find it."""
    assert not [name for name in names if str(PurePosixPath(name).parent) == "tests/support"]


def test_no_file_is_longer_than_one_reads(texts: dict[str, str]) -> None:
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    assert not {name: n for name, n in lines.items() if n > FILE_LINES_MAX}


def test_no_function_is_longer_than_one_reads(texts: dict[str, str]) -> None:
    reason = re.compile(re.escape(FUNCTIONS_REASON))
    assert not wrong(functions(texts), FUNCTION_LINES_MAX, LONG_FUNCTIONS, reason)


def test_no_two_public_classes_have_one_name(texts: dict[str, str]) -> None:
    parsed = [
        tree_of(text)
        for name, text in texts.items()
        if name.startswith(("kvstore/", "connector/")) and name.endswith(".py")
    ]
    counted = Counter(
        node.name for tree in parsed for node in tree.body if isinstance(node, ast.ClassDef)
    )
    twice = {name for name, count in counted.items() if count > 1 and not name.startswith("_")}
    assert twice == SAME_NAMES.keys()


def settings(texts: Mapping[str, str]) -> set[str]:
    """Every name of a table, every variable that stands for none, and what LMCache's server can be
    told besides."""
    found = {
        f"{table}.{name}"
        for table, kind in settings_reference.KINDS.items()
        for name in allowed_in(kind)
    } - TABLES_OF_OTHERS
    for name, text in texts.items():
        if name.startswith(("kvstore/", "connector/")):
            variables = set(re.findall(r"\bKVSTORE_[A-Z][A-Z_]*\b", text)) - OF_SCRIPTS
            found |= {one for one in variables if not OTHER_WAYS.fullmatch(one)}
    own = re.findall('^CAPACITY = "(.+)"', texts["connector/adapters/lmcache/l2.py"], re.MULTILINE)
    return found | {f"lmcache.{name}" for name in own}


def test_there_are_as_many_settings_as_one_takes_in(texts: dict[str, str]) -> None:
    assert len(settings(texts)) == SETTINGS, sorted(settings(texts))


def test_what_is_long_needs_a_place_in_the_list_and_a_reason() -> None:
    found = [("a", 80, "# because"), ("b", 80, ""), ("c", 90, "# because"), ("d", 9, "")]
    listed = {"a": 80, "b": 80, "c": 80, "d": 80}
    assert wrong(iter(found), 70, listed, re.compile("# because")) == [
        "b: 80, and no reason is given there",
        "c: 90, and 80 are allowed",
        "d: is not larger than 70 any more",
    ]


def test_a_method_that_grows_is_found() -> None:
    body = "\n        pass" * FUNCTION_LINES_MAX
    text = f"class C:\n    def short(self):\n        pass\n    async def f(self):{body}\n"
    assert wrong(functions({"a.py": text}), FUNCTION_LINES_MAX, {}, re.compile("x^")) == [
        "a.py: f: 71, and 70 are allowed"
    ]


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their base names: it would stop at the second of them, and with it
    `scripts/test -k NAME`."""
    names = Counter(PurePosixPath(name).name for name in tracked(ROOT, "tests"))
    assert [name for name, count in names.items() if count > 1 and name.startswith("test_")] == []


def test_no_house_grows_unsaid() -> None:
    names = tracked(ROOT, *SUMS_MAX.keys() - {"pokes"})
    source = {
        name: (ROOT / name).read_text()
        for name in names
        if name.endswith((".py", ".c", ".h")) and not name.startswith(SIMULATOR)
    }
    sums = Counter[str]()
    for name, text in source.items():
        sums[PurePosixPath(name).parts[0]] += len(text.splitlines())
        if name.startswith("tests/") and name.endswith(".py"):
            sums["pokes"] += pokes(text)
    assert {what: sums[what] for what, most in SUMS_MAX.items() if sums[what] > most} == {}
    slack = {what: sums[what] for what, most in SUMS_MAX.items() if sums[what] < most * 0.99}
    assert not slack, "lower SUMS_MAX: what is out stays out"


def test_a_look_at_a_private_name_is_counted() -> None:
    assert pokes("a._b; self._c; cls._d; e.f; g.__class__; monkeypatch.setattr(h._i, 1)") == 2
    assert pokes("a._replace(b=1)._b; os._exit(0)") == 1
