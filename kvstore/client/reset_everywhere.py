"""Resets namespaces on all nodes and hears who has confirmed it (docs/decisions/0029-reset.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvstore.batches import in_batches
from kvstore.client.base import ResetResult
from kvstore.client.nodes.deadlines import until
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.saving.host_writer import HostWriter
from kvstore.client.nodes.saving.remote_writer import RemoteWriter
from kvstore.core.resets import RANDOM_BITS, Resets
from kvstore.errors import IndexUnavailableError, NodeUnavailableError, UsageError
from kvstore.index.base import Index
from kvstore.limits import RESET_LISTENS_S, RESET_NAMESPACES_MAX
from kvstore.machine import Machine
from kvstore.nodedir import Announcement
from kvstore.transport.registry import CUDA_IPC

POLL_S = 0.05


def reset_everywhere(
    writer: HostWriter,
    remote: RemoteWriter,
    index: Index,
    nodes: NodeDirectory,
    namespace_ids: Sequence[int],
    timeout_s: float,
    *,
    alone: bool = False,
) -> ResetResult:
    """Tell a node, of this host if there is one, which tells all others; wait until they have
    confirmed it. `alone`: all nodes are in this run directory.

    Raises `NodeUnavailableError` or `DeadlineError` when there are nodes and none could be told.
    """
    machine = nodes.machine
    deadline = machine.monotonic() + timeout_s
    if not namespace_ids:
        raise UsageError("namespace_ids", namespace_ids, "must be at least one")
    where = _Where(index, nodes, alone, machine)

    def tell(number: int, some: Sequence[int]) -> int:
        try:
            with until(deadline):
                return writer.reset(number, some)
        except NodeUnavailableError as here:
            try:
                return remote.reset(number, some, deadline)
            except NodeUnavailableError as away:
                raise NodeUnavailableError(f"{here}; elsewhere: {away}") from away

    try:
        numbers = _tell_all(tell, namespace_ids, machine)
    except NodeUnavailableError:
        seen = _confirmed(where, [], deadline)
        if seen and not seen.confirmed:
            return seen.plain()  # there is no node at all
        raise
    seen = _confirmed(where, numbers, deadline)
    if seen.vram:
        # A block on its way from VRAM to host memory may have come after its node was reset,
        # and have left before the pool was.
        seen = _confirmed(where, _tell_all(tell, namespace_ids, machine), deadline)
    return seen.plain()


@dataclass(frozen=True, slots=True)
class _Where:
    index: Index
    nodes: NodeDirectory
    alone: bool
    machine: Machine


@dataclass(frozen=True, slots=True)
class _Seen(ResetResult):
    vram: bool

    def plain(self) -> ResetResult:
        return ResetResult(self.confirmed, self.unconfirmed, self.index_answered)


def _tell_all(
    tell: Callable[[int, Sequence[int]], int], namespace_ids: Sequence[int], machine: Machine
) -> list[int]:
    """Return the numbers that the resets got."""
    numbers: list[int] = []
    for batch in in_batches(namespace_ids, RESET_NAMESPACES_MAX):
        wanted = int(machine.wall() * 1000) << RANDOM_BITS | machine.random_bits(RANDOM_BITS)
        numbers.append(tell(wanted, batch))
    return numbers


def _confirmed(where: _Where, numbers: Sequence[int], deadline: float) -> _Seen:
    """Wait until all nodes know of all of `numbers`, and until all have been heard of."""
    listening = _Listening(where.index)
    while True:
        seen = _look(where, numbers)
        heard = where.alone or listening.long_enough(
            where.machine.monotonic(), answered=seen.index_answered
        )
        if seen and heard:
            return seen
        if where.machine.monotonic() >= deadline:
            return replace(seen, index_answered=seen.index_answered and heard)
        where.machine.sleep(POLL_S)


class _Listening:
    """How long the index has answered without having forgotten anything."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._incarnation = ""
        self._since = 0.0

    def long_enough(self, now: float, *, answered: bool) -> bool:
        try:
            incarnation = self._index.incarnation() if answered else ""
        except IndexUnavailableError:
            incarnation = ""
        if not incarnation or incarnation != self._incarnation:
            self._incarnation, self._since = incarnation, now
        return bool(incarnation) and now - self._since >= RESET_LISTENS_S


def _look(where: _Where, numbers: Sequence[int]) -> _Seen:
    """Return who knows of all the resets by now."""
    known: dict[int, tuple[str, bool]] = {}
    answered, vram = True, False

    def note(announcement: Announcement, resets: str) -> None:
        nonlocal vram
        told = Resets.unpack(resets)
        name, before = known.get(
            announcement.node_id, (f"{announcement.name}@{announcement.host}", False)
        )
        known[announcement.node_id] = (name, before or all(number in told for number in numbers))
        vram = vram or CUDA_IPC in announcement.transports

    try:
        announced = where.nodes.announcements().values()
    except IndexUnavailableError:
        answered, announced = False, {}.values()
    for announcement in announced:
        if announcement.key_prefix == where.nodes.key_prefix:
            note(announcement, announcement.resets)
    for announcement, directory in where.nodes.here():
        if directory.alive():  # one may be there that the index has forgotten
            note(announcement, str(directory.kept_resets().get("resets", "")))
    return _Seen(
        tuple(sorted(name for name, done in known.values() if done)),
        tuple(sorted(name for name, done in known.values() if not done)),
        answered,
        vram,
    )
