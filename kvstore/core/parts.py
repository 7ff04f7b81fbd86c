"""Cuts a request about many blocks into parts, and joins their answers.

A node's thread does one thing at a time: between two parts of one client's request those of
others have their turn (node/control/turns.py). The parts of a request, in their order, leave the
core as the whole would, as far as nobody else asks between them: what is used first and last among
its blocks, too. So what the core goes through backwards is cut from its end, and its parts but the
first go on with a run.

Who comes back or dies may have thousands of slots: it is cut by those that it has, and they are
free one part after the other (never before: rule 5).

What drops whole namespaces goes through the keys that the node had when it began: all that was
reserved before is gone when it is answered. What is saved meanwhile may be gone too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

from kvstore.batches import in_batches
from kvstore.core.answers import ResetAnswer
from kvstore.core.events import (
    NOBODY,
    Abort,
    Clear,
    Commit,
    Drop,
    Event,
    Explain,
    Named,
    Pin,
    Reply,
    Reserve,
    Reset,
    Retain,
    SessionDead,
    SessionResumed,
    Suspect,
    Sweep,
    Touch,
    Unpin,
)
from kvstore.types import Key

_LISTS: dict[type, tuple[str, ...]] = {
    Reserve: ("keys", "sizes", "kinds", "meta_lengths", "values", "checksums"),
    Commit: ("items",),
    Abort: ("items",),
    Pin: ("keys",),
    Unpin: ("items",),
    Retain: ("keys",),
    Drop: ("keys",),
    Explain: ("keys",),
    Touch: ("keys",),
    Suspect: ("keys",),
    Named: ("keys", "names"),
}
"""The fields with one entry for each block, by which an event can be cut."""
_BACKWARDS: tuple[type, ...] = (Commit, Unpin, Touch)
_LISTED_ANSWERS: tuple[type, ...] = (Reserve, Commit, Pin, Retain, Drop)


def parts_of(
    event: Event, at_most: int, held: Collection[Key] = (), slots: Sequence[int] = ()
) -> Sequence[Event]:
    """Cut `event` into parts of at most so many blocks, in the order in which they are to be
    carried out; return only itself if it is no larger or cannot be cut. `held` are all keys of the
    node, `slots` those that the event's session holds (node.py)."""
    if isinstance(event, SessionResumed | SessionDead):
        return _of_slots(event, at_most, slots)
    if isinstance(event, Clear | Reset):
        return (event,) if len(held) <= at_most else _sweeps(event, at_most, list(held))
    fields = _LISTS.get(type(event), ())
    count = len(getattr(event, fields[0])) if fields else 0
    if count <= at_most:
        return (event,)
    cut: Callable[..., Event] = event._replace
    starts = range(0, count, at_most)
    backwards = isinstance(event, _BACKWARDS)
    parts = [
        cut(
            **{field: getattr(event, field)[start : start + at_most] for field in fields},
            **({"goes_on": start != starts[-1]} if backwards else {}),
        )
        for start in starts
    ]
    if isinstance(event, Reserve):
        # What was there, or came along, was used: the head of a prefix last.
        keys = event.keys
        used = [Touch(event.session, keys[s : s + at_most], s != starts[-1], True) for s in starts]
        return [*parts, *reversed(used)]
    if backwards:
        parts.reverse()
    return parts


def _of_slots(
    event: SessionResumed | SessionDead, at_most: int, slots: Sequence[int]
) -> Sequence[Event]:
    if len(slots) <= at_most:
        return (event,)
    parts: list[Event] = [event._replace(slots=some) for some in in_batches(slots, at_most)]
    return [*parts, event] if isinstance(event, SessionDead) else parts


def _sweeps(event: Clear | Reset, at_most: int, keys: Sequence[Key]) -> Sequence[Event]:
    ids: tuple[int, ...]
    if isinstance(event, Clear):
        ids, number = (event.namespace_id,), 0
    else:
        # Who asks for a reset names a number that he wishes for: it may be another's.
        ids = tuple(event.namespace_ids)
        number = event.number if event.session == NOBODY else 0
    return [
        *(
            Sweep(event.session, event.request, some, ids, number)
            for some in in_batches(keys, at_most)
        ),
        event._replace(swept=True),
    ]


def joined(event: Event, replies: Sequence[Reply]) -> Reply | None:
    """Return the answer to `event` from those to all its parts, in their order; None where there is
    none."""
    if not replies:
        return None
    last = replies[-1]
    bodies: list[Any] = [reply.body for reply in replies]
    body: Any = bodies[-1]
    if isinstance(event, _BACKWARDS):
        bodies.reverse()
    if isinstance(event, _LISTED_ANSWERS):
        body = list(chain.from_iterable(bodies))
    elif isinstance(event, Clear):
        body = sum(bodies)
    elif isinstance(event, Reset):
        body = ResetAnswer(body.number, sum(bodies[:-1]) + body.dropped)
    elif isinstance(event, Explain):
        body = (list(chain.from_iterable(fates for fates, *_ in bodies)), *body[1:])
    return last._replace(
        body=body,
        after_publish=any(reply.after_publish for reply in replies),
        after_log=any(reply.after_log for reply in replies),
    )
