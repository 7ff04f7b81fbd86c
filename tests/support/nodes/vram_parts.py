"""A node in VRAM for tests, over the model of a device or a real one."""

from __future__ import annotations

import time

from contract.transport import PATIENCE_S, SECURITY, Place

from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.vram import VramNodes
from kvstore.core.events import Commit, Drop, Reserve
from kvstore.cuda.base import address_of, wait
from kvstore.index.memory import MemoryIndex
from kvstore.node import NodeConfig
from kvstore.node.vram import VramNode
from kvstore.transport.stream.transport import StreamTransport
from kvstore.types import STORED, Kind

MIB = 1 << 20


class VramWriter:
    """What `contract.transport` needs of a writer: here the node's own process."""

    def __init__(self, node: VramNode, device) -> None:
        self.node = node
        self.device = device
        self.session = node.session()
        self.stream = device.stream()

    def ask(self, what):
        return self.session.ask(what, time.monotonic() + PATIENCE_S)

    def reserve(self, key, size_bytes, kind, meta):
        (answer,) = self.ask(Reserve(0, 0, [key], [size_bytes], 7, [kind], [meta], [None], [0]))
        return answer

    def fill(self, offset: int, payload: bytes) -> None:
        host = memoryview(bytearray(payload))
        self.stream.copy([(self.node.address + offset, address_of(host), len(payload))])
        assert wait(self.stream.record(), time.monotonic() + PATIENCE_S)

    def commit(self, slot, generation):
        return self.ask(Commit(0, 0, [(slot, generation, 0)]))

    def drop(self, keys):
        return self.ask(Drop(0, 0, keys))

    def close(self) -> None:
        self.session.close()
        self.stream.close()


class VramPlace(Place):
    """As `Place`, with the node's segment on `device`; `reader` is that of another process."""

    def __init__(self, run_dir, device, reader, **config) -> None:
        self.index = MemoryIndex()
        options = {"size_bytes": 16 * MIB, **config}
        node = VramNode(NodeConfig(run_dir=run_dir, **options), self.index, device)
        self.node = node.start()
        self.word = node.dir.announcement()
        self.nodes = NodeDirectory(run_dir, self.index, "kv:default")
        self.vram = VramNodes(self.nodes, reader)
        self.writer = VramWriter(node, device)
        self.transport = self.vram.transport

    def save(self, payload: bytes, key=None, kind=Kind.BLOCK, meta=0):
        from contract.transport import fresh_key

        key = key or fresh_key()
        slot, generation, offset = self.writer.reserve(key, len(payload), kind, meta)
        self.writer.fill(offset, payload)
        assert self.writer.commit(slot, generation) == [STORED]
        return key, self.location(key)

    def close(self) -> None:
        self.vram.close()
        self.nodes.close()
        self.node.stop()
        self.writer.stream.close()
        self.node.free()


class StreamedVram(VramPlace):
    """As another host sees it: it listens, and nobody opens its memory."""

    def __init__(self, run_dir, device, **config) -> None:
        options = {"listen": ("127.0.0.1", 0), "security": SECURITY, **config}
        super().__init__(run_dir, device, None, **options)
        self.device = device
        self.transport = StreamTransport(SECURITY)

    def close(self) -> None:
        self.device.hold.set()
        self.transport.close()
        super().close()
