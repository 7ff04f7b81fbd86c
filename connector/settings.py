"""Settings of the connector, as they come in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from connector.limits import (
    BLOCK_TOKENS_MAX,
    NODE_BYTES_MIN,
    PINNED_FRACTION_MAX,
    TIMEOUT_S_MAX,
    TP_SIZES_DEFAULT,
    TP_SIZES_MAX,
    VRAM_POOL_BYTES_MIN,
)
from kvstore import UsageError

STORE_SETTINGS = (
    "url",
    "key_prefix",
    "node",
    "node_size_bytes",
    "run_dir",
    "lookup_timeout_s",
    "verify",
    "weights_id",
)
"""Those that mean something to an engine which names and lays out its pages itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """One connector's settings. Raises `UsageError` naming field, value and limit."""

    url: str | None = None
    """The index, a Redis URL; None: KVSTORE_URL, else the Redis embedded in this machine."""
    key_prefix: str = "kv:default"
    """Prefix of the index's keys: stores with different ones know nothing of each other."""
    node: str | None = None
    """Name of the memory node on this host; None: the only one there is."""
    node_size_bytes: int = 1 << 30
    """Of the embedded memory node, which the first save starts when there is neither a URL nor
    a node."""
    run_dir: str | None = None
    """Directory of the node's socket; None: the store's own default."""
    block_tokens: int | None = None
    """Tokens of one store block; None: chosen from the KV geometry."""
    tp_sizes: Sequence[int] = TP_SIZES_DEFAULT
    """Tensor-parallel sizes of engines whose blocks are looked for, besides this engine's own."""
    lookup_timeout_s: float = 0.05
    """After that a lookup is a miss."""
    load_timeout_s: float = 5.0
    """After that the engine computes what was not loaded."""
    save_timeout_s: float = 10.0
    """After that a save is dropped and its engine blocks are free again."""
    layerwise: bool = False
    """Load and save layer by layer, beside the forward (docs/engines.md says when it pays)."""
    vram: bool = False
    """Keep recent blocks in VRAM, `vram_size_bytes` of them, and read those of other engines on
    this host there (docs/decisions/0023; it has not run on a device yet)."""
    vram_size_bytes: int = 1 << 30
    """Of VRAM that each worker of an engine that saves keeps recent blocks in, with `vram`."""
    verify: Literal["never", "always"] = "never"
    """Whether payload checksums are written and checked on this host too."""
    save_decode: bool = True
    """Save blocks that hold generated tokens too."""
    weights_id: str | None = None
    """What stands for the weights in the namespace, for those who know it better: engines that
    give the same have the same weights, whatever their files say. None: a fingerprint of them."""
    pinned_fraction: float = PINNED_FRACTION_MAX
    """Share of the engine's blocks that saves in flight may hold."""

    def __post_init__(self) -> None:
        for name in ("lookup_timeout_s", "load_timeout_s", "save_timeout_s"):
            _number(name, getattr(self, name), TIMEOUT_S_MAX)
        _number("pinned_fraction", self.pinned_fraction, 1.0)
        for name in ("key_prefix", "node", "run_dir", "weights_id"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise UsageError(name, value, "must be a string that is not empty")
        if self.url is not None and (not isinstance(self.url, str) or "://" not in self.url):
            raise UsageError("url", self.url, "must be a URL such as redis://host:6379/0")
        if self.verify not in ("never", "always"):
            raise UsageError("verify", self.verify, "must be 'never' or 'always'")
        for name in ("save_decode", "layerwise", "vram"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(name, getattr(self, name), "must be true or false")
        if self.vram and self.verify == "always":
            raise UsageError("vram", True, "must be false where verify is always: no checksums")
        if not isinstance(self.tp_sizes, list | tuple) or not all(
            isinstance(size, int) and size >= 1 for size in self.tp_sizes
        ):
            raise UsageError("tp_sizes", self.tp_sizes, "must be a list of numbers of at least 1")
        if len(self.tp_sizes) > TP_SIZES_MAX:
            raise UsageError("tp_sizes", self.tp_sizes, f"must be at most {TP_SIZES_MAX} numbers")
        for name, least in (
            ("node_size_bytes", NODE_BYTES_MIN),
            ("vram_size_bytes", VRAM_POOL_BYTES_MIN),
        ):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise UsageError(name, size, f"must be at least {least}")
        tokens = self.block_tokens
        if tokens is not None and (
            not isinstance(tokens, int)
            or isinstance(tokens, bool)
            or not 1 <= tokens <= BLOCK_TOKENS_MAX
        ):
            raise UsageError("block_tokens", tokens, f"must be from 1 to {BLOCK_TOKENS_MAX}")

    @classmethod
    def from_extra(
        cls,
        extra: Mapping[str, Any],
        *,
        where: str = "kv_connector_extra_config",
        only: Collection[str] = (),
    ) -> ConnectorSettings:
        """Settings from an engine's free-form mapping `where`; an unknown name is an error.

        With `only`, so is a name that is not among these: it would have no effect.
        """
        known = sorted(only or (f.name for f in fields(cls)))
        for name in extra:
            if name not in known:
                raise UsageError(where, name, f"unknown; known are {', '.join(known)}")
        return cls(**extra)


def _number(name: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise UsageError(name, value, f"must be a number greater than 0, at most {most:g}")
