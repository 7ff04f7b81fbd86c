"""Holds the settings of the scheduler side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from connector.limits import HAND_OVER_WAIT_S, LOOKUP_TIMEOUT_S, PINNED_FRACTION_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Holds what the scheduler side is told when it is made."""

    loads: bool = True
    saves: bool = True
    save_decode: Literal[True, False, "auto"] = "auto"
    lookup_timeout_s: float = LOOKUP_TIMEOUT_S
    hand_over_wait_s: float = HAND_OVER_WAIT_S
    """Time that a request waits at most for what a prefill engine says that it is saving."""
    volatile_tokens: int = 0
    """Tokens at a request's end whose KV may still change (speculative decoding)."""
    null_block_id: int | None = None
    """The engine's block id for "no block here"."""
    pinned_fraction: float = PINNED_FRACTION_MAX
    """Share of the engine's blocks that saves in flight may hold."""
    events: bool = False
    """Whether somebody takes events about stored blocks."""
    layerwise: bool = False
    """Whether loads are part of the step that computes the rest of the prompt."""
    loads_again: bool = True
    """Whether a request whose load failed may be offered another before it was computed."""
    window_interval_tokens: int | None = None
    """Windows are saved at multiples of this, at the end of prompts, and where more of a prefix was
    found than of windows and states; None: wherever the engine has them."""
    state_interval_tokens: int | None = None
    """The same interval for states."""
