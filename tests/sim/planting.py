"""Bugs to plant, as small patches to the real functions. The simulation must find each.

Every function in planted_*.py is one bug: its name says what is wrong, its docstring
what follows. It gets `patch(owner, name, replacement)`.
"""

from dataclasses import replace
from functools import partial

from kvstore.testing.sim import Faults


class PlantedError(Exception):
    """What a planted bug raises on purpose: the product is not to survive it."""


BUGS = []
"""(what plants it, the faults that it needs or None for those that each seed draws)"""


def bug(plant, faults=None):
    BUGS.append((plant, faults))
    return plant


def bug_that_needs(**rates):
    """A bug that shows under a coincidence which is rare where other faults end a day first."""
    return partial(bug, faults=replace(Faults().calm(), **rates))
