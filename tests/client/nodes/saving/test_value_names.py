"""Names reach the nodes behind the puts, and a put waits for none of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvstore.client.nodes.saving.value_names import ValueNames
from kvstore.limits import NAME_BYTES_MAX, NAMES_MESSAGE_BYTES_MAX, NAMES_WAITING_MAX
from kvstore.protocol.control import Op
from kvstore.types import KEY_BYTES


class Node:
    """What one node was told; it cannot be told anything while `busy`."""

    def __init__(self) -> None:
        self.busy = False
        self.told: list[tuple[bytes, list[bytes]]] = []
        self.control = self

    def say(self, op: Op, keys: bytes, names: list[bytes]) -> bool:
        assert op is Op.NAMES
        if not self.busy:
            self.told.append((keys, names))
        return not self.busy


def names_for(*nodes: Node) -> ValueNames:
    writer: Any = SimpleNamespace(links=lambda: list(nodes))
    return ValueNames(writer)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def test_every_node_is_told_once() -> None:
    nodes = [Node(), Node()]
    names = names_for(*nodes)
    names.waiting.extend([(key(1), "a"), (key(2), b"\xff")])
    names.tell()
    names.tell()
    told = [(key(1) + key(2), [b"a", b"\xff"])]
    assert [node.told for node in nodes] == [told, told]


def test_what_cannot_be_said_now_is_said_the_next_time() -> None:
    node = Node()
    names = names_for(node)
    names.waiting.append((key(1), "a"))
    node.busy = True
    names.tell()
    node.busy = False
    names.tell()
    assert node.told == [(key(1), [b"a"])]


def test_messages_fit_a_socket_and_too_long_or_too_many_names_are_left_out() -> None:
    node = Node()
    names = names_for(node)
    names.waiting.append((key(0), "n" * (NAME_BYTES_MAX + 1)))
    for i in range(NAMES_WAITING_MAX + 10):
        names.waiting.append((key(i + 1), "n" * 100))
    names.tell()
    assert sum(len(told) for _, told in node.told) == NAMES_WAITING_MAX
    largest = max(len(keys) + 100 * len(told) for keys, told in node.told)
    assert largest < NAMES_MESSAGE_BYTES_MAX + KEY_BYTES + 100
