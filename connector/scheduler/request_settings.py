"""Reads what a request itself says about loading and saving, in its `kv_transfer_params`.

What cannot be understood is taken as "nothing at all": who writes `skip_save` has a prompt that
must not be kept, and an engine must not stop over one request's parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """At most so many tokens; None: no limit of the request's own."""

    max_load_tokens: int | None = None
    """Of its prompt, from the store."""
    max_save_tokens: int | None = None
    """From its beginning, to the store; whole blocks of them are saved."""

    @classmethod
    def of(cls, request_id: str, params: Mapping[str, Any] | None) -> Self:
        """From `skip_load`, `skip_save`, `max_load_tokens`, `max_save_tokens`; others are not ours.

        Never raises: a value of another kind is written to the log, and nothing is loaded or
        saved, whichever it was about.
        """
        if not params:
            return cls()
        return cls(*(_most(request_id, params, what) for what in ("load", "save")))


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
