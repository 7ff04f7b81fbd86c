"""AsyncClient: what cancelled calls do to the caller's memory, and what the loop waits for."""

import asyncio
import contextlib
import inspect
import os
import threading
import time

import pytest
from batch_readers import LeavesAll
from each_input import each
from two_hosts import PATIENT, SECURITY, client_of

from kvstore import AsyncClient, Client, UsageError
from kvstore.client import async_client, reader
from kvstore.client.nodes.control import ControlChannel
from kvstore.segment import batch_read

MIB = 1 << 20


class Gate:
    """A copy that takes until it is let through."""

    def __init__(self, module, monkeypatch):
        self.entered, self.open = threading.Event(), threading.Event()
        self._copy = module.copy
        monkeypatch.setattr(module, "copy", self)

    def __call__(self, destination, source):
        self.entered.set()
        assert self.open.wait(30)
        self._copy(destination, source)

    async def passed(self):
        await asyncio.to_thread(self.entered.wait, 30)


class GatedReader:
    """This process's reader of batches, which also reads lone values, and copies nothing, into an
    `out` or a slot, until it is let through."""

    suits_one = True

    def __init__(self, monkeypatch):
        self.entered, self.open = threading.Event(), threading.Event()
        self._reader = batch_read.READER
        self.name = self._reader.name
        monkeypatch.setattr(batch_read, "READER", self)

    def read(self, *arguments):
        self.entered.set()
        assert self.open.wait(30)
        return self._reader.read(*arguments)

    def records(self, *arguments):
        return self._reader.records(*arguments)

    def copy_each(self, targets, sources):
        self.entered.set()
        assert self.open.wait(30)
        self._reader.copy_each(targets, sources)

    async def passed(self):
        await asyncio.to_thread(self.entered.wait, 30)


async def still(task, gate):
    """It does not end while somebody uses the memory, however often it is cancelled."""
    await gate.passed()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("together", [True, False], ids=["in one call", "one by one"])
@pytest.mark.parametrize("call", ["get", "get_many", "get_blocks"])
def test_a_cancelled_read_leaves_the_callers_memory_alone(node, monkeypatch, call, together):
    if not together:
        monkeypatch.setattr(batch_read, "READER", LeavesAll())

    async def talk():
        async with AsyncClient(**node.client_options) as c:
            value = os.urandom(2 * MIB)
            await c.put("k", value)
            await c.put_blocks(range(256), [value])
            buffer = bytearray(2 * MIB)
            gate = GatedReader(monkeypatch) if together else Gate(reader, monkeypatch)
            reads = {
                "get": lambda: c.get("k", out=buffer),
                "get_many": lambda: c.get_many(["k"], out=[buffer]),
                "get_blocks": lambda: c.get_blocks(range(256), [buffer]),
            }
            await still(asyncio.ensure_future(reads[call]()), gate)
            buffer[:] = bytes(2 * MIB)
            await c.stats()
            assert buffer == bytes(2 * MIB)

    asyncio.run(talk())


@pytest.mark.parametrize("call", ["put", "put_many", "put_blocks"])
def test_a_cancelled_save_stores_nothing_and_keeps_no_slot(node, monkeypatch, call):
    async def talk():
        async with AsyncClient(**node.client_options) as c:
            value = bytearray(os.urandom(2 * MIB))
            saves = {
                "put": lambda: c.put("k", value),
                "put_many": lambda: c.put_many([("other", bytes(MIB)), ("k", value)]),
                "put_blocks": lambda: c.put_blocks(range(256), [value]),
            }
            await c.exists("k")
            gate = GatedReader(monkeypatch)
            await still(asyncio.ensure_future(saves[call]()), gate)
            value[:] = bytes(2 * MIB)
            assert await c.get("k") is None
            assert (await c.match_prefix(range(256))).blocks == 0
            assert (await c.stats())["node"]["reserved"] == 0
            assert await c.put("k", b"new")

    asyncio.run(talk())


