"""Names, bytes and kinds of LMCache's objects, as the store keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from connector.layout.geometry import Field
from connector.pages.pages import Parts
from connector.settings import ConnectorSettings
from kvstore import Namespace, UsageError, tenant_salt


class ObjectKey(Protocol):
    """The part of a key of LMCache's server that is used. It is hashable."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str

    def to_encoded_object_key(self) -> object: ...


class EngineKey(Protocol):
    """The part of a key of LMCache inside an engine that is used. It is hashable."""

    model_name: str

    def to_string(self) -> str: ...


class MemoryFormat(Protocol):
    """The part of an object's description that is used: one shape and dtype, or a list of each."""

    shape: Sequence[int]
    dtype: object
    shapes: Sequence[Sequence[int]] | None
    dtypes: Sequence[object] | None


class MemoryObject(Protocol):
    """The part of a piece of LMCache's memory that is used."""

    @property
    def byte_array(self) -> bytearray | memoryview: ...
    @property
    def metadata(self) -> MemoryFormat: ...
    def get_size(self) -> int: ...
    def get_shapes(self) -> Sequence[Sequence[int]]: ...
    def get_dtypes(self) -> Sequence[object]: ...
    def get_memory_format(self) -> object: ...
    def ref_count_up(self) -> None: ...
    def ref_count_down(self) -> None: ...


OBJECT_VERSION = 1
"""Grows when the same fields come to mean other bytes."""
FORMAT_BYTES = 16
"""Bytes at the end of each payload that say what kind of object it is. LMCache's keys do not tell
dtypes apart, and at a lookup it may not know them. So objects of another kind are found but not
loaded."""


def namespace(config: ConnectorSettings, engine: str, **more: Field) -> Namespace:
    """Return what must match beside a key of LMCache's; `engine` says which of its kinds of keys.

    Raises `UsageError` where nothing stands for the weights.
    """
    if config.weights_id is None:
        raise UsageError(
            "weights_id",
            None,
            "must be a name that changes with the weights or dtype of any model: LMCache's "
            "keys have a model's name alone, and LMCache does not see the weights",
        )
    fields: dict[str, Field] = {
        "engine": engine,
        "object_version": OBJECT_VERSION,
        "weights": f"id {config.weights_id}",
        **more,
        **config.life,
    }
    return Namespace(fields, salt=tenant_salt())


def names(keys: Sequence[ObjectKey]) -> list[bytes]:
    """Return each `ObjectKey` in bytes that no other object key has."""
    return [
        _digest([k.chunk_hash.hex(), k.model_name, k.kv_rank, k.object_group_id, k.cache_salt])
        for k in keys
    ]


def engine_names(keys: Sequence[EngineKey]) -> list[bytes]:
    """Return the names for `CacheEngineKey` or `LayerCacheEngineKey`, whose text has all of it."""
    return [_digest([type(k).__name__, k.to_string()]) for k in keys]


def _digest(fields: Sequence[object]) -> bytes:
    return blake2b(json.dumps(fields).encode(), digest_size=32).digest()


def parts(obj: MemoryObject, trailer: bytearray) -> Parts:
    """Return an object's memory, and what follows it in the payload."""
    return [memoryview(obj.byte_array).cast("B"), memoryview(trailer)]


def kind(obj: MemoryObject) -> bytes:
    """Return what an object of LMCache's is, beside its size: shapes and dtypes, one or a list of
    each."""
    meta = obj.metadata
    shapes = [list(shape) for shape in meta.shapes or [meta.shape]]
    text = json.dumps([shapes, [str(dtype) for dtype in meta.dtypes or [meta.dtype]]])
    return blake2b(text.encode(), digest_size=FORMAT_BYTES).digest()
