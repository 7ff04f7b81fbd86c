"""What a client holds ends with it: after a close, a fork, a cancelled call."""

import asyncio
import contextlib
import resource
import signal
import threading

import pytest
from own_python import holds_in_child
from stores import node_stats

from kvstore import AsyncClient, Client, PutStatus
from kvstore.protocol.control import Op


def test_without_file_descriptors_what_is_mapped_is_read_and_the_rest_is_a_miss(
    client, monkeypatch
):
    client.put("k", b"1" * 100_000)
    assert client.get("k") is not None
    monkeypatch.setattr("kvstore.client.nodes.directory.HERE_BELIEVED_S", 0.0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        for _ in range(3):
            assert client.get("k") == b"1" * 100_000
            client.session.writer.let_go()
        assert client.get("absent") is None
        assert client.explain_key("absent").first_missing is not None
        assert client.put("j", b"2" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_child_that_reads_says_nothing_over_its_parents_connection(client):
    client.put("k", b"1")
    control = client.session.writer.link().control
    assert control.say(Op.TOUCH, b"")
    assert holds_in_child(lambda: client.get("k") == b"1" and not control.say(Op.TOUCH, b""))


LOCKS = (type(threading.Lock()), type(threading.RLock()))


def locks_of(root):
    """All that objects of ours have which can be reached from `root`."""
    locks, todo, seen = {}, [root], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, LOCKS):
            locks[id(one)] = one
        elif isinstance(one, threading.Condition):
            todo.append(one._lock)
        elif isinstance(one, (list, tuple, set, dict)):
            todo += one.values() if isinstance(one, dict) else one
        elif type(one).__module__.startswith("kvstore"):
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            todo += [getattr(one, name, None) for name in slots]
            todo += getattr(one, "__dict__", {}).values()
    return list(locks.values())


def test_a_child_closes_its_client_whatever_locks_the_parents_threads_held(client):
    client.put("k", b"1")
    assert client.explain_key("absent").first_missing is not None
    locks = locks_of(client)
    assert len(locks) >= 10
    held, done = threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    closed = holds_in_child(lambda: client.close() is None)
    done.set()
    thread.join()
    assert closed
    assert client.get("k") == b"1"


def test_a_child_that_closes_its_parents_client_takes_nothing_from_it(client, node):
    client.put("k", bytes(100_000))
    leases = list(node.directory.leases.iterdir())
    assert leases
    control = client.session.writer.link().control
    # Amid an answer, when its lock is held.
    amid = {"accept": lambda body: holds_in_child(lambda: client.close() is None)}
    assert control.request(Op.STAT, **amid)
    assert list(node.directory.leases.iterdir()) == leases
    assert client.get("k") == bytes(100_000)


def test_a_pin_that_comes_after_its_call_was_cancelled_is_not_kept(client, node):
    """Nor by whoever keeps the exception, whose frames lead to it."""
    client.put("k", b"v" * 100_000)

    async def cancelled():
        async with AsyncClient(**node.client_options) as other:
            await other.get("k")
            node.signal(signal.SIGSTOP)
            try:
                call = asyncio.ensure_future(other.pin("k"))
                await asyncio.sleep(0.1)
                call.cancel()
                with pytest.raises(asyncio.CancelledError) as kept:
                    await call
            finally:
                node.signal(signal.SIGCONT)
            await other.stats()  # after it, on the same connection
            while node_stats(client)["pinned"]:
                await asyncio.sleep(0.01)
            assert kept.tb

    asyncio.run(asyncio.wait_for(cancelled(), 20))


def test_a_closed_client_holds_nothing_whatever_its_other_threads_still_ask_for(node):
    client = Client(**node.client_options)
    client.put("k", bytes(100_000))
    opened = client.session._opened
    open_index, opened.close = opened.close, lambda: None
    client.close()  # as far as that: the index is the last
    client._closed = False  # as for calls that had begun before
    assert client.put("j", bytes(100_000)).status is PutStatus.REJECTED
    assert client.get("k") is None
    open_index()
    assert list(node.directory.leases.iterdir()) == []
