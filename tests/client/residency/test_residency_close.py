"""Whoever stops listening does not wait for a thread that hangs."""

import os
import threading

from kvstore.client.residency import listener
from kvstore.client.residency.listener import Residency


def test_close_ends_by_its_deadline_and_leaves_the_descriptor_to_the_thread(monkeypatch):
    monkeypatch.setattr(listener, "CLOSE_TIMEOUT_S", 0.01)
    release = threading.Event()
    residency = Residency.__new__(Residency)
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    thread = threading.Thread(target=release.wait, args=(30.0,), daemon=True)
    residency._ending, residency._wake_fd, residency._thread = False, wake_fd, thread
    thread.start()
    residency.close()
    assert thread.is_alive()
    assert os.eventfd_read(wake_fd) == 1
    release.set()
    thread.join(10.0)
    os.close(wake_fd)
