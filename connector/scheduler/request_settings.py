"""Reads what a request itself says about its KV: in `kv_transfer_params`, and in `kv_hints`.

What cannot be understood is taken as "nothing at all": who writes `skip_save` has a prompt that
must not be kept, and an engine must not stop over one request's parameters.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from connector.limits import RETAINED_S_MAX as _MOST_S
from connector.limits import TENANT_BYTES_MAX

log = logging.getLogger(f"kvstore.{__name__}")


ACTION_VERSIONS = ("1", "1.0")
"""Versions of the actions "retain", "release" and "prefetch" in a request's `kv_hints`."""


HANDED_TOKENS = "kvstore_tokens"
"""The field of `kv_transfer_params` by which a prefill engine tells the decode engine for how many
tokens the KV is in the store or on its way there."""


class Wish(NamedTuple):
    """Asks to retain the request's blocks for so long, on the budget of that tenant."""

    for_s: int
    """Seconds to retain them; 0 releases them."""
    tenant: str = ""


class Action(Protocol):
    """Reads one action of vLLM's `KvHintsEnvelope`, as far as it is read here."""

    @property
    def action_type(self) -> str: ...
    @property
    def action_version(self) -> str: ...
    @property
    def payload(self) -> object: ...


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Holds what a request says about its own loads and saves. None: no limit of its own."""

    max_load_tokens: int | None = None
    """Tokens of its prompt to load from the store, at most."""
    max_save_tokens: int | None = None
    """Tokens from its beginning to save to the store, at most; whole blocks of them are saved."""
    retain: Wish | None = None
    prefetch_tokens: int = 0
    """Tokens of its prompt that are to be brought to this host from others."""
    hands_over: bool = False
    """Whether another engine continues the prompt (`do_remote_decode`), so that its last, partial
    block must be found too."""
    handed: bool = False
    """Whether another engine has computed the prompt (`do_remote_prefill`)."""
    handed_tokens: int = 0
    """Tokens of it that the other engine has saved or is saving."""

    @classmethod
    def of(
        cls,
        request_id: str,
        params: Mapping[str, Any] | None,
        hints: Sequence[Action] = (),
    ) -> Self:
        """Read `skip_load`, `skip_save`, `max_load_tokens`, `max_save_tokens`, `retain_s`,
        `tenant`, `do_remote_decode`, `do_remote_prefill` and `HANDED_TOKENS`; others are not
        ours. Of `hints`, the last action "retain" or "release" counts,
        before `retain_s`, and the last "prefetch".

        Never raises: a value of another kind is written to the log, which calls the request
        `request_id`, and nothing is loaded, saved or retained, whichever it was about.
        """
        if not params and not hints:
            return cls()
        params = params or {}
        retain, prefetch_tokens = None, 0
        if "retain_s" in params:
            retain = _wish(request_id, params["retain_s"], params.get("tenant", ""))
        for action in hints:
            if action.action_type in ("retain", "release"):
                retain = _hinted(request_id, action) or retain
            elif action.action_type == "prefetch":
                prefetch_tokens = _prefetch(request_id, action)
        load, save = (_most(request_id, params, what) for what in ("load", "save"))
        handed = params.get("do_remote_prefill") is True
        tokens = params.get(HANDED_TOKENS) if handed else 0
        return cls(
            load,
            save,
            retain,
            prefetch_tokens,
            hands_over=params.get("do_remote_decode") is True,
            handed=handed,
            handed_tokens=tokens if type(tokens) is int else 0,
        )


def _known(request_id: str, action: Action) -> bool:
    if action.action_version in ACTION_VERSIONS:
        return True
    log.warning(
        "request %s: kv_hints: %s of version %r is not known here, only %s; not done",
        request_id,
        action.action_type,
        action.action_version,
        ACTION_VERSIONS,
    )
    return False


def _prefetch(request_id: str, action: Action) -> int:
    if not _known(request_id, action):
        return 0
    payload = action.payload if isinstance(action.payload, Mapping) else {"max_tokens": None}
    most = payload.get("max_tokens", sys.maxsize)
    if type(most) is int and most >= 0:
        return most
    log.warning(
        "request %s: kv_hints: prefetch: max_tokens must be an integer from 0, got %r; not done",
        request_id,
        most,
    )
    return 0


def _hinted(request_id: str, action: Action) -> Wish | None:
    if not _known(request_id, action):
        return None
    if not isinstance(action.payload, Mapping):
        return _wish(request_id, action.payload, "")
    release = action.action_type == "release"
    for_s = 0 if release else action.payload.get("ttl_s")
    return _wish(request_id, for_s, action.payload.get("tenant", ""))


def _wish(request_id: str, for_s: object, tenant: object) -> Wish | None:
    if not isinstance(for_s, int | float) or isinstance(for_s, bool) or not 0 <= for_s <= _MOST_S:
        what, value, rule = "seconds", for_s, f"must be a number from 0 to {_MOST_S}"
    elif not isinstance(tenant, str) or len(tenant.encode("utf-8", "replace")) > TENANT_BYTES_MAX:
        what, value, rule = "tenant", tenant, f"must be text of at most {TENANT_BYTES_MAX} bytes"
    else:
        return Wish(math.ceil(for_s), tenant)
    log.warning("request %s: to retain: %s %s, got %r; not done", request_id, what, rule, value)
    return None


def _most(request_id: str, params: Mapping[str, Any], what: str) -> int | None:
    skip, most = params.get(f"skip_{what}"), params.get(f"max_{what}_tokens")
    if not isinstance(skip, bool | None):
        return _nothing(request_id, what, f"skip_{what}", skip, "must be true or false")
    if most is not None and (type(most) is not int or most < 0):
        return _nothing(request_id, what, f"max_{what}_tokens", most, "must be an integer from 0")
    return 0 if skip else most


def _nothing(request_id: str, what: str, name: str, value: object, rule: str) -> int:
    done = {"load": "nothing is loaded for it", "save": "nothing of it is saved"}[what]
    log.warning(
        "request %s: kv_transfer_params.%s %s, got %r; %s", request_id, name, rule, value, done
    )
    return 0
