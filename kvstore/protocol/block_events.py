"""Encodes what a node says of its blocks to routers: vLLM's KV events, over ZeroMQ.

A message has three parts, as vLLM's own publisher sends them (0.32):

    topic      who speaks: `kvstore@HOST@NAME@EPOCH`
    sequence   8 bytes, big-endian; one more with each message of that epoch, from 0
    payload    msgpack of vLLM's `KVEventBatch`: [time, [event, ...], nil], each event a map with
               its type; without any it says that the node lives, and how far the sequence is

A hash in an event is the key of a store block. What a node does not know (tokens, the block before,
an adapter) is empty or nil. vLLM's own decoder reads all of it, to the byte what it would write
itself (tests/protocol/test_block_events_wire.py).

Questions go to another socket, at the next port: a sequence number in 8 bytes. The answer is every
message from there on, with its own number, and at last one with the number -1. Where they are no
longer kept, and for 0, it is a snapshot first: `AllBlocksCleared` and every block that is there,
all with the number of the message that it includes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgpack

from kvstore.errors import PeerError, UsageError, shown
from kvstore.limits import EVENT_KEYS_MAX, EVENT_MESSAGE_BYTES_MAX
from kvstore.types import KEY_BYTES, Key

PREFIX = b"kvstore@"
"""The beginning of every topic."""
END = (-1).to_bytes(8, "big", signed=True)
"""Stands in place of a sequence number in the last message of an answer."""
_SEQUENCE_BYTES = 8
_TOPIC_BYTES_MAX = 1024
_LOOPBACK = "tcp://127.0.0.1"


class Source(NamedTuple):
    """One start of a node."""

    host: str
    name: str
    epoch: int


class BlockChanges(NamedTuple):
    """The content of one message, in this order."""

    cleared: bool
    """No block is there any more."""
    removed: list[Key]
    stored: list[Key]


def topic_of(source: Source) -> bytes:
    return PREFIX + f"{source.host}@{source.name}@{source.epoch}".encode()


def source_of(topic: bytes) -> Source:
    """Return the node that speaks under `topic`. Raises `PeerError` for what is no topic of a
    node."""
    try:
        if len(topic) > _TOPIC_BYTES_MAX:
            raise ValueError
        kind, host, name, epoch = topic.decode().split("@")
        if kind.encode() + b"@" != PREFIX:
            raise ValueError
        return Source(host, name, int(epoch))
    except ValueError as e:
        raise PeerError(f"the topic {topic[:80]!r} of an event is not a node's") from e


def sequence_bytes(sequence: int) -> bytes:
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")


def sequence_of(raw: bytes) -> int:
    """Return a sequence number. Raises `PeerError` for anything else."""
    if len(raw) != _SEQUENCE_BYTES:
        raise PeerError(f"a sequence number of events has {len(raw)} bytes, not {_SEQUENCE_BYTES}")
    return int.from_bytes(raw, "big")


def pack_changes(time_s: float, changes: BlockChanges, medium: str) -> bytes:
    """Pack an event batch. `medium` is vLLM's word for the kind of memory: "CPU" or "GPU"."""
    events: list[dict[str, object]] = []
    if changes.cleared:
        events.append({"type": "AllBlocksCleared"})
    if changes.removed:
        events.append({"type": "BlockRemoved", "block_hashes": changes.removed, "medium": medium})
    if changes.stored:
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": changes.stored,
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 0,
                "lora_id": None,
                "medium": medium,
                "lora_name": None,
            }
        )
    packed: bytes = msgpack.packb([time_s, events, None])
    return packed


def pack_snapshot(time_s: float, keys: Sequence[Key], medium: str) -> Iterator[bytes]:
    """Yield the messages that say that exactly `keys` are there."""
    for start in range(0, max(len(keys), 1), EVENT_KEYS_MAX):
        part = list(keys[start : start + EVENT_KEYS_MAX])
        yield pack_changes(time_s, BlockChanges(start == 0, [], part), medium)


def unpack_changes(raw: bytes) -> list[BlockChanges]:
    """Return what a node's message says. Raises `PeerError` for what no node sends."""
    try:
        if len(raw) > EVENT_MESSAGE_BYTES_MAX:
            raise ValueError(f"{len(raw)} bytes")
        _, events, *_ = msgpack.unpackb(raw, strict_map_key=True)
        return [_changes_of(event) for event in events]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as e:
        raise PeerError(f"a message of {len(raw)} bytes is none of a node's events: {e}") from e


def _changes_of(event: object) -> BlockChanges:
    if not isinstance(event, dict):
        raise ValueError("an event that is no map")
    kind = event["type"]
    if kind == "AllBlocksCleared":
        return BlockChanges(True, [], [])
    keys = event["block_hashes"]
    # Without a loop of ours: 100,000 keys take 3 ms.
    if not isinstance(keys, list) or set(map(type, keys)) - {bytes}:
        raise ValueError("hashes that are no keys")
    if set(map(len, keys)) - {KEY_BYTES}:
        raise ValueError(f"hashes that do not have {KEY_BYTES} bytes")
    if kind == "BlockRemoved":
        return BlockChanges(False, keys, [])
    if kind == "BlockStored":
        return BlockChanges(False, [], keys)
    raise ValueError(f"an event of type {shown(kind, 80)}")


def endpoints_of(setting: str) -> tuple[str, str]:
    """Return where events are, and where what was missed is asked for, of `PORT` (on this host
    alone), `tcp://HOST:PORT` or `ipc://PATH`. Raises `UsageError`."""
    must = "must be PORT (of this host alone), tcp://HOST:PORT or ipc://PATH"
    if setting.startswith("ipc://") and len(setting) > len("ipc://"):
        return setting, f"{setting}.replay"
    where, _, port = (
        setting.rpartition(":") if setting.startswith("tcp://") else (_LOOPBACK, "", setting)
    )
    if not port.isascii() or not port.isdecimal() or len(where) <= len("tcp://"):
        raise UsageError("events", setting, must)
    if not 1 <= int(port) < (1 << 16) - 1:
        raise UsageError("events", setting, "the port must be 1 to 65534: the next one is used too")
    return f"{where}:{int(port)}", f"{where}:{int(port) + 1}"
