"""Keeps vLLM for CPUs and a connector that imports llvmlite from tripping over each other."""

from __future__ import annotations

from typing import Any


def say_what_is_lacking() -> None:
    """Have `llvmlite` raise for the names that Python itself asks for.

    vLLM for CPUs looks at the `__dict__` of everything that is imported when it replaces kernels,
    and llvmlite, where a connector has imported it by then (LMCache does), answers that with a
    function of its library: the engine would not start, by no fault of the connector.
    """
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return
    library = type(ffi.lib)
    found = library.__getattr__

    def checked(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return found(self, name)

    library.__getattr__ = checked
