"""Unpacks messages of peers that are not trusted with this process's time.

A list or a map is a byte of a message, and 0.3 µs or more to make, with the interpreter's lock
held: 8 MiB of empty ones keep every thread of a process for two seconds. So they are counted while
they are made, and a message that has more than any of ours is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgpack

from kvstore.limits import (
    BATCH_KEYS_MAX,
    RESET_NAMESPACES_MAX,
)

REQUEST_LISTS_MAX: Final = 8
"""Lists and maps in a request of a client on another host."""
REQUEST_ITEMS_MAX: Final = 16
"""Items in each of them: more than any request has, also of those that are then refused with a
reason."""
READER_MESSAGE_BYTES_MAX: Final = 4 << 10
"""Bytes of a request of another user on this host, which needs a hundred: this many lists are made
in a millisecond."""
OTHERS_ANSWER_BYTES_MAX: Final = 2 << 20
"""Bytes of an answer of another user's node on this host: all its namespaces, at their largest, are
half of it."""
ANSWER_LISTS_MAX: Final = 4 * BATCH_KEYS_MAX
"""Lists and maps in an answer: one for each block, or each namespace, and a few."""


class Messages(Protocol):
    """Splits a stream of bytes into messages: an iteration yields those that are whole by now."""

    def feed(self, data: bytes, /) -> None: ...

    def __iter__(self) -> Iterator[object]: ...

    def __next__(self) -> object: ...


class ShortMessages:
    """As `msgpack.Unpacker`, for messages of at most so many bytes. The unpacker's own limit is of
    what waits to be unpacked, and a message that comes in pieces never waits as a whole."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._fed = self._whole = 0
        """Bytes that arrived, and those of them that were whole messages."""
        self._unpacker = msgpack.Unpacker(
            use_list=True, max_ext_len=0, strict_map_key=True, max_buffer_size=bytes_max
        )

    def feed(self, data: bytes) -> None:
        self._unpacker.feed(data)
        self._fed += len(data)

    def __iter__(self) -> ShortMessages:
        return self

    def __next__(self) -> object:
        try:
            message: object = next(self._unpacker)
        except StopIteration:
            if self._fed - self._whole > self._bytes_max:
                raise ValueError(f"a message of more than {self._bytes_max} bytes") from None
            raise
        self._whole = self._unpacker.tell()
        return message


class _Counted:
    """The options of msgpack that count lists and maps."""

    def __init__(self, at_most: int) -> None:
        self._at_most = self._left = at_most
        self.options: dict[str, Callable[[object], object]] = {
            "list_hook": self._made,
            "object_hook": self._made,
        }

    def _made(self, made: object) -> object:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"a message of more than {self._at_most} lists")
        return made


def unpacked_request(body: bytes) -> object:
    """Return the request of a client on another host. Raises what msgpack does."""
    return _unpacked(body, REQUEST_LISTS_MAX, max(REQUEST_ITEMS_MAX, RESET_NAMESPACES_MAX))


def unpacked_answers(body: bytes) -> object:
    """Return the answers of a node on another host. Raises what msgpack does."""
    return _unpacked(body, ANSWER_LISTS_MAX, ANSWER_LISTS_MAX)


def _unpacked(body: bytes, lists_max: int, items_max: int) -> object:
    counted = _Counted(lists_max)
    message: object = msgpack.unpackb(
        body,
        use_list=True,
        max_ext_len=0,
        max_array_len=items_max,
        strict_map_key=False,
        **counted.options,
    )
    return message
