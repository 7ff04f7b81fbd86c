"""No folder, no file and no function grows beyond what a reader takes in at once, and one name is
one class."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest
import settings_reference

from kvstore.settings.reader import allowed_in

ROOT = Path(__file__).parents[2]
HOUSES = ("kvstore", "connector", "scripts")
ROOMS_ALONE = ("tests",)
"""Where folders are held to it, and files and functions are not: a test is read alone."""
FOLDER_FILES_MAX = 16
FILE_LINES_MAX, FUNCTION_LINES_MAX = 400, 70
FULL_FOLDERS = {
    "kvstore/system": 18,  # one thing each that an operating system gives
    "scripts": 21,  # one command each, and where people look for it: a folder would hide it
}
"""Folders that may have more files, and how many."""
LONG_FILES = {
    "connector/adapters/vllm/connector.py": 510,
    "connector/scheduler/scheduler.py": 600,
    "connector/worker/worker.py": 520,
    "kvstore/client/client.py": 530,
    "kvstore/client/local/control.py": 620,
    "kvstore/client/local/writer.py": 640,
    "kvstore/client/session.py": 530,
    "kvstore/core/memory/allocator.py": 440,
    "kvstore/core/node.py": 570,
    "kvstore/cuda/bindings.py": 520,
    "kvstore/node/daemon.py": 700,
    "kvstore/nodedir.py": 430,
    "kvstore/segment/batch_read.c": 530,
}
"""Files that may be longer, and how long. Why, each says in its own docstring."""
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
    "kvstore": 43_850,
    "connector": 21_150,
    "tests": 100_300,
    "pokes": 980,
}
"""Lines by house, without the simulator and with C; and how often a test looks at a private name
of something else. A change that raises one says in its commit what it takes out instead, or why
not; one that lowers it lowers the number here. How many items pytest collects, scripts/test
holds."""
SIMULATOR = "kvstore/testing/sim/"
SETTINGS = 79
"""How many there are: fewer than 80. One more takes another out, or has its reason here."""
TABLES_OF_OTHERS = {"connector.limits", "transfer.kv_connector_extra_config"}
"""Names of a table that stand for one, whose names are counted there."""
OTHER_WAYS = re.compile(
    "KVSTORE_(URL|RUN_DIR|KV_[A-Z_]*|ENGINE_ID|TENSORRT_LLM|TLS_[A-Z_]*"
    "|(SECRET|SALT|SIGNING_KEY)(_FILE)?)"
)
"""Variables that stand for names of tables: of one, or as a document of all names of one."""
OF_SCRIPTS = {"KVSTORE_VENV", "KVSTORE_VLLM", "KVSTORE_NIXL", "KVSTORE_NVRTC"}
"""Variables that the product knows and does not read (cli/checks/settings.py)."""
FILES_REASON = re.compile(r"(?i)\b((in|hence) one file|one class,|longer than other files)(?=\W)")
FUNCTIONS_REASON = "# Longer than other functions: "

Found = Iterator[tuple[str, int, str]]
"""What it is, how much of it there is, and the text in which the reason must stand."""


def tracked(root: Path, *houses: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *houses],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (root / name).is_file()]


def folders(names: Iterable[str]) -> Counter[str]:
    return Counter(str(PurePosixPath(name).parent) for name in names)


def files(texts: Mapping[str, str]) -> Found:
    for name, text in texts.items():
        head = ast.get_docstring(ast.parse(text)) if name.endswith(".py") else text
        yield name, len(text.splitlines()), head or ""


def functions(texts: Mapping[str, str]) -> Found:
    for name, text in texts.items():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
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


def pokes(text: str) -> int:
    """How often `text` looks at a private name of what is not its own `self` or `cls`."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in ast.walk(ast.parse(text))
    )


@pytest.fixture(scope="module")
def names() -> list[str]:
    return tracked(ROOT, *HOUSES, *ROOMS_ALONE)


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {name: (ROOT / name).read_text() for name in tracked(ROOT, *HOUSES)}


def test_no_folder_has_more_files_than_one_takes_in(names: list[str]) -> None:
    counted = ((folder, count, "") for folder, count in folders(names).items())
    assert not wrong(counted, FOLDER_FILES_MAX, FULL_FOLDERS, re.compile("")), "draw a room"


def test_helpers_of_tests_lie_in_rooms(names: list[str]) -> None:
    """What lies beside the rooms is not on the path (pyproject.toml), and no test would find it."""
    assert not [name for name in names if str(PurePosixPath(name).parent) == "tests/support"]


def test_no_file_is_longer_than_one_reads(texts: dict[str, str]) -> None:
    assert not wrong(files(texts), FILE_LINES_MAX, LONG_FILES, FILES_REASON)


def test_no_function_is_longer_than_one_reads(texts: dict[str, str]) -> None:
    reason = re.compile(re.escape(FUNCTIONS_REASON))
    assert not wrong(functions(texts), FUNCTION_LINES_MAX, LONG_FUNCTIONS, reason)


def test_no_two_public_classes_have_one_name(texts: dict[str, str]) -> None:
    parsed = [
        ast.parse(text)
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
    (own,) = (
        node.value
        for node in ast.parse(texts["connector/adapters/lmcache/l2.py"]).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_OWN_SETTINGS"
    )
    assert isinstance(own, ast.Dict)
    return found | {f"lmcache.{ast.unparse(name)}" for name in own.keys if name}


def test_there_are_as_many_settings_as_one_takes_in(texts: dict[str, str]) -> None:
    assert len(settings(texts)) == SETTINGS < 80, sorted(settings(texts))


def test_a_folder_that_grows_is_found(tmp_path: Path) -> None:
    room = tmp_path / "kvstore" / "room"
    room.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for i in range(FOLDER_FILES_MAX + 1):
        (room / f"m{i}.py").touch()
    (room.parent / "one.py").touch()
    counted = ((folder, count, "") for folder, count in folders(tracked(tmp_path, *HOUSES)).items())
    assert wrong(counted, FOLDER_FILES_MAX, {}, re.compile("")) == [
        "kvstore/room: 17, and 16 are allowed"
    ]


def test_what_is_long_needs_a_place_in_the_list_and_a_reason() -> None:
    long = "\n" * FILE_LINES_MAX
    texts = {
        "a.py": f'"""A. In one file, because so."""{long}#',
        "b.py": f'"""B."""{long}#',
        "c.py": f'"""C. In one file, because so."""{long}#',
        "d.py": '"""D."""\n',
    }
    listed = {"a.py": 410, "b.py": 410, "d.py": 410}
    assert wrong(files(texts), FILE_LINES_MAX, listed, FILES_REASON) == [
        "b.py: 401, and no reason is given there",
        "c.py: 401, and 400 are allowed",
        "d.py: is not larger than 400 any more",
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
