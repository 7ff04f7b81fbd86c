"""Reads the connector's settings, as they come in `kv_connector_extra_config`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from connector.limits import (
    BLOCK_TOKENS_MAX,
    CONFIG_BYTES_MAX,
    HAND_OVER_WAIT_S,
    LOOKUP_TIMEOUT_S,
    NODE_BYTES_MIN,
    PAGE_LOCK_BYTES_MAX,
    PINNED_FRACTION_MAX,
    TIMEOUT_S_MAX,
    TP_SIZES_DEFAULT,
    TP_SIZES_MAX,
    TTL_S_MAX,
    VRAM_POOL_BYTES_MIN,
)
from kvstore import Limits, UsageError
from kvstore.spi import (
    ItemsMax,
    NumberRange,
    check_settings,
    known_names,
    read_config,
    read_settings,
)

STORE_SETTINGS = (
    "url",
    "key_prefix",
    "node",
    "node_size_bytes",
    "run_dir",
    "lookup_timeout_s",
    "verify",
    "weights_id",
    "ttl_s",
    "limits",
)
"""Settings that have a meaning for an engine which names and lays out its pages itself."""


Timeout = Annotated[float, NumberRange(above=0, most=TIMEOUT_S_MAX)]
TpSizes = Annotated[Sequence[Annotated[int, NumberRange(1)]], ItemsMax(TP_SIZES_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """Holds one connector's settings. Raises `UsageError` naming field, value and limit."""

    url: str | None = None
    """URL of the index, a Redis; None: KVSTORE_URL, else the Redis embedded in this machine."""
    key_prefix: str = "kv:default"
    """Prefix of the index's keys: stores with different prefixes are separate."""
    node: str | None = None
    """Name of the memory node on this host; None: the only one there is."""
    node_size_bytes: Annotated[int, NumberRange(NODE_BYTES_MIN)] = 1 << 30
    """Size of the embedded memory node, which the first save starts when there is neither a URL nor
    a node."""
    run_dir: str | None = None
    """Directory of the node's socket; None: the store's own default."""
    block_tokens: Annotated[int, NumberRange(1, BLOCK_TOKENS_MAX)] | None = None
    """Tokens of one store block; None: chosen from the KV geometry."""
    tp_sizes: TpSizes = TP_SIZES_DEFAULT
    """Tensor-parallel sizes of engines whose blocks are looked for, besides this engine's own."""
    lookup_timeout_s: Timeout = LOOKUP_TIMEOUT_S
    """Time after which a lookup is a miss. It is a miss earlier when computing the prompt would be
    over by then, but not before 0.05. Engines that name their own pages wait `redis_timeout_s`."""
    payload_order: Literal["heads", "tokens"] = "heads"
    """Order of the bytes within a layer of a block. With `tokens` a page of vLLM's default layout
    is contiguous, so it is copied without a kernel, but shared only by engines of one
    tensor-parallel size (docs/decisions/0071; it has not run on a device yet)."""
    load_timeout_s: Timeout = 5.0
    """Time after which the engine computes what was not loaded; sooner where computing it would be
    over by then."""
    save_timeout_s: Timeout = 10.0
    """Time after which a save is dropped and its engine blocks are free again."""
    hand_over_wait_s: Timeout = HAND_OVER_WAIT_S
    """Time that a request waits at most for blocks that a prefill engine says it is saving
    (docs/prefill-decode.md)."""
    layerwise: bool = False
    """Load and save layer by layer, beside the forward (docs/engines.md says when it pays)."""
    vram: bool = False
    """Keep recent blocks in VRAM, `vram_size_bytes` of them, and read those of other engines on
    this host there (docs/decisions/0023; it has not run on a device yet)."""
    vram_size_bytes: Annotated[int, NumberRange(VRAM_POOL_BYTES_MIN)] = 1 << 30
    """Size of the VRAM in which each worker of an engine that saves keeps recent blocks, with
    `vram`."""
    nixl_destination: Literal["host", "vram"] = "host"
    """Where blocks that are read by RDMA from other hosts arrive: in host memory, or on the
    engine's device (docs/rdma.md; it has not run on a device yet)."""
    verify: Literal["never", "always"] = "never"
    """Whether payload checksums are written and checked on this host too."""
    checkpoint_interval_tokens: Annotated[int, NumberRange(0)] | None = None
    """Distance in tokens at which windows and states of a prompt are saved; they are also saved at
    its end, and where another prompt parted from it. 0: only there. None: vLLM's
    prefix_cache_retention_interval where that is above 0, else wherever the engine has them, but
    for windows that outweigh attention (docs/engines.md)."""
    save_decode: Literal[True, False, "auto"] = "auto"
    """Save blocks that hold generated tokens too. With `auto` only as long as they are asked for:
    where clients drop the model's thinking they never are (docs/engines.md)."""
    weights_id: str | None = None
    """Stands for the weights in the namespace: engines with the same id have the same weights,
    whatever their files say. None: a fingerprint of the files."""
    media_needs_salt: bool = False
    """Store requests with pictures, audio or video only where they have a `cache_salt` (vLLM): the
    names that users give them (`multi_modal_uuids`) are then valid for that salt only."""
    ttl_s: Annotated[int, NumberRange(1, TTL_S_MAX)] | None = None
    """Time in seconds that a block may stay in the store; then its bytes are wiped. It is part of
    the namespace: engines with another value share nothing (docs/decisions/0036)."""
    page_lock_bytes_max: Annotated[int, NumberRange(0)] = PAGE_LOCK_BYTES_MAX
    """Bytes of the node's memory that one worker page-locks, in the order of use; each GiB takes
    about 2 MiB of the device's memory."""
    limits: Limits = field(default_factory=Limits)
    """Deadlines and bounds of the store (`kvstore.Limits`), a table of names and values;
    `lookup_timeout_s` wins over its `redis_timeout_s`."""
    pinned_fraction: Annotated[float, NumberRange(above=0, most=1)] = PINNED_FRACTION_MAX
    """Share of the engine's blocks that saves in flight may hold."""

    def __post_init__(self) -> None:
        check_settings(self)
        if self.url is not None and "://" not in self.url:
            raise UsageError("url", self.url, "must be a URL such as redis://host:6379/0")
        if self.ttl_s is not None and self.vram:
            raise UsageError("ttl_s", self.ttl_s, "cannot be used with `vram`, which keeps no time")

    @property
    def life(self) -> dict[str, int]:
        """Return the fields of a namespace that bound the life of its blocks."""
        return {} if self.ttl_s is None else {"ttl_s": self.ttl_s}

    @classmethod
    def from_extra(
        cls,
        extra: Mapping[str, Any],
        *,
        where: str = "kv_connector_extra_config",
        only: Collection[str] = (),
    ) -> ConnectorSettings:
        """Return settings from an engine's free-form mapping `where`; an unknown name is an error.

        With `only`, so is a name that is not among these: it would have no effect. What `extra`
        does not name is taken from `[connector]` and `[limits]` of the operator's file, which
        is one for all engines: there, what has no effect on this one is passed over.
        """
        file = read_config()
        shared = file.table("connector")
        read_settings(cls, shared, where=file.where("connector"))
        known_names(extra, only or [f.name for f in fields(cls)], where=where)
        values = {n: v for n, v in shared.items() if not only or n in only} | dict(extra)
        if not isinstance(values.get("limits"), Limits):
            bounds = dict(shared.get("limits", {}))
            if "limits" in extra:
                read_settings(Limits, extra["limits"], where=f"{where}.limits")
                bounds |= extra["limits"]
            values["limits"] = file.limits(bounds)
        redis_timeout_s = values["limits"].redis_timeout_s
        if only or redis_timeout_s != Limits().redis_timeout_s:
            values.setdefault("lookup_timeout_s", redis_timeout_s)
        return read_settings(cls, values, where=where)


def json_object(where: str, document: str) -> dict[str, object]:
    """Return what `document`, JSON that an operator wrote at `where`, says. Raises `UsageError`
    when it is no object, or one of more than `CONFIG_BYTES_MAX` characters."""
    if len(document) > CONFIG_BYTES_MAX:
        raise UsageError(where, document, f"at most {CONFIG_BYTES_MAX} characters")
    try:
        values = json.loads(document)
    except (ValueError, RecursionError) as e:
        raise UsageError(where, document, f"must be JSON: {e}") from e
    if not isinstance(values, dict):
        raise UsageError(where, document, "must be a JSON object")
    return values
