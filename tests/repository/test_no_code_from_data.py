"""Nothing that comes over a wire or out of a file is run: production code lacks the means."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from each_input import each

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted(
    p
    for folder in ("kvstore", "connector")
    for p in (REPOSITORY / folder).rglob("*.py")
    if not p.is_relative_to(REPOSITORY / "kvstore" / "testing")
)

MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"),
    *("code", "codeop", "runpy", "jsonpickle", "yaml", "xmlrpc", "multiprocessing"),
}
"""They make objects, or run code, out of bytes. multiprocessing pickles what it sends."""
NAMES = {"eval", "exec", "compile", "__import__", "execfile"}
ATTRIBUTES = {
    ("torch", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("os", "system"),
    ("os", "popen"),
}
MSGPACK = {"object_hook", "ext_hook", "object_pairs_hook", "default", "list_hook"}
"""Arguments by which msgpack makes more than plain data."""
IMPORTS_BY_NAME = {
    "kvstore/cli/__init__.py": "the command's name is one of COMMANDS",
    "connector/transfer/factory.py": "a class that the operator's configuration names",
    "kvstore/transport/nixl/child.py": "one of MODULES: whichever wheel of NIXL is installed",
    "kvstore/compiled/part.py": "a compiled part, by the name that stands beside its source",
}
"""Who may import by name, and whose word the name is: never a peer's."""
YAML = "kvstore/cli/commands/run.py"
"""Reads the file of options that the user's own command names, by `safe_load`: plain data."""


def findings(source: str) -> Iterator[str]:
    """What in this source could make code or objects out of data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield f"from {node.module} import"
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in ATTRIBUTES:
                yield f"{node.value.id}.{node.attr}"
            elif (node.value.id, node.attr) == ("importlib", "import_module"):
                yield "importlib.import_module"
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            yield "shell="
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield "allow_pickle="
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("msgpack."):
            yield from (f"msgpack {k.arg}=" for k in node.keywords if k.arg in MSGPACK)


@each(
    "source",
    [
        "import pickle",
        "from multiprocessing.connection import Client",
        "def f(x):\n    return eval(x)",
        "torch.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "subprocess.run(line, shell=True)",
        "msgpack.unpackb(raw, object_hook=f)",
        "importlib.import_module(name)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(findings(source))


def test_production_code_makes_no_code_or_objects_out_of_data() -> None:
    assert len(SOURCES) > 100
    found = {}
    by_name = set()
    for path in SOURCES:
        name = str(path.relative_to(REPOSITORY))
        what = set(findings(path.read_text()))
        if "importlib.import_module" in what:
            what.remove("importlib.import_module")
            by_name.add(name)
        if what:
            found[name] = sorted(what)
    assert found == {YAML: ["import yaml"]}
    assert set(re.findall(r"yaml\.\w+", (REPOSITORY / YAML).read_text())) == {
        "yaml.safe_load",
        "yaml.YAMLError",
    }
    assert by_name == set(IMPORTS_BY_NAME)