def test_a_save_that_is_cancelled_before_its_turn_stores_nothing(node, monkeypatch):
    """All threads are busy, and it is still in the queue; or a thread has just taken it."""

    async def talk():
        async with AsyncClient(**node.client_options) as c:
            await c.exists("k")
            gate = GatedReader(monkeypatch)
            busy = [
                asyncio.ensure_future(c.put(f"b{i}", bytes(MIB)))
                for i in range(async_client.THREADS)
            ]
            await gate.passed()
            late = asyncio.ensure_future(c.put("late", b"v"))
            await asyncio.sleep(0.02)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(late, 5)
            gate.open.set()
            assert all(await asyncio.gather(*busy))
            assert await c.get("late") is None

    asyncio.run(talk())


def test_reads_of_another_host_that_are_cancelled_write_into_nothing_later(far, elsewhere):
    async def talk():
        with client_of(far) as writer:
            values = {name: bytes([ord(name)]) * (4 * MIB) for name in "ab"}
            writer.put_many(values)
        place = {"run_dir": elsewhere, "limits": PATIENT, "security": SECURITY}
        options = {**far.client_options, **place}
        async with AsyncClient(**options) as c:
            buffer = bytearray(4 * MIB)
            for i in range(30):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(c.get("a", out=buffer), 0.0005 * (i % 3) + 1e-6)
                assert await c.get("b", out=buffer) is not None
                await asyncio.sleep(0.003)
                assert buffer == values["b"]

    asyncio.run(talk())


def test_the_loop_does_no_input_or_output(node, monkeypatch):
    threads = set()
    request = ControlChannel.request
    real = async_client.Client

    def opened(*args, **settings):
        threads.add(threading.get_ident())
        return real(*args, **settings)

    def asked(self, *args, **more):
        threads.add(threading.get_ident())
        return request(self, *args, **more)

    monkeypatch.setattr(async_client, "Client", opened)
    monkeypatch.setattr(ControlChannel, "request", asked)

    async def talk():
        unopened = AsyncClient(**node.client_options)
        await unopened.close()
        async with AsyncClient(**node.client_options) as c:
            await c.put("k", bytes(MIB))
            with await c.pin("k") as pin:
                view = pin.buffer
            del view, pin
            give_up_at = time.monotonic() + 20
            while (await c.stats())["node"]["pinned"]:
                assert time.monotonic() < give_up_at
                await asyncio.sleep(0.01)
            await c.delete("k")

    asyncio.run(talk())
    assert threads
    assert threading.get_ident() not in threads


def test_settings_that_are_none_are_refused_before_anything_is_opened():
    with pytest.raises(UsageError, match=r"^block_tokens="):
        AsyncClient(block_tokens="x")


@each("name", ["__init__", *(n for n in vars(Client) if not n.startswith("_"))])
def test_every_call_has_the_signature_of_its_namesake_and_says_what_it_does(name):
    ours, theirs = getattr(AsyncClient, name), getattr(Client, name)
    one, other = inspect.signature(ours), inspect.signature(theirs)
    assert one.parameters == other.parameters
    assert one.return_annotation == other.return_annotation
    assert ours.__doc__
    assert theirs.__doc__


def test_a_client_shows_where_it_is_and_no_password(node):
    with Client(**node.client_options, namespace="mine") as c:
        assert "none yet" in repr(c)
        c.put("k", b"v")
        shown = repr(c)
        assert node.redis.url.removeprefix("unix://") in shown
        assert "nodes: node," in shown
        assert "namespace: mine" in shown
    assert "closed" in repr(c)
    with Client("redis://user:hush@127.0.0.1:1/0", run_dir=node.run_dir) as c:
        assert "hush" not in repr(c)
        assert "127.0.0.1:1" in repr(c)

    async def talk():
        async with AsyncClient(**node.client_options) as c:
            assert repr(c).startswith("AsyncClient(")
            assert node.redis.url.removeprefix("unix://") in repr(c)

    asyncio.run(talk())


def test_what_a_client_takes_is_exported():
    import kvstore

    for name in ("Limits", "Namespace", "StreamSecurity", "Verify"):
        assert name in kvstore.__all__
    for name in inspect.signature(Client.__init__).parameters:
        assert name == "self" or f"`{name}`" in Client.__init__.__doc__
