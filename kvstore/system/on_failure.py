"""Undoes what a block began when it raises: for resources that have no owner yet."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, ParamSpec

P = ParamSpec("P")


class on_failure(Generic[P]):  # noqa: N801  # as contextlib's
    """Call `undo` when the block raises anything, and raise it again."""

    def __init__(self, undo: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        self._undo, self._args, self._kwargs = undo, args, kwargs

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._undo(*self._args, **self._kwargs)
