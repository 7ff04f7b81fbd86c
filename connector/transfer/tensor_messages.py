"""Hands tensors from one process to another through the store: put, kept, taken, given back.

A message is a few tensors under one name: its parts first, then a header that
lists them, so that whoever sees the header can read the rest. A tensor is one value
of the store, copied from where it lies and to where it goes; several where it is larger
than a value may be, or than the room that the node has in one piece. The store is a
cache and may evict what nobody holds; so a sender pins a message until it knows
that it was taken. Only the store's own calls are used: nothing here talks to
Redis, and clients never write there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from connector.limits import (
    POLL_MAX_S,
    POLL_MIN_S,
    TENSOR_MESSAGE_BYTES_MAX,
    TENSOR_MESSAGE_NAME_MAX,
    TENSOR_MESSAGE_PART_BYTES,
    TENSOR_MESSAGE_PART_BYTES_MIN,
)
from kvstore import DeadlineError, PeerError, PutResult, PutStatus, UsageError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(f"kvstore.{__name__}")

_T = TypeVar("_T")
_Values = dict[str, "torch.Tensor | bytes"]
"""Values to put, by key: parts of tensors, and headers."""


class MessagePin(Protocol):
    """Keeps one value in the store until `close`."""

    def close(self) -> None: ...


class ValueStore(Protocol):
    """Describes the part of `kvstore.Client` that messages need."""

    def put_many(
        self, items: Iterable[tuple[str | bytes, object]], *, replace: bool = False
    ) -> list[PutResult]: ...
    def get(self, key: str | bytes) -> bytes | None: ...
    def get_many(
        self, keys: Sequence[str | bytes], *, out: Sequence[torch.Tensor] | None = None
    ) -> Sequence[bytes | torch.Tensor | None]:
        """Return each value, with `out` the part of it that was written; None for a miss."""
        ...

    def pin(self, key: str | bytes) -> MessagePin | None: ...
    def delete(self, key: str | bytes) -> bool: ...


class Content(NamedTuple):
    """Holds what was in a message."""

    tensors: list[torch.Tensor | None]
    """torch tensors in CPU memory, None where None was sent."""
    note: str


@dataclass(slots=True)
class TensorMessage:
    """Keeps what a sender still holds of a message it has sent."""

    name: str
    size_bytes: int = 0
    pins: dict[str, MessagePin] = field(default_factory=dict)
    """Pins by key; every value of the message is pinned."""


def check_name(name: str) -> str:
    """Return `name` if it can be the name of a pipe or buffer; else raise `UsageError`."""
    if not isinstance(name, str) or not 0 < len(name) <= TENSOR_MESSAGE_NAME_MAX:
        raise UsageError(
            "name", name, f"must be a string of 1 to {TENSOR_MESSAGE_NAME_MAX} characters"
        )
    return name


def check_bytes_max(bytes_max: float) -> int:
    """Return a bound on what a sender holds, in bytes; else `UsageError`."""
    if not 0 < bytes_max <= TENSOR_MESSAGE_BYTES_MAX:
        raise UsageError(
            "bytes_max", bytes_max, f"must be above 0, at most {TENSOR_MESSAGE_BYTES_MAX}"
        )
    return int(bytes_max)


def size_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the payload bytes of `tensors`, None counting as none. Raises `UsageError` for
    anything else."""
    import torch

    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise UsageError("tensor", type(tensor).__name__, "must be a torch tensor or None")
        odd = tensor.is_quantized or tensor.is_meta or tensor.is_nested
        if odd or tensor.layout is not torch.strided:
            shown = f"{tensor.layout}, {tensor.dtype}"
            raise UsageError("tensor", shown, "must be dense, of plain numbers (`to_dense()`)")
        total += tensor.numel() * tensor.element_size()
    return total


def until(deadline: float, probe: Callable[[], _T | None]) -> _T | None:
    """Return what `probe` gives, asked again until it is not None or `deadline` (monotonic) is
    over."""
    pause_s = POLL_MIN_S
    while True:
        answer = probe()
        left_s = deadline - time.monotonic()
        if answer is not None or left_s <= 0:
            return answer
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, POLL_MAX_S)


def send(
    store: ValueStore,
    name: str,
    tensors: Sequence[torch.Tensor | None],
    deadline: float,
    note: str = "",
) -> TensorMessage:
    """Put a message and pin it. Tries again while the store declines.

    Raises `UsageError` when the name was used before, `DeadlineError` when the
    store still declines at `deadline`, `NodeUnavailableError`; then nothing of it
    stays pinned.
    """
    described, parts = _take_apart(name, tensors)
    message = TensorMessage(name, sum(part.numel() for part in parts.values()))
    try:
        _put_pinned(store, message, parts, deadline)
        header = json.dumps({"note": note, "tensors": _with_parts(name, described, parts)}).encode()
        _put_pinned(store, message, {name: header}, deadline)
    except BaseException:
        with suppress(PeerError):
            release(store, message)
        raise
    return message


def hold(store: ValueStore, name: str, value: bytes) -> TensorMessage | None:
    """Put and pin one small value; None when the store declines just now."""
    message = TensorMessage(name)
    try:
        _put_pinned(store, message, {name: value}, deadline=0.0, again=True)
    except PeerError:
        return None
    return message


def keep(
    store: ValueStore, message: TensorMessage, values: Mapping[str, bytes], deadline: float
) -> None:
    """Put and pin small values of a message, all or, of those that `message` then has, some.

    Raises as `send`."""
    _put_pinned(store, message, dict(values), deadline)


