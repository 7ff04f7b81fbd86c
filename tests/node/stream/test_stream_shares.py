"""Shares of what clients of other hosts may have reserved."""

import threading
import time

from kvstore.errors import DeadlineError
from kvstore.node.stream.shares import Shares


def far():
    return time.monotonic() + 20


def full(shares, client, size_bytes):
    """Whether there is no room now."""
    try:
        with shares.of(client, size_bytes, time.monotonic()):
            return False
    except DeadlineError:
        return True


def test_a_client_waits_for_its_own_saves_and_not_for_others():
    shares = Shares(100)
    with shares.of("a", 60, far()), shares.of("a", 40, far()), shares.of("b", 100, far()):
        assert full(shares, "a", 1)
    assert not full(shares, "a", 100)


def test_a_save_larger_than_the_share_is_taken_alone():
    shares = Shares(100)
    with shares.of("a", 1000, far()):
        assert full(shares, "a", 0)
    with shares.of("a", 0, far()), shares.of("a", 0, far()):
        pass
    assert not full(shares, "a", 1000)


def test_who_waits_goes_on_when_its_other_save_ends_also_badly():
    shares = Shares(100)
    inside, let_go, done = threading.Event(), threading.Event(), threading.Event()

    def save():
        try:
            with shares.of("a", 100, far()):
                inside.set()
                let_go.wait(20)
                raise OSError("broken off")
        except OSError:
            done.set()

    threading.Thread(target=save, daemon=True).start()
    assert inside.wait(20)
    threading.Timer(0.05, let_go.set).start()
    with shares.of("a", 100, far()):
        assert let_go.is_set()
    assert done.wait(20)


def test_saves_of_one_client_together_take_no_more_than_its_share():
    shares = Shares(100)
    with shares.of("a", 60, far()):
        assert full(shares, "a", 41)
        assert not full(shares, "a", 40)
