"""KVConnectorFactory: names to classes, imported late, with errors that say what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from connector.transfer.base import KVConnectorRole
from connector.transfer.config import KVTransferConfig
from connector.transfer.engine import EngineInfo
from connector.transfer.factory import KVConnectorFactory
from kvstore import UsageError

SOURCE = """
from connector.transfer.base_v1 import KVConnectorBase_V1

class Good(KVConnectorBase_V1):
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = print
    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = print

class KVStoreConnector(Good):
    pass

class Other:
    def __init__(self, vllm_config, role, kv_cache_config): ...

not_a_class = 7
"""


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A module of connectors that is not imported yet, and a registry of this test's own."""
    (tmp_path / "late_connectors.py").write_text(SOURCE)
    (tmp_path / "broken_connectors.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    yield "late_connectors"
    sys.modules.pop("late_connectors", None)


def config(name: str, module_path: str | None = None) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_module_path=module_path
    )


def test_our_own_connectors_are_known() -> None:
    assert KVConnectorFactory.registered() == ["KVStoreConnector", "MultiConnector"]


def test_module_is_imported_when_the_connector_is_made_not_before(module: str) -> None:
    KVConnectorFactory.register_connector("Mine", module, "Good")
    assert module not in sys.modules
    KVConnectorFactory.get_connector_class_by_name("Mine")
    assert module in sys.modules


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_role_config_and_engine_reach_the_connector(module: str, role: KVConnectorRole) -> None:
    KVConnectorFactory.register_connector("Mine", module, "Good")
    engine = EngineInfo(rank=3, kv_cache_config="groups")
    made = KVConnectorFactory.create_connector(config("Mine"), role, engine)
    assert (type(made).__name__, made.role) == ("Good", role)
    assert made._vllm_config.engine_info is engine
    assert made._kv_transfer_config.kv_connector == "Mine"
    assert made._kv_cache_config == "groups"


@pytest.mark.parametrize("engine", [None, "engine", {"rank": 0}])
def test_anything_but_an_engine_info_is_refused(module: str, engine: Any) -> None:
    with pytest.raises(UsageError, match="must be an EngineInfo"):
        KVConnectorFactory.create_connector(config("Good", module), KVConnectorRole.WORKER, engine)


def test_module_path_wins_over_a_registered_name(module: str) -> None:
    chosen = KVConnectorFactory.get_connector_class(config("KVStoreConnector", module))
    assert chosen.__module__ == module


def test_unknown_name_is_refused_and_the_known_are_listed() -> None:
    with pytest.raises(UsageError, match=r"kv_connector='Nobody'.*KVStoreConnector, MultiConn"):
        KVConnectorFactory.get_connector_class(config("Nobody"))


def test_name_can_be_registered_once(module: str) -> None:
    KVConnectorFactory.register_connector("Mine", module, "Good")
    with pytest.raises(UsageError, match="registered already, as late_connectors:Good"):
        KVConnectorFactory.register_connector("Mine", module, "Good")


@pytest.mark.parametrize(
    ("module_path", "name", "says"),
    [
        ("no.such.module", "Good", "cannot be imported: No module named 'no'"),
        ("broken_connectors", "Good", "cannot be imported.*nothing_of_this_name"),
        ("late_connectors", "Absent", "late_connectors:Absent.*no such class"),
        ("late_connectors", "Other", "needs KVConnectorBase_V1 as its base"),
        ("late_connectors", "not_a_class", "is no connector"),
    ],
)
def test_what_cannot_be_loaded_is_said_with_its_reason(
    module_path: str, name: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        KVConnectorFactory.get_connector_class(config(name, module_path))
    assert caught.value.field == "kv_connector_module_path"
    KVConnectorFactory.register_connector("Mine", module_path, name)
    with pytest.raises(UsageError, match=says):
        KVConnectorFactory.get_connector_class_by_name("Mine")


@pytest.mark.parametrize("place", [("", "m", "C"), ("n", "", "C"), ("n", "m", "")])
def test_registration_needs_a_name_a_module_and_a_class(place: tuple[str, str, str]) -> None:
    with pytest.raises(UsageError, match="not empty"):
        KVConnectorFactory.register_connector(*place)


def test_config_without_a_connector_makes_none() -> None:
    nothing = KVTransferConfig()
    with pytest.raises(UsageError, match="kv_connector=None"):
        KVConnectorFactory.create_connector(nothing, KVConnectorRole.WORKER, EngineInfo())


def test_role_must_be_one_of_the_two(module: str) -> None:
    with pytest.raises(UsageError, match="role="):
        KVConnectorFactory.create_connector(
            config("Good", module),
            "worker",  # type: ignore[arg-type]
            EngineInfo(),
        )


def test_registry_is_bounded(module: str) -> None:
    for i in range(256 - len(KVConnectorFactory.registered())):
        KVConnectorFactory.register_connector(f"c{i}", module, "Good")
    with pytest.raises(UsageError, match="at most 256 connectors"):
        KVConnectorFactory.register_connector("one more", module, "Good")
