import itertools

import pytest

from kvstore.core.slots import TRANSITIONS, Slot, SlotEvent, SlotState
from kvstore.errors import InternalError


def slot_in(state: SlotState) -> Slot:
    slot = Slot(0, 4)
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
