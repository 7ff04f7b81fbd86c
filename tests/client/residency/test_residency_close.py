"""Whoever stops listening does not wait for a thread that hangs."""

import os
import threading

from kvstore.client.residency import listener
from kvstore.client.residency.listener import Residency


def test_close_ends_by_its_deadline_and_leaves_the_descriptor_to_the_thread(monkeypatch):
    monkeypatch.setattr(listener, "CLOSE_TIMEOUT_S", 0.01)
    release = threading.Event()
    residency = Residency.__new__(Residency)
    residency._ending = False
    residency._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    residency._thread = threading.Thread(target=release.wait, args=(30.0,), daemon=True)
    residency._thread.start()
    residency.close()
    assert residency._thread.is_alive()
    assert os.eventfd_read(residency._wake_fd) == 1
    release.set()
    residency._thread.join(10.0)
    os.close(residency._wake_fd)
