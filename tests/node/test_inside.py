"""Threads of the node's process that speak to its event loop."""

from kvstore.core.events import Touch
from kvstore.limits import TOLD_MAX
from kvstore.node.inside import Inside


class Loop:
    """One that is busy until `run`."""

    def __init__(self):
        self.waiting = []

    def call_soon_threadsafe(self, what):
        self.waiting.append(what)

    def run(self):
        waiting, self.waiting = self.waiting, []
        for what in waiting:
            what()


def test_what_nobody_waits_for_is_passed_over_while_too_much_of_it_waits():
    loop, heard = Loop(), []
    inside = Inside(loop, None, heard.append)
    for round_ in range(1, 3):
        for _ in range(TOLD_MAX + 10):
            inside.tell(Touch(0, []))
        assert len(loop.waiting) == TOLD_MAX
        loop.run()
        assert len(heard) == round_ * TOLD_MAX


def test_what_the_core_cannot_take_leaves_room_for_the_next():
    loop = Loop()

    def refuse(event):
        raise ValueError("no")

    inside = Inside(loop, None, refuse)
    for _ in range(TOLD_MAX + 1):
        inside.tell(Touch(0, []))
        try:
            loop.run()
        except ValueError:
            continue
        raise AssertionError("it was not heard")
