"""Bugs of a node with disks, planted one at a time: what `LossyNode` must find."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

from kvstore.core.disk.tier import DiskTier
from kvstore.node.disk import disks, writer
from kvstore.node.disk.disks import NodeDisks
from kvstore.node.disk.writer import DiskWriter
from kvstore.segment.disk import adopt
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.log import Log

NOTHING = "pass"


class Plant(NamedTuple):
    """A function, of which some text is another."""

    function: Callable[..., Any]
    texts: tuple[tuple[str, str], ...]
    also_in: tuple[ModuleType, ...] = ()
    """Modules that have the function by its name."""


def _one(function: Callable[..., Any], text: str, planted: str, *also: ModuleType) -> Plant:
    return Plant(function, ((text, planted),), also)


_FORBID_REGION = "self.log.forbid_region(region, self.next_lap)"
PLANTS: dict[str, Plant] = {
    "commits are not synced": _one(Log.commit, "self._file.sync()", NOTHING),
    "a commit that failed is taken for done": _one(
        NodeDisks._commit, "    except OSError as e:\n", "    except OSError:\n        return ''\n"
    ),
    "a region is given up in memory alone": _one(DiskDevice.give_up, "self.log.commit()", NOTHING),
    "a region is given up after its blocks left": _one(
        DiskWriter._begin, "device.give_up(begin.region)", NOTHING
    ),
    "a new header counts before it is durable": _one(
        DiskDevice._durable_laps, "if self._lap_of(region, page) == lap:", "if True:"
    ),
    "a header that cannot be read is believed later": _one(
        DiskDevice._lap_of, _FORBID_REGION, NOTHING
    ),
    "entries that cannot be read are believed later": _one(
        DiskDevice.blocks, _FORBID_REGION.replace("region, ", "state.region, "), NOTHING
    ),
    "reads are not verified": _one(
        DiskDevice.read_into, "return xxh3_64_intdigest", "return True or xxh3_64_intdigest"
    ),
    "what is forbidden is adopted": _one(
        adopt.adopt,
        "device.log.said.allowed(device.blocks(state), state.region)",
        "device.blocks(state)",
        writer,
    ),
    "a disk that was away keeps what was deleted": _one(
        adopt.settle, "if deleted_in > own.numbers[Record.RUN]:", "if False:", disks
    ),
    "a disk that was away does not hear of resets": _one(
        adopt.settle, "in own.resets.news(theirs):", "in ():", disks
    ),
    "nobody notes the first delete": _one(
        DiskTier.dropped, "if named or not self._noted:", "if named:"
    ),
    "answers do not wait for the log": _one(DiskTier.confirms, "return confirms", "return False"),
    "writes on their way are not covered": _one(DiskTier._orders, "ring.order", "ring.order - 1"),
    "lost blocks are not forbidden": _one(
        DiskTier._forbid_lost, "keys = [block.key for block in own]", "continue"
    ),
    "replaced values are not forbidden": _one(
        DiskTier.stored, "if replaced or (values and not self._noted):", "if False:"
    ),
    "a clear is not logged": _one(
        DiskTier.sweep, "self._outgoing.append(", "(lambda forbid: None)("
    ),
    "a write is entered whose key was dropped": Plant(
        DiskTier._spilled,
        (
            ("if self._writing.get(key) != asked:", "if False:"),
            ("del self._writing[key]", "self._writing.pop(key, None)"),
        ),
    ),
    "what is deleted during adoption is adopted": _one(
        DiskTier._adopt, "self._dropped, self._cleared)", "(), self._cleared)"
    ),
    "what was dropped meanwhile is read back": _one(
        DiskWriter._promote, "and self._table.find(block.key) == block", ""
    ),
    "a slot is not compared after it was copied": _one(
        DiskWriter._payload, "is_still = seen is not None and", "is_still = True or"
    ),
}


def planted_function(plant: Plant) -> Callable[..., Any]:
    """Return the function with its bug."""
    source = textwrap.dedent(inspect.getsource(plant.function))
    for text, planted in plant.texts:
        assert text in source, f"{plant.function.__qualname__} has no {text!r} any more"
        source = source.replace(text, planted)
    names: dict[str, Any] = {}
    module = inspect.getmodule(plant.function)
    exec(compile(source, "<planted>", "exec"), vars(module), names)
    made: Callable[..., Any] = names[plant.function.__name__]
    return made


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """A context in which a node has that bug."""
    function, made = plant.function, planted_function(plant)
    owner: Any = inspect.getmodule(function)
    for part in function.__qualname__.split(".")[:-1]:
        owner = getattr(owner, part)
    with ExitStack() as stack:
        for each in (owner, *plant.also_in):
            stack.enter_context(patch.object(each, function.__name__, made))
        yield
