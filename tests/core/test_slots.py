import itertools

import pytest

from kvstore.core.slots import TRANSITIONS, Slot, SlotEvent, SlotState
from kvstore.errors import InternalError


def slot_in(state: SlotState) -> Slot:
    slot = Slot(0, 0, 0, 5)
    slot.state = state
    return slot


@pytest.mark.parametrize(("state", "event"), [*itertools.product(SlotState, SlotEvent)])
def test_only_the_transitions_of_the_table_are_possible(state, event):
    slot = slot_in(state)
    if (state, event) in TRANSITIONS:
        slot.move(event)
        assert slot.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(InternalError):
            slot.move(event)
        assert slot.state is state


def test_a_reserve_starts_the_next_generation_and_nothing_else_does():
    for state, event in TRANSITIONS:
        slot = slot_in(state)
        slot.move(event)
        assert slot.generation == (6 if event is SlotEvent.RESERVE else 5)
