"""Carries what the processes of one engine tell each other, in messages of plain data.

They go over a gloo group of their own in `torch.distributed`, which the engine has started: with a
deadline of its own, and apart from what the engine sends.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

import msgpack

from connector.limits import LOCKSTEP_HEAD_BYTES, LOCKSTEP_MESSAGE_BYTES_MAX, LOCKSTEP_TIMEOUT_S
from kvstore import DeadlineError, InternalError, PeerError

_LENGTH_BYTES = 8


class Exchange(Protocol):
    """Exchanges messages between one process and the others of its engine."""

    @property
    def leads(self) -> bool:
        """Return whether this is the first of them."""
        ...

    def __call__(self, payload: Any) -> list[Any]:
        """Return what each process has said, in their order; tuples come as lists.

        Each of them must call it equally often. Raises `PeerError` when one of them is gone and
        `DeadlineError` when one has not called within `LOCKSTEP_TIMEOUT_S`.
        """
        ...


class GlooExchange:
    """Implements `Exchange` over some ranks of the default group of `torch.distributed`."""

    def __init__(self, size: int, timeout_s: float = LOCKSTEP_TIMEOUT_S) -> None:
        """Join the group. Engines of `size` processes have ranks in a row, one engine after the
        other.

        Returns when all processes of this one have called it. Raises `PeerError` as a call does.
        """
        from torch import distributed

        self._me: int = distributed.get_rank() % size
        first = distributed.get_rank() - self._me
        self._ranks = list(range(first, first + size))
        self._timeout_s = timeout_s
        try:
            self._group = distributed.new_group(
                self._ranks,
                timeout=timedelta(seconds=timeout_s),
                backend="gloo",
                use_local_synchronization=True,
            )
        except RuntimeError as e:
            raise PeerError(f"the processes of this engine did not find each other: {e}") from e

    @property
    def leads(self) -> bool:
        return self._me == 0

    def __call__(self, payload: Any) -> list[Any]:
        raw = msgpack.packb(payload)
        if len(raw) > LOCKSTEP_MESSAGE_BYTES_MAX:
            raise InternalError(
                f"{len(raw)} bytes in a message, at most {LOCKSTEP_MESSAGE_BYTES_MAX}"
            )
        started = time.monotonic()
        try:
            return [msgpack.unpackb(one, strict_map_key=False) for one in self._gather(raw)]
        except RuntimeError as e:
            if time.monotonic() - started < self._timeout_s:
                raise PeerError(f"a process of this engine is gone: {e}") from e
            raise DeadlineError(
                f"a process of this engine said nothing for {self._timeout_s:g} s: {e}"
            ) from e

    def _gather(self, raw: bytes) -> list[bytes]:
        """Exchange what fits into `LOCKSTEP_HEAD_BYTES` in one round, and each longer message in
        one more."""
        import torch
        from torch import distributed

        room = LOCKSTEP_HEAD_BYTES - _LENGTH_BYTES
        head = bytearray(LOCKSTEP_HEAD_BYTES)
        head[:_LENGTH_BYTES] = len(raw).to_bytes(_LENGTH_BYTES, "little")
        head[_LENGTH_BYTES : _LENGTH_BYTES + min(room, len(raw))] = raw[:room]
        heads = [torch.empty(LOCKSTEP_HEAD_BYTES, dtype=torch.uint8) for _ in self._ranks]
        distributed.all_gather(heads, torch.frombuffer(head, dtype=torch.uint8), group=self._group)
        out = []
        for place, received in enumerate(heads):
            first = received.numpy().tobytes()
            length = int.from_bytes(first[:_LENGTH_BYTES], "little")
            message = first[_LENGTH_BYTES : _LENGTH_BYTES + min(room, length)]
            if length > room:
                rest = torch.empty(length - room, dtype=torch.uint8)
                if place == self._me:
                    rest = torch.frombuffer(bytearray(raw[room:]), dtype=torch.uint8)
                distributed.broadcast(rest, src=self._ranks[place], group=self._group)
                message += rest.numpy().tobytes()
            out.append(message)
        return out
