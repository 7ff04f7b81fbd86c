"""The machine of the simulation is a whole one."""

from kvstore.machine import Machine
from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.world import World


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_nothing_that_a_machine_is_asked_for_is_left_to_the_real_one():
    machine = World(0, Faults()).machine
    decided = vars(machine).keys() | vars(type(machine)).keys()
    assert public(vars(Machine)) <= decided


def test_the_machine_of_the_simulation_has_nothing_that_nobody_asks_for():
    machine = World(0, Faults()).machine
    assert public(vars(type(machine))) <= public(vars(Machine))
