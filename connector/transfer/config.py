"""Configures KV transfer of an engine: which connector, in which role, with which settings.

The fields and their meaning are those of vLLM's `--kv-transfer-config`, so that one JSON
document serves both, numbers and switches in quotes included; `kv_buffer_size`, `kv_rank`,
`kv_parallel_size` and `kv_ip`, which vLLM no longer has, are for connectors of one's own.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from connector.limits import KV_RANKS_MAX, PORT_MAX
from connector.settings import json_object
from kvstore import UsageError
from kvstore.spi import NumberRange, check_settings, read_config, read_settings

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
LoadFailurePolicy = Literal["recompute", "fail"]

ENV_DOCUMENT = "KVSTORE_KV_TRANSFER_CONFIG"
"""A JSON object with any of the fields. A variable of one field wins over it."""
ENV_PREFIX = "KVSTORE_"
"""`KVSTORE_` and the field's name in capitals: KVSTORE_KV_ROLE, KVSTORE_ENGINE_ID, ..."""

CUDA_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Files that a machine with a CUDA driver has. Asking torch would import it."""


def default_buffer_device() -> str:
    """Return the GPU where there is a CUDA driver, else the CPU."""
    return "cuda" if any(path.exists() for path in CUDA_DEVICES) else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Holds one engine's part in KV transfer. Raises `UsageError` naming field, value and limit."""

    kv_connector: str | None = None
    """Registered name of the connector, or a class of `kv_connector_module_path`; None: no KV
    transfer."""
    engine_id: str = ""
    """Distinguishes this engine from others; empty: a new UUID."""
    kv_buffer_device: str = field(default_factory=default_buffer_device)
    """Device on which a connector that buffers keeps its buffer: cuda, cpu, xpu, or the name of
    another platform's device."""
    kv_buffer_size: Annotated[float, NumberRange(above=0)] = 1e9
    """Bytes that a connector of one's own may buffer; `KVStoreConnector` has settings for that."""
    kv_role: KVRole | None = None
    """Whether this engine saves KV, loads it, or both. Required with `kv_connector`."""
    kv_rank: Annotated[int, NumberRange(0)] | None = None
    """This engine's number among `kv_parallel_size`, for connectors that pair engines up."""
    kv_parallel_size: Annotated[int, NumberRange(1, KV_RANKS_MAX)] = 1
    """Engines that take part; 1, the default, says nothing about `kv_rank`."""
    kv_ip: str = "127.0.0.1"
    """Address at which a connector that listens does so."""
    kv_port: Annotated[int, NumberRange(1, PORT_MAX)] = 14579
    """The port there."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """The connector's own settings; for `KVStoreConnector` see `connector.settings`."""
    kv_connector_module_path: str | None = None
    """Module to import `kv_connector` from; it wins over a registered name."""
    enable_permute_local_kv: bool = False
    """For connectors that convert between layouts in the engine's memory, like vLLM's for NIXL.
    `KVStoreConnector` has one layout in the store and ignores it."""
    kv_load_failure_policy: LoadFailurePolicy = "recompute"
    """What happens to a request whose KV could not be loaded. vLLM's default is "fail", which suits
    a hand-over of KV that is meant for one request. Here the KV comes from a cache, whose blocks
    may be evicted between lookup and load, so a lost block costs a recompute and no request."""

    def __post_init__(self) -> None:
        if not self.engine_id and isinstance(self.engine_id, str | None):
            object.__setattr__(self, "engine_id", str(uuid.uuid4()))
        for name, read in _TEXT_TYPES.items():
            object.__setattr__(self, name, _read(read, getattr(self, name)))
        check_settings(self)
        if self.kv_role is None and self.kv_connector is not None:
            roles = ", ".join(get_args(KVRole))
            raise UsageError("kv_role", None, f"must be given with kv_connector; roles are {roles}")
        if self.kv_rank is not None and 1 < self.kv_parallel_size <= self.kv_rank:
            must = f"must be from 0 to {self.kv_parallel_size - 1}"
            raise UsageError("kv_rank", self.kv_rank, must)
        extra = self.kv_connector_extra_config
        if not all(isinstance(name, str) for name in extra):
            raise UsageError(
                "kv_connector_extra_config", extra, "must be a table of names and values"
            )
        object.__setattr__(self, "kv_connector_extra_config", dict(extra))

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Return whether this engine takes part at all."""
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def is_kv_producer(self) -> bool:
        """Return whether this engine saves KV."""
        return self.kv_connector is not None and self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Return whether this engine loads KV."""
        return self.kv_connector is not None and self.kv_role in ("kv_consumer", "kv_both")

    def compute_hash(self) -> str:
        """Return a fingerprint of all that changes the model's computation: nothing here does.

        It is the same for every config, so that engines which key compiled graphs by their
        configuration's hash share them whatever they transfer.
        """
        return sha256(b"[]", usedforsecurity=False).hexdigest()

    def get_from_extra_config(self, key: str, default: object) -> Any:
        """Return `kv_connector_extra_config[key]`, or `default` when it has no such key."""
        return self.kv_connector_extra_config.get(key, default)

    def has_connector(self, name: str) -> bool:
        """Return whether the connector `name` is used, by itself or in a MultiConnector."""
        if self.kv_connector != "MultiConnector":
            return self.kv_connector == name
        children = self.kv_connector_extra_config.get("connectors") or ()
        return name == "MultiConnector" or any(
            isinstance(child, Mapping) and child.get("kv_connector") == name for child in children
        )

    def to_dict(self) -> dict[str, object]:
        """Return all fields; `from_dict` of it is an equal config."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Return a config from a mapping of field names; an unknown name is an error."""
        return read_settings(cls, values, where="kv_transfer_config")

    @classmethod
    def from_json(cls, document: str) -> Self:
        """Return a config from a JSON object."""
        return cls.from_dict(json_object("kv_transfer_config", document))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Return a config from `KVSTORE_KV_TRANSFER_CONFIG` and the variables of single fields,
        over `[transfer]` of the operator's file.

        `environ` is the process's own by default. An empty variable counts as not
        set. With none of them set the config has no connector.
        """
        environ = os.environ if environ is None else environ
        document = environ.get(ENV_DOCUMENT)
        values = dict(read_config().table("transfer"))
        values |= json_object(ENV_DOCUMENT, document) if document else {}
        for f in fields(cls):
            variable = ENV_PREFIX + f.name.upper()
            text = environ.get(variable)
            if text:
                values[f.name] = _from_text(f.name, variable, text)
        return cls.from_dict(values)


_WHOLE = re.compile(r"\s*([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?\s*")
_SWITCHES = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}


def _whole(text: str) -> int:
    found = _WHOLE.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return int(found[1])


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise ValueError(text)
    return _SWITCHES[text.lower()]


_TEXT_TYPES: dict[str, Callable[[str], object]] = {
    "kv_buffer_size": float,
    "kv_rank": _whole,
    "kv_parallel_size": _whole,
    "kv_port": _whole,
    "enable_permute_local_kv": _switch,
}
"""How text is read as a field's value; the words are those that vLLM takes."""


def _read(read: Callable[[str], object], value: object) -> object:
    """Return `value`, of its field's type if it can be read so. Documents for vLLM have numbers in
    quotes (`"kv_port": "21001"`), and writers of JSON make 1.0 of 1."""
    if isinstance(value, str):
        with suppress(ValueError):
            return read(value)
    if read is _whole and isinstance(value, float) and value.is_integer():
        return int(value)
    if read is _switch and isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return value


def _from_text(name: str, variable: str, text: str) -> object:
    if name == "kv_connector_extra_config":
        return json_object(variable, text)
    try:
        return _TEXT_TYPES.get(name, str)(text)
    except ValueError as e:
        must = "true or false" if name == "enable_permute_local_kv" else "a number"
        raise UsageError(variable, text, f"must be {must}") from e
