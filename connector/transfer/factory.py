"""Makes connectors by name; imports each when it is made."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from connector.limits import CONNECTORS_REGISTERED_MAX
from connector.transfer.base_v1 import KVConnectorBase_V1, KVConnectorRole
from connector.transfer.engine import EngineInfo
from kvstore import UsageError

if TYPE_CHECKING:
    from connector.transfer.config import KVTransferConfig


class _Place(NamedTuple):
    module_path: str
    class_name: str


class KVConnectorFactory:
    """Keeps the registry of this process, and makes a connector's side from a config."""

    _registry: ClassVar[dict[str, _Place]] = {
        "KVStoreConnector": _Place("connector.transfer.kvstore_connector", "KVStoreConnector"),
        "MultiConnector": _Place("connector.transfer.multi", "MultiConnector"),
    }
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Make `class_name` of `module_path` known as `name`; it is imported on first use.

        Raises `UsageError` when the name is taken, even by the same class: two
        parts of a program that both think they own a name should hear of it.
        """
        for field, value in (
            ("name", name),
            ("module_path", module_path),
            ("class_name", class_name),
        ):
            if not isinstance(value, str) or not value:
                raise UsageError(field, value, "must be a string that is not empty")
        with cls._lock:
            if name in cls._registry:
                place = ":".join(cls._registry[name])
                raise UsageError("name", name, f"is registered already, as {place}")
            if len(cls._registry) >= CONNECTORS_REGISTERED_MAX:
                raise UsageError("name", name, f"at most {CONNECTORS_REGISTERED_MAX} connectors")
            cls._registry[name] = _Place(module_path, class_name)

    @classmethod
    def registered(cls) -> list[str]:
        """Return names that are known, sorted."""
        with cls._lock:
            return sorted(cls._registry)

    @classmethod
    def get_connector_class_by_name(cls, name: str) -> type[KVConnectorBase_V1]:
        """Return the class registered as `name`.

        Raises `UsageError` for an unknown name, which lists the known ones, and
        for a module or class that is not there.
        """
        with cls._lock:
            place = cls._registry.get(name)
        if place is None:
            known = ", ".join(cls.registered())
            raise UsageError(
                "kv_connector",
                name,
                f"unknown; known: {known}. Another one needs kv_connector_module_path",
            )
        return _load("kv_connector", *place)

    @classmethod
    def get_connector_class(cls, config: KVTransferConfig) -> type[KVConnectorBase_V1]:
        """Return the class a config names; its module path, if any, wins over the registry."""
        if config.kv_connector is None:
            raise UsageError("kv_connector", None, "must be set to make a connector")
        if config.kv_connector_module_path is not None:
            return _load(
                "kv_connector_module_path", config.kv_connector_module_path, config.kv_connector
            )
        return cls.get_connector_class_by_name(config.kv_connector)

    @classmethod
    def create_connector(
        cls, config: KVTransferConfig, role: KVConnectorRole, engine: EngineInfo
    ) -> KVConnectorBase_V1:
        """Return the side `role` of the connector that `config` names.

        Raises `UsageError` for a connector that cannot be found, and whatever
        the connector says about its settings and the engine.
        """
        connector = cls.get_connector_class(config)
        if not isinstance(role, KVConnectorRole):
            raise UsageError("role", role, "must be a KVConnectorRole")
        if not isinstance(engine, EngineInfo):
            raise UsageError("engine", type(engine).__name__, "must be an EngineInfo")
        return connector(engine.config_with(config), role, engine.kv_cache_config)


def _load(field: str, module_path: str, class_name: str) -> type[KVConnectorBase_V1]:
    try:
        module = importlib.import_module(module_path)
    except ImportError as e:
        raise UsageError(field, module_path, f"cannot be imported: {e}") from e
    found = getattr(module, class_name, None)
    if found is None:
        raise UsageError(field, f"{module_path}:{class_name}", "the module has no such class")
    if not isinstance(found, type) or not issubclass(found, KVConnectorBase_V1):
        raise UsageError(
            field,
            f"{module_path}:{class_name}",
            "is no connector: it needs KVConnectorBase_V1 as its base (connector.transfer.base_v1)",
        )
    return found
