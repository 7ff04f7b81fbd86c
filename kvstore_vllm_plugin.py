"""vLLM's plug-in entry point, in a module of its own: nothing that it needs may be somebody else's.

vLLM runs it in every process of every engine in this environment, whether that engine uses the
store or not, and catches nothing. So it never raises, and it imports next to nothing.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger(f"vllm.{__name__}")  # only loggers below vLLM's own are shown at INFO


def foreign_connector() -> str | None:
    """Where Python finds a package `connector` that is not ours, if it does.

    Ours lies beside this file. Another one stands in its way where it comes first on the path,
    or where it was installed over ours.
    """
    ours = Path(__file__).resolve().with_name("connector")
    spec = find_spec("connector")
    if spec is None or spec.origin is None:  # none at all, or a folder without an __init__
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        return folders[0] if folders else "nowhere"
    place = Path(spec.origin).resolve()
    if place.parent != ours:
        return str(place)
    try:
        return None if "KVStoreConnector" in place.read_text() else str(place)
    except OSError:
        return None  # within an archive


def register_vllm() -> None:
    """Make `"kv_connector": "KVStoreConnector"` known to vLLM. Says in one line why not."""
    try:
        foreign = foreign_connector()
        if foreign is not None:
            log.warning(
                "kvstore: KVStoreConnector is not there: the package `connector` was found in %s, "
                "which is not ours. Remove it from this environment or from sys.path",
                foreign,
            )
            return
        import_module("connector.adapters").register_vllm()
    except Exception as e:
        log.warning("kvstore: KVStoreConnector is not there: %s: %s", type(e).__name__, e)
