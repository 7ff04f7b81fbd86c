"""What `import kvstore` and a client import, and what that costs beside `import redis`."""

from __future__ import annotations

import ast
import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from own_python import printed

import kvstore
from kvstore import KVStoreError, spi

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
    "kvstore.client.nodes.saving.embedded_node",
    "kvstore.client.nodes.vram",
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
    return printed(code, env={**os.environ, **environment})


def imported_by(code: str) -> list[str]:
    return json.loads(run(f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"))


def parts(names: Sequence[str], *of: str) -> list[str]:
    return [name for name in names if name.startswith(of)]


def test_import_kvstore_imports_neither_redis_nor_any_part_of_the_store() -> None:
    names = imported_by("import kvstore")
    assert parts(names, "redis", "asyncio", "msgpack", "mmap", "torch", "numpy") == []
    mine = parts(names, "kvstore")
    assert mine == ["kvstore", "kvstore.lazy", "kvstore.system", "kvstore.system.last_resort"]


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


USERS = """
AsyncClient Client DeadlineError Explanation Health InternalError KVStoreError Limits MissReason
Namespace NoSpaceError NotPinned PeerError Pinned PutResult PutStatus RedisUrl ResetResult Retained
StreamSecurity TokenMatch UsageError Verify tenant_salt weights_fingerprint
"""
AUTHORS = """
AnyReservation BlockRef BlockSession BlockStore BlockView Buffer CudaDevice DaemonThreads
EngineSocket
DeviceBlock DeviceError DeviceRange DeviceReservation FieldDifference Holder HolderRun HolderRuns
Holders HostBlockStore IndexRefusedError IndexUnavailableError ItemsMax Key Locator LookupResult
MissQuery Missing NodeUnavailableError NumberRange PoolMapping PrefixMatch Reservation Residency
Tier VramPool VramSaver Waiting check_settings chained_hashes copy_bytes cuda_device in_batches
known_names open_files_share raise_open_files_limit read_config read_settings start_log
vram_for_saves
"""
"""What is public (docs/compatibility.md). A name more or less is a change that users read of."""
PUBLIC = [pytest.param(kvstore, USERS, id="kvstore"), pytest.param(spi, AUTHORS, id="spi")]


@pytest.mark.parametrize(("module", "names"), PUBLIC)
def test_exactly_these_names_are_public(module: ModuleType, names: str) -> None:
    assert sorted(module.__all__) == sorted(names.split())


def typed_names(of: ModuleType) -> dict[str, tuple[str, str]]:
    """Public names as a type checker sees them, and where they are from."""
    tree = ast.parse(Path(str(of.__file__)).read_text())
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


@pytest.mark.parametrize("module", [kvstore, spi])
def test_a_type_checker_and_a_program_see_the_same_names_of_the_same_modules(
    module: ModuleType,
) -> None:
    typed = typed_names(module)
    assert sorted(module.__all__) == sorted(typed)
    for name, (place, attribute) in typed.items():
        assert getattr(module, name) is getattr(__import__(place, fromlist=["_"]), attribute)
    assert len(module._IMPORTS) == len({place for place, _ in typed.values()})


@pytest.mark.parametrize("name", ["kvstore", "kvstore.spi"])
def test_every_name_is_listed_and_comes_with_a_star_before_anything_is_imported(name: str) -> None:
    code = f"""
import {name} as module
listed = dir(module)
everything = {{}}
exec("from {name} import *", everything)
print(set(module.__all__) <= set(listed), set(module.__all__) <= set(everything))
print("__name__" in listed, "__all__" in listed)
"""
    assert run(code).split() == ["True"] * 4


def test_the_names_for_authors_cost_nothing_until_they_are_used() -> None:
    names = imported_by("import kvstore.spi")
    assert parts(names, "redis", "kvstore.client", "kvstore.cuda", "kvstore.vram") == []


def test_a_name_that_there_is_not_is_an_attribute_error_that_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clinet'") as caught:
        _ = kvstore.Clinet  # type: ignore[attr-defined]
    assert (caught.value.name, caught.value.obj) == ("Clinet", kvstore)
    assert not hasattr(kvstore, "__wrapped__")
    with pytest.raises(ImportError, match="Clinet"):
        exec("from kvstore import Clinet")


def errors() -> list[KVStoreError]:
    public: list[Any] = [getattr(m, name) for m in (kvstore, spi) for name in m.__all__]
    return [
        kind("a", 1, "b") if kind is kvstore.UsageError else kind("why")
        for kind in public
        if isinstance(kind, type) and issubclass(kind, KVStoreError)
    ]


def test_errors_and_results_cross_processes_that_have_imported_nothing() -> None:
    sent = [*errors(), kvstore.PutStatus.STORED, spi.BlockRef(b"k" * 32, b"r")]
    assert len(sent) > 9
    code = f"import pickle\nfor one in pickle.loads({pickle.dumps(sent)!r}): print(repr(one))"
    assert run(code).splitlines() == [repr(one) for one in sent]
