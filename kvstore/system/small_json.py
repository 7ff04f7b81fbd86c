"""Reads JSON that another process wrote, which may be anybody's: its size and depth are limited.

A parser of JSON takes memory and time for what is in it, not for its length alone: a megabyte of
empty lists is 350,000 objects and a second. So what opens lists and objects is counted first.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
BRACKETS_MAX = 64
"""Lists and objects in a message between processes; brackets inside strings count too."""


def parse_object(raw: bytes | str, bytes_max: int) -> JsonObject:
    """Return the JSON object in `raw`; an empty one when there is none, or it is too large."""
    if len(raw) > bytes_max:
        return {}
    opened = (
        raw.count("[") + raw.count("{")
        if isinstance(raw, str)
        else raw.count(b"[") + raw.count(b"{")
    )
    if opened > BRACKETS_MAX:
        return {}
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
