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
    MESSAGE_BYTES_MAX,
    RESET_NAMESPACES_MAX,
)
from kvstore.types import KEY_BYTES

REQUEST_LISTS_MAX: Final = 8
"""Lists and maps in a request of who may only read, or is on another host; a HELLO has three."""
REQUEST_ITEMS_MAX: Final = 16
"""Items of each of them: more than any request has, those that are then refused in words too."""
READER_BUFFER_BYTES_MAX: Final = 1 << 19
"""Of requests that came at once: a socket hands over 256 KiB, behind the rest of one of them."""
READER_MESSAGE_BYTES_MAX: Final = BATCH_KEYS_MAX * KEY_BYTES + (16 << 10)
"""Of a request that is not whole yet: it is kept until the rest comes, for hundreds of readers."""
ANSWER_LISTS_MAX: Final = 4 * BATCH_KEYS_MAX
"""Lists and maps in an answer: one for each block, or each namespace, and a few."""


class Messages(Protocol):
    """Splits a stream of bytes into messages: an iteration gives those that are whole by now."""

    def feed(self, data: bytes, /) -> None: ...

    def __iter__(self) -> Iterator[object]: ...

    def __next__(self) -> object: ...


class _Counted:
    """The options of msgpack that count lists and maps."""

    def __init__(self, at_most: int) -> None:
        self._at_most = self.left = at_most
        self.options: dict[str, Callable[[object], object]] = {
            "list_hook": self._made,
            "object_hook": self._made,
        }

    def begin(self) -> None:
        self.left = self._at_most

    def _made(self, made: object) -> object:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"a message of more than {self._at_most} lists")
        return made


class CountingUnpacker:
    """As `msgpack.Unpacker`, for a stream of messages, of so many lists and maps each. One that
    is not whole when all was read has at most `rest_bytes_max`."""

    def __init__(
        self, lists_max: int, *, rest_bytes_max: int = MESSAGE_BYTES_MAX, **options: int
    ) -> None:
        self._counted = _Counted(lists_max)
        self._rest_bytes_max = rest_bytes_max
        self._fed = self._whole = 0
        """Bytes that came, and those of them that were whole messages."""
        self._unpacker = msgpack.Unpacker(
            use_list=True, max_ext_len=0, strict_map_key=True, **options, **self._counted.options
        )

    def feed(self, data: bytes) -> None:
        self._unpacker.feed(data)
        self._fed += len(data)

    def __iter__(self) -> CountingUnpacker:
        return self

    def __next__(self) -> object:
        # What is whole only with the next data begins anew then: who sends it byte by byte pays
        # for that himself.
        self._counted.begin()
        try:
            message: object = next(self._unpacker)
        except StopIteration:
            if self._fed - self._whole > self._rest_bytes_max:
                text = f"a message of more than {self._rest_bytes_max} bytes that is not whole"
                raise ValueError(text) from None
            raise
        self._whole = self._unpacker.tell()
        return message


def readers_unpacker() -> CountingUnpacker:
    """Of requests of another user, who may only read. They name keys in one piece."""
    return CountingUnpacker(
        REQUEST_LISTS_MAX,
        rest_bytes_max=READER_MESSAGE_BYTES_MAX,
        max_buffer_size=READER_BUFFER_BYTES_MAX,
        max_array_len=REQUEST_ITEMS_MAX,
        max_map_len=0,
        max_bin_len=BATCH_KEYS_MAX * KEY_BYTES,
        max_str_len=BATCH_KEYS_MAX,
    )


def answers_unpacker() -> CountingUnpacker:
    """Of answers of another user's node."""
    return CountingUnpacker(
        ANSWER_LISTS_MAX, max_buffer_size=MESSAGE_BYTES_MAX, max_array_len=ANSWER_LISTS_MAX
    )


def unpacked_request(body: bytes) -> object:
    """The request of a client on another host. Raises what msgpack does."""
    return _unpacked(body, REQUEST_LISTS_MAX, max(REQUEST_ITEMS_MAX, RESET_NAMESPACES_MAX))


def unpacked_answers(body: bytes) -> object:
    """The answers of a node on another host. Raises what msgpack does."""
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