def replace(
    store: ValueStore, message: TensorMessage, values: Mapping[str, bytes], deadline: float
) -> None:
    """Do `keep`, in place of what has these keys: a reader meanwhile has a miss."""
    for key in values:
        if key in message.pins:
            message.pins.pop(key).close()
    _put_pinned(store, message, dict(values), deadline, replace=True)


def _put_pinned(
    store: ValueStore,
    message: TensorMessage,
    values: _Values,
    deadline: float,
    *,
    again: bool = False,
    replace: bool = False,
) -> None:
    """Put all of `values`; with `again`, one that exists is as good, with `replace`, it goes.

    A part of a tensor that is rejected is halved, in `values` too.
    """
    waiting = dict(values)
    tried = set[str]()
    why = "no answer"

    def attempt() -> bool | None:
        nonlocal why
        results = store.put_many(waiting.items(), replace=replace)
        for key, result in zip(list(waiting), results, strict=True):
            there = result.status in (PutStatus.EXISTS, PutStatus.DIFFERS)
            if there and not again and key not in tried:
                raise UsageError("name", key, "was used before: choose another for each use")
            if not result:
                why = result.reason or str(result.status)
                if result.status is PutStatus.REJECTED and key not in tried:
                    _halve(key, values, waiting)
                continue
            # Between the put and the pin it may have been evicted: then it is put again.
            tried.add(key)
            pin = store.pin(key)
            if pin:
                message.pins[key] = pin
                del waiting[key]
        return True if not waiting else None

    if waiting and until(deadline, attempt) is None:
        raise DeadlineError(
            f"the store did not take {len(waiting)} values of {message.name}: {why}"
        )


def _take_apart(
    name: str, tensors: Sequence[torch.Tensor | None]
) -> tuple[list[list[object] | None], dict[str, torch.Tensor]]:
    import torch

    described: list[list[object] | None] = []
    parts: dict[str, torch.Tensor] = {}
    for i, tensor in enumerate(tensors):
        if tensor is None:
            described.append(None)
            continue
        described.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        # Bytes of any dtype; reshape first, for a scalar has no last dimension to view.
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = plain.reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), TENSOR_MESSAGE_PART_BYTES):
            parts[_part(name, i, start)] = flat[start : start + TENSOR_MESSAGE_PART_BYTES]
    return described, parts


def _part(name: str, tensor: int, start: int) -> str:
    """Return the key of the part of a tensor that begins at byte `start`."""
    return f"{name}/{tensor}.{start}"


def _halve(
    key: str, values: dict[str, torch.Tensor | bytes], waiting: dict[str, torch.Tensor | bytes]
) -> None:
    part = values[key]
    if isinstance(part, bytes) or part.numel() <= TENSOR_MESSAGE_PART_BYTES_MIN:
        return
    base, _, start = key.rpartition(".")
    middle = part.numel() // 2
    for where, half in ((int(start), part[:middle]), (int(start) + middle, part[middle:])):
        values[f"{base}.{where}"] = waiting[f"{base}.{where}"] = half


def _with_parts(
    name: str, described: list[list[object] | None], parts: Iterable[str]
) -> list[list[object] | None]:
    """Return `described`, each tensor with the positions at which its parts begin."""
    starts: dict[int, list[int]] = {i: [] for i in range(len(described))}
    for key in parts:
        tensor, start = key.removeprefix(f"{name}/").split(".")
        starts[int(tensor)].append(int(start))
    return [one and [*one, sorted(starts[i])] for i, one in enumerate(described)]


def receive(store: ValueStore, name: str) -> Content | None:
    """Return a message's tensors, None while it is not there as a whole. It stays where it is."""
    header = store.get(name)
    if header is None:
        return None
    import torch

    content = json.loads(header)
    tensors: list[torch.Tensor | None] = []
    keys: list[str] = []
    places: list[torch.Tensor] = []
    for i, described in enumerate(content["tensors"]):
        if described is None:
            tensors.append(None)
            continue
        dtype, shape, starts = getattr(torch, described[0]), described[1], described[2]
        tensor = torch.empty(shape, dtype=dtype)
        tensors.append(tensor)
        flat = tensor.reshape(-1).view(torch.uint8)
        for start, end in zip(starts, [*starts[1:], flat.numel()], strict=False):
            keys.append(_part(name, i, start))
            places.append(flat[start:end])
    got = store.get_many(list(keys), out=places)
    # A shorter value is another's: the rest of its place was never written.
    whole = all(
        value is not None and len(value) == len(place)
        for value, place in zip(got, places, strict=True)
    )
    return Content(tensors, content["note"]) if whole else None


def release(store: ValueStore, message: TensorMessage, only: Collection[str] | None = None) -> None:
    """Let a message go and drop it, header first; or of it what has the keys in `only`. Never
    raises for a peer's fault."""
    for key in [key for key in reversed(message.pins) if only is None or key in only]:
        try:
            message.pins.pop(key).close()
            store.delete(key)
        except PeerError as e:
            # A node that is gone holds nothing; one that hangs gives it back by itself.
            log.debug("%s was not given back: %s", key, e)


def leave(message: TensorMessage) -> None:
    """Hold a message no longer, but let it stay in the store until it is evicted."""
    for pin in message.pins.values():
        with suppress(PeerError):
            pin.close()
    message.pins.clear()


def newest(store: ValueStore, names: Sequence[str]) -> int:
    """Return position of the last of `names` that is there, -1 when none is; one round trip."""
    got = store.get_many(list(names)) if names else []
    return max((i for i, value in enumerate(got) if value is not None), default=-1)
