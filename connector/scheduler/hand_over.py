"""Decides how a prompt's last, partial block is used: arithmetic over a request and its lookup.

An engine that computes a prompt for another one (`do_remote_decode`) saves what is behind the last
full block too, under a key of its own (save_planner.py). The other one looks for it, so that it
computes one token and not up to a block of them. Ordinary requests neither save nor look for it,
but those of an engine that only loads look: it is there to decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from connector.layout.block_plan import covers

if TYPE_CHECKING:
    from connector.layout.geometry import StoreLayout
    from connector.messages import EngineRequest
    from connector.scheduler.lookup import Lookup
    from connector.scheduler.request_settings import RequestSettings
    from connector.scheduler.requests import RequestState
    from connector.scheduler.settings import SchedulerSettings


def part_wanted(
    own: RequestSettings | None,
    request: EngineRequest,
    layout: StoreLayout,
    settings: SchedulerSettings,
) -> bytes | None:
    """Return the hash of the partial block to look up; None: there is none.

    Only while no full block reaches beyond the prompt: its place is behind the last one.
    """
    if not _looks(own, settings) or not layout.takes_parts:
        return None
    part: bytes | None = getattr(request, "part_hash", None)
    blocks = len(request.block_hashes) // layout.hashes_per_key
    return part if blocks == request.num_prompt_tokens // layout.block_tokens else None


def part_found(
    state: RequestState,
    request: EngineRequest,
    lookup: Lookup,
    layout: StoreLayout,
    settings: SchedulerSettings,
) -> int:
    """Return tokens of a load that goes on to the end of the prompt, all but one of its tokens if
    there are no others; 0: not all of it is there."""
    if not _looks(state.settings, settings) or not layout.takes_parts:
        return 0
    end_token = min(request.num_prompt_tokens, request.num_tokens - 1)
    if end_token < 1 or not covers(lookup.placed, state.barred, layout, end_token):
        return 0
    return end_token


def awaited(state: RequestState, request: EngineRequest, layout: StoreLayout) -> int:
    """Return tokens that are worth waiting for, of those that another engine says to be saving."""
    own = state.settings
    if own is None or not own.handed_tokens or own.max_load_tokens is not None:
        return 0
    if not request.block_hashes and getattr(request, "part_hash", None) is None:
        return 0  # nothing of it has a name here
    tokens = min(own.handed_tokens, request.num_prompt_tokens - 1)
    if layout.takes_parts:
        return tokens
    # States are where that engine's steps ended: which of them are to come is not known.
    tokens = min(tokens, layout.block_tokens) if layout.recurrent else tokens
    return tokens // layout.block_tokens * layout.block_tokens


def _looks(own: RequestSettings | None, settings: SchedulerSettings) -> bool:
    return not settings.saves or (own is not None and own.handed)
