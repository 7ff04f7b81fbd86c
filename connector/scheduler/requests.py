"""Holds the scheduler side's state of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connector.layout.block_plan import EVERYWHERE, Checkpoints, attention_run
from connector.messages import EngineRequest, LoadJob, log_name
from connector.scheduler.load_costs import Choice
from connector.scheduler.lookup import Lookup
from connector.scheduler.request_settings import RequestSettings
from kvstore.spi import Key

if TYPE_CHECKING:
    from connector.layout.geometry import StoreLayout


@dataclass(slots=True, eq=False)
class Offer:
    """Holds what the last `match` offered; taken up by `allocated`, or not."""

    lookup: Lookup
    start_token: int
    choice: Choice


@dataclass(slots=True, eq=False)
class LoadUnderWay:
    """Holds a load job that not all workers have reported yet."""

    job: LoadJob
    first_block: int
    """Index in the prefix of the job's first store block."""
    offer: Offer
    """The offer of which the job takes the first tokens, or all."""


@dataclass(slots=True, eq=False)
class Trail:
    """Follows the generated blocks of one request (saving/generated.py)."""

    blocks: dict[bytes, Key] = field(default_factory=dict)
    """Hash and key of those that are stored, in the order of the prefix."""
    asked: int = 0
    """How many of them, the first ones, were asked for."""
    stored_at: float = 0.0
    """When the last of them was stored."""
    over: bool = False
    """Whether it is judged, dropped or not followed."""


@dataclass(slots=True, eq=False)
class RequestState:
    """Holds what the scheduler side keeps of one request; only the scheduling thread uses it."""

    lookup: Lookup | None = None
    offer: Offer | None = None
    barred: dict[Key, bytes] = field(default_factory=dict)
    """Records that could not be loaded for this request; they are never offered to it again."""
    failed_loads: int = 0
    to_be_computed: bool = False
    """Whether its last load failed, so that nothing is offered before the engine has computed it
    and preempts it (`SchedulerSettings.loads_again`)."""
    present_blocks: int = 0
    """Leading store blocks that the last lookup found; they are not saved again."""
    junction_blocks: int = 0
    """Leading store blocks of which the last lookup found all but windows and states."""
    goes_on: bool = False
    """Whether it has saved windows or states behind what the last lookup found."""
    leaves: bool = False
    """Whether those at the end of what it found are not needed any more, as it goes on."""
    saved_blocks: int = 0
    """Leading store blocks that were planned for saving since the last preemption."""
    settings: RequestSettings | None = None
    """The request's own settings; None until they were read."""
    shortened: bool = False
    """Whether less was once offered than was found, as computing it is quicker."""
    waiting_blocks: int = 0
    """Full store blocks behind these that found no room in the last step."""
    hands_over_tokens: int = 0
    """Tokens of a prompt whose last, partial block is to be saved too."""
    saves_generated: bool | None = None
    """Whether its generated blocks are saved; None until one could be."""
    trail: Trail | None = None
    part_planned: bool = False
    """Whether that block's save was planned, or was found impossible."""
    part_saving: bool = False
    """Whether that block's save was planned."""
    awaits_since: float | None = None
    """Time since which it waits for blocks that another engine is saving."""
    save_barred: bool = False
    """Whether it was computed before a reset, or on what somebody else was still loading: it is not
    saved until it is computed again."""
    _keys: tuple[tuple[list[Key], ...], ...] = ()
    """Keys of the engine's own split, per group and shard."""
    _key_hashes: Sequence[bytes] = ()
    """The hashes from which the keys were made."""

    def own_settings(self, request: EngineRequest) -> RequestSettings:
        """Return what the request itself says about its KV, read once."""
        if self.settings is None:
            params = getattr(request, "kv_transfer_params", None)
            hints = getattr(request, "kv_hints", None)
            actions = () if hints is None else hints.actions
            self.settings = RequestSettings.of(log_name(request), params, actions)
        return self.settings

    def found(self, lookup: Lookup, run: int, request: EngineRequest, layout: StoreLayout) -> None:
        """Note that a look-up found the first `run` store blocks, and of how many more it found
        all but windows and states."""
        self.present_blocks = self.junction_blocks = run
        if layout.forgetful:
            self.junction_blocks = attention_run(
                lookup.placement, self.barred, layout, request.num_tokens
            )

    def checkpoints(
        self, request: EngineRequest, interval_tokens: int | None, block_tokens: int
    ) -> Checkpoints:
        """Return where windows and states of the request are saved. Behind its prompt also the
        same prompt may begin, whose last token is computed again."""
        if interval_tokens is None:
            return EVERYWHERE
        prompt = request.num_prompt_tokens
        ends = {prompt // block_tokens, (prompt - 1) // block_tokens, self.junction_blocks}
        return Checkpoints(-(-interval_tokens // block_tokens), frozenset(ends))

    def forget_progress(self) -> None:
        """Let a preempted request start over: its blocks are lost and are allocated elsewhere."""
        self.lookup = None
        self.offer = None
        self.present_blocks = 0
        self.saved_blocks = self.waiting_blocks = 0
        self.part_planned = self.part_saving = False
        self.save_barred = False
        self.to_be_computed = False

    def keys(
        self, request: EngineRequest, blocks: int, layout: StoreLayout
    ) -> tuple[tuple[list[Key], ...], ...]:
        """Return keys of at least `blocks` store blocks, as far as the engine has hashed.

        Those of a lookup are used again only while the request still has the
        tokens that were looked up: a session may replace its last ones.
        """
        per_key = layout.hashes_per_key
        hashes = request.block_hashes
        last = blocks * per_key - 1
        if not self._keys and self.lookup is not None and self.lookup.done.is_set():
            self._keys, self._key_hashes = self.lookup.keys, self.lookup.hashes
        if (
            not self._keys
            or len(self._keys[0][0]) < blocks
            or tuple(self._key_hashes[last : last + 1]) != tuple(hashes[last : last + 1])
        ):
            self._key_hashes = tuple(hashes)
            self._keys = tuple(
                tuple(ns.engine_keys(self._key_hashes, per_key) for ns in group.namespaces)
                for group in layout.groups
            )
        return self._keys
