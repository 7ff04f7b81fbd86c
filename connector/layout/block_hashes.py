"""Computes hashes of a request's store blocks, chained over its tokens and what else shapes its KV.

An engine chains its own hashes over its own blocks, so that two engines with
other block sizes never agree on one. These chain over store blocks, and need
only tokens and the engine's word on what else there is (`Extra`).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256

from kvstore import UsageError
from kvstore.spi import chained_hashes

log = logging.getLogger(f"kvstore.{__name__}")

ALGORITHM = "kvstore-chain-1"
"""Names what is hashed and how, for the namespace; it changes when either does."""
_ROOT = sha256(ALGORITHM.encode()).digest()
_PART = b"kvstore-part-1:"
"""The first bytes hashed for a partial block; for a whole block they are a hash."""

Extra = Callable[[int, int], object]
"""Returns what shapes the KV of tokens `first` to `end`, apart from tokens: adapter, image, salt.
Plain values (None, bool, int, str, bytes) and sequences of them."""


def extend(
    hashes: Sequence[bytes], tokens: Sequence[int], block_tokens: int, extra: Extra | None
) -> list[bytes]:
    """Return `hashes` of the blocks at the head of `tokens`, followed by those of all full blocks
    after them.

    Without `extra` tokens alone shape the KV. Stops before a token that is none (negative: an
    engine's placeholder). Raises `UsageError` for an extra that has no canonical bytes.
    """
    out = list(hashes)
    last = out[-1] if out else _ROOT
    done = len(out) * block_tokens
    words = _words(tokens, done, len(tokens) - len(tokens) % block_tokens)
    firsts = range(done, done + len(words) - len(words) % block_tokens, block_tokens)
    # Hash and words have fixed lengths, so no two inputs run into one another.
    if extra is None:
        ends = [_NOTHING] * len(firsts)
    else:
        others = [extra(first, first + block_tokens) for first in firsts]
        ends = [_NOTHING if other is None else canonical(other) for other in others]
    return out + chained_hashes(last, words.tobytes(), block_tokens * words.itemsize, ends)


def _words(tokens: Sequence[int], first: int, end: int) -> array[int]:
    """Return `tokens` from `first` to `end` as they are hashed, fewer when one is none."""
    try:
        words = array("I", tokens[first:end])
    except OverflowError:
        wrong = next(i for i in range(first, end) if not 0 <= tokens[i] < 1 << 32)
        words = array("I", tokens[first:wrong])
    return words


def part_hash(before: Sequence[bytes], tokens: Sequence[int], extra: object) -> bytes | None:
    """Return hash of the `tokens` that end a prompt within a block, after the blocks hashed in
    `before`.

    Never that of a whole block, nor of a part with more or fewer tokens. None where a token is
    none, as `extend` has it. Raises `UsageError` for an extra that has no canonical bytes.
    """
    try:
        words = array("I", tokens)
    except OverflowError:
        return None
    h = sha256(_PART + len(words).to_bytes(4, "little"))
    h.update(before[-1] if before else _ROOT)
    h.update(words)
    h.update(canonical(extra))
    return h.digest()


class BlockHashes:
    """Keeps the hashes of one request's store blocks, each computed once.

    Follows a request that grows, and one whose last tokens are replaced: what was
    hashed counts only while the engine's own hash at the same place is the one
    seen then.
    """

    __slots__ = ("_block_tokens", "_engine_hash", "_extra", "_hashes", "_name", "_refused", "_seen")

    def __init__(
        self,
        block_tokens: int,
        extra: Extra,
        engine_hash: Callable[[int], bytes | None],
        name: str = "",
    ) -> None:
        """`engine_hash(n)`: the engine's own hash of the prefix of n tokens, None without one.
        `name` is the request's in log lines."""
        self._name = name
        self._block_tokens = block_tokens
        self._extra = extra
        self._engine_hash = engine_hash
        self._hashes: list[bytes] = []
        self._seen: bytes | None = None
        self._refused = False

    def hashes(self, tokens: Sequence[int], num_tokens: int) -> Sequence[bytes]:
        """Return one hash for each full block of the first `num_tokens` tokens. The list is empty
        for a request whose extras have no canonical bytes: it is neither loaded nor saved."""
        full = num_tokens // self._block_tokens
        known = self._engine_hash(len(self._hashes) * self._block_tokens)
        if known is None or known != self._seen:
            self._hashes = []
        if len(self._hashes) >= full or self._refused:
            return self._hashes
        prefix = tokens[: full * self._block_tokens]
        try:
            self._hashes = extend(self._hashes, prefix, self._block_tokens, self._extra)
        except UsageError as e:
            self._refused = True
            self._hashes = []
            log.warning("request %s is neither loaded nor saved: %s", self._name, e)
        self._seen = self._engine_hash(len(self._hashes) * self._block_tokens)
        return self._hashes

    def part(self, tokens: Sequence[int], num_tokens: int) -> bytes | None:
        """Return the hash of the tokens behind the last full block of the first `num_tokens`; None
        when these or those before them have no hash, and when they are fewer than two: an engine
        computes the last one in any case."""
        full, rest = divmod(num_tokens, self._block_tokens)
        before = self.hashes(tokens, num_tokens)[:full]
        if rest < 2 or len(before) < full or self._refused:
            return None
        start = full * self._block_tokens
        try:
            return part_hash(before, tokens[start:num_tokens], self._extra(start, num_tokens))
        except UsageError as e:
            self._refused = True
            log.warning("request %s is neither loaded nor saved: %s", self._name, e)
            return None


def canonical(value: object) -> bytes:
    """Return bytes that are the same for equal values and for no others, in every process."""
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"b1" if value else b"b0"
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogatepass")
        return b"s%d:%b" % (len(raw), raw)
    if isinstance(value, bytes):
        return b"y%d:%b" % (len(value), value)
    if isinstance(value, list | tuple):
        return b"t%d:%b" % (len(value), b"".join(canonical(item) for item in value))
    raise UsageError("extra", type(value).__name__, "must be None, bool, int, str, bytes or a list")


_NOTHING = canonical(None)
