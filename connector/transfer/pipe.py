"""Sends tensors in order from one process to another, through the store.

This is the older, point-to-point interface. Each message is kept under the pipe's
name and its number. The receiver says how far it is by a value of its own, and
the sender then drops what was received.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from connector.limits import PIPE_MESSAGES_MAX, TRANSFER_TIMEOUT_S
from connector.transfer import tensor_messages
from connector.transfer.tensor_messages import TensorMessage, ValueStore
from kvstore import DeadlineError, PeerError, UsageError

if TYPE_CHECKING:
    import torch

END = "end"


class PipeClosedError(PeerError):
    """Raised when the other end is closed, and all it had sent was received."""


class Pipe:
    """Implements one end of a two-way pipe. One thread sends, one receives.

    `name` names the pipe in the client's namespace and must be new: an engine id
    and a counter, say. One end has `producer=True`, the other False. At most
    `messages_max` messages and `bytes_max` bytes are under way each way; a sender
    then waits. `device` is where received tensors go.
    """

    def __init__(
        self,
        client: ValueStore,
        name: str,
        *,
        producer: bool,
        timeout_s: float = TRANSFER_TIMEOUT_S,
        bytes_max: float = 1e9,
        messages_max: int = PIPE_MESSAGES_MAX,
        device: str | torch.device = "cpu",
    ) -> None:
        if not 0 < messages_max <= PIPE_MESSAGES_MAX:
            raise UsageError("messages_max", messages_max, f"must be from 1 to {PIPE_MESSAGES_MAX}")
        base = f"pipe/{tensor_messages.check_name(name)}"
        ways = (f"{base}/p", f"{base}/c") if producer else (f"{base}/c", f"{base}/p")
        self._timeout_s = timeout_s
        self._device = device
        self._out = _Outbox(
            client, ways[0], tensor_messages.check_bytes_max(bytes_max), messages_max
        )
        self._in = _Inbox(client, ways[1])

    def send_tensor(self, tensor: torch.Tensor | None, timeout_s: float | None = None) -> None:
        """Send a tensor of any dtype and device, or None. Returns when it is in the store.

        Raises `DeadlineError` when there was no room in time (nothing was sent),
        `PipeClosedError` when the other end is closed, `UsageError` for a tensor
        larger than the pipe and after `close`.
        """
        self._out.send([tensor], self._deadline(timeout_s))

    def recv_tensor(self, timeout_s: float | None = None) -> torch.Tensor | None:
        """Return the next tensor that the other end has sent, or the None it has sent.

        Raises `DeadlineError` when none came in time, `PipeClosedError` when none
        will come, `UsageError` after `close`.
        """
        (tensor,) = self._in.receive(self._deadline(timeout_s))
        return tensor if tensor is None else tensor.to(self._device)

    def close(self, timeout_s: float | None = None) -> None:
        """End both ways. Waits until all that was sent is received, but not beyond the deadline.

        What is left then is no longer kept for the other end. Safe to call twice.
        """
        deadline = self._deadline(timeout_s)
        self._in.close()
        self._out.close(deadline)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)


class _Outbox:
    def __init__(self, client: ValueStore, base: str, bytes_max: int, messages_max: int) -> None:
        self._client = client
        self._base = base
        self._bytes_max = bytes_max
        self._messages_max = messages_max
        self._next = 0
        self._sent: deque[tuple[int, TensorMessage]] = deque()
        """Number and message of what the receiver has not confirmed yet."""
        self._bytes = 0
        self._closed = False

    def send(self, tensors: list[torch.Tensor | None], deadline: float, note: str = "") -> None:
        if self._closed:
            raise UsageError("pipe", self._base, "is closed")
        size_bytes = tensor_messages.size_of(tensors)
        if size_bytes > self._bytes_max:
            raise UsageError("tensor", f"{size_bytes} bytes", f"at most {self._bytes_max}")
        if tensor_messages.until(deadline, lambda: self._has_room(size_bytes) or None) is None:
            raise DeadlineError(f"{self._base}: timed out: no room, the other end has not received")
        name = f"{self._base}/{self._next}"
        message = tensor_messages.send(self._client, name, tensors, deadline, note)
        self._sent.append((self._next, message))
        self._bytes += message.size_bytes
        self._next += 1

    def _has_room(self, size_bytes: int) -> bool:
        self._collect()
        if not self._sent:
            return True
        return len(self._sent) < self._messages_max and self._bytes + size_bytes <= self._bytes_max

    def _collect(self) -> None:
        """Drop what the receiver has; raises `PipeClosedError` when it is closed."""
        names = [f"{self._base}/{number}/received" for number, _ in self._sent]
        # Asked first: a receiver that closes has said before what it had received.
        closed = self._client.get(f"{self._base}/closed") is not None
        received = tensor_messages.newest(self._client, names) + 1
        for _ in range(len(self._sent) if closed else received):
            _, message = self._sent.popleft()
            self._bytes -= message.size_bytes
            tensor_messages.release(self._client, message)
        if closed:
            raise PipeClosedError(f"{self._base}: the other end is closed")

    def close(self, deadline: float) -> None:
        if self._closed:
            return
        try:
            self.send([], deadline, END)
            tensor_messages.until(deadline, self._all_received)
        except PeerError:
            pass
        finally:
            self._closed = True
            while self._sent:
                tensor_messages.release(self._client, self._sent.popleft()[1])

    def _all_received(self) -> bool | None:
        self._collect()
        return None if self._sent else True


class _Inbox:
    def __init__(self, client: ValueStore, base: str) -> None:
        self._client = client
        self._base = base
        self._next = 0
        self._progress: TensorMessage | None = None
        """The value that says how far this end has received."""
        self._owes_word = False
        self._ended = False
        self._closed = False

    def receive(self, deadline: float) -> list[torch.Tensor | None]:
        if self._closed:
            raise UsageError("pipe", self._base, "is closed")
        if self._ended:
            raise PipeClosedError(f"{self._base}: the other end is closed")
        content = tensor_messages.until(deadline, self._look)
        if content is None:
            raise DeadlineError(f"{self._base}: timed out waiting for message {self._next}")
        self._next += 1
        self._owes_word = True
        self._say()
        if content.note == END:
            self._ended = True
            raise PipeClosedError(f"{self._base}: the other end is closed")
        return content.tensors

    def _look(self) -> tensor_messages.Content | None:
        self._say()
        return tensor_messages.receive(self._client, f"{self._base}/{self._next}")

    def _say(self) -> None:
        """Tell the sender; a store that declines is asked again at the next look."""
        if not self._owes_word:
            return
        name = f"{self._base}/{self._next - 1}/received"
        progress = tensor_messages.hold(self._client, name, b"1")
        if progress is not None:
            if self._progress is not None:
                tensor_messages.release(self._client, self._progress)
            self._progress, self._owes_word = progress, False

    def close(self) -> None:
        """Close it. The last message stays in the store, because the sender may not have looked
        yet."""
        if self._closed:
            return
        self._closed = True
        self._say()
        last = [self._progress]
        if not self._ended:
            last.append(tensor_messages.hold(self._client, f"{self._base}/closed", b"1"))
        for progress in last:
            if progress is not None:
                tensor_messages.leave(progress)
