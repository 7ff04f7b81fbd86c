import itertools

import pytest
from each_input import each

from kvstore.core.memory.granules import GRANULE_BYTES, PAGE
from kvstore.core.memory.slots import TRANSITIONS, Slot, SlotEvent, SlotState
from kvstore.errors import InternalError


def slot_in(state: SlotState) -> Slot:
    slot = Slot(0, 4)
    slot.state = state
    return slot


@each(("state", "event"), [*itertools.product(SlotState, SlotEvent)])
def test_only_the_transitions_of_the_table_are_possible(state, event):
    slot = slot_in(state)
    if (state, event) in TRANSITIONS:
        slot.move(event)
        assert slot.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(InternalError):
            slot.move(event)
        assert slot.state is state


def test_a_new_slot_is_free_at_its_place_and_says_nothing_of_any_block():
    slot = Slot(4 * PAGE + 2, 8)
    assert (slot.slot_id, slot.granule, slot.size) == (4, 2, 8)
    assert slot.offset == slot.start * GRANULE_BYTES
    assert slot.state is SlotState.FREE
    assert (slot.key, slot.record) == (b"", b"")
    assert slot.published is slot.void is False
    places = {"start", "slot_id", "size", "offset", "state", "key", "record", "published", "void"}
    assert {getattr(slot, name) for name in set(Slot.__slots__) - places} == {0}
