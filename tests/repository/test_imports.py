"""What `import kvstore` and a client import, and what that costs beside `import redis`."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import KVStoreError

MODULE_SHARE_MAX, CLIENT_SHARE_MAX = 0.25, 0.75
"""Of the processor time of `import redis`, in the same process. A client comes after redis."""
TRIES = 3
COST = """
import time
times = [time.process_time()]
import redis
times.append(time.process_time())
import kvstore
times.append(time.process_time())
from kvstore import Client
Client("redis://127.0.0.1:1/0", run_dir={run_dir!r})
times.append(time.process_time())
print([after - before for before, after in zip(times, times[1:])], flush=True)
"""
OPTIONAL = (
    "kvstore.client.local.embedded_node",
    "kvstore.client.vram.nodes",
    "kvstore.core.events",
    "kvstore.core.node",
    "kvstore.cuda.",
    "kvstore.index.embedded_redis.server",
    "kvstore.index.redis.cluster",
    "kvstore.node.",
    "kvstore.segment.shm",
    "kvstore.transport.cuda",
    "kvstore.transport.nixl.",
    "kvstore.vram.",
)
"""What a client of a Redis and of host memory has no use for."""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(code: str) -> list[str]:
    return json.loads(run(f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"))


def parts(names: Sequence[str], *of: str) -> list[str]:
    return [name for name in names if name.startswith(of)]


def test_import_kvstore_imports_neither_redis_nor_any_part_of_the_store() -> None:
    names = imported_by("import kvstore")
    assert parts(names, "redis", "asyncio", "msgpack", "mmap", "torch", "numpy") == []
    mine = parts(names, "kvstore")
    assert mine == ["kvstore", "kvstore.system", "kvstore.system.last_resort"]


@pytest.mark.parametrize(
    "code",
    [
        "from kvstore import Client",
        "from kvstore import Client; Client('redis://127.0.0.1:1/0', run_dir={!r}).close()",
    ],
)
def test_a_client_imports_nothing_that_it_may_never_need(code: str, tmp_path: Path) -> None:
    names = imported_by(code.format(str(tmp_path)))
    assert "kvstore.client.session" in names
    assert parts(names, *OPTIONAL) == []


def test_an_error_or_a_setting_alone_imports_no_client() -> None:
    names = imported_by("from kvstore import KVStoreError, Limits, Namespace, PutResult")
    assert parts(names, "redis", "kvstore.client", "kvstore.index", "kvstore.transport") == []


def test_an_import_costs_a_part_of_what_redis_costs(tmp_path: Path) -> None:
    """The least of some runs: what else runs on this machine only adds to one."""
    compiled = {"PYTHONPYCACHEPREFIX": str(tmp_path / "pyc"), "PYTHONDONTWRITEBYTECODE": ""}
    code = COST.format(run_dir=str(tmp_path / "run"))
    runs = [json.loads(run(code, **compiled)) for _ in range(1 + TRIES)][1:]
    redis_s, module_s, client_s = (min(times) for times in zip(*runs, strict=True))
    assert module_s < MODULE_SHARE_MAX * redis_s, (module_s, redis_s)
    assert client_s < CLIENT_SHARE_MAX * redis_s, (client_s, redis_s)


def typed_names() -> dict[str, tuple[str, str]]:
    """Public names as a type checker sees them, and where they are from."""
    tree = ast.parse(Path(kvstore.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_a_type_checker_and_a_program_see_the_same_names_of_the_same_modules() -> None:
    typed = typed_names()
    assert sorted(kvstore.__all__) == sorted(typed)
    for name, (module, attribute) in typed.items():
        assert getattr(kvstore, name) is getattr(__import__(module, fromlist=["_"]), attribute)
    assert len(kvstore._IMPORTS) == len({module for module, _ in typed.values()})


def test_every_name_is_listed_and_comes_with_a_star_before_anything_is_imported() -> None:
    code = """
import kvstore
listed = dir(kvstore)
everything = {}
exec("from kvstore import *", everything)
print(set(kvstore.__all__) <= set(listed), set(kvstore.__all__) <= set(everything))
print("__version__" in listed, "__all__" in listed)
"""
    assert run(code).split() == ["True"] * 4


def test_a_name_that_there_is_not_is_an_attribute_error_that_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clinet'") as caught:
        _ = kvstore.Clinet  # type: ignore[attr-defined]
    assert (caught.value.name, caught.value.obj) == ("Clinet", kvstore)
    assert not hasattr(kvstore, "__wrapped__")
    with pytest.raises(ImportError, match="Clinet"):
        exec("from kvstore import Clinet")


def errors() -> list[KVStoreError]:
    made: list[Any] = []
    for name in kvstore.__all__:
        kind = getattr(kvstore, name)
        if isinstance(kind, type) and issubclass(kind, KVStoreError):
            made.append(kind("a", 1, "b") if kind is kvstore.UsageError else kind("why"))
    return made


def test_errors_and_results_cross_processes_that_have_imported_nothing() -> None:
    sent = [*errors(), kvstore.PutStatus.STORED, kvstore.BlockRef(b"k" * 32, b"r")]
    assert len(sent) > 9
    code = f"import pickle\nfor one in pickle.loads({pickle.dumps(sent)!r}): print(repr(one))"
    assert run(code).splitlines() == [repr(one) for one in sent]
