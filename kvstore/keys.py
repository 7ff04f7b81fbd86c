"""Computes keys and namespaces, which decide who may share what with whom.

A key is 32 bytes, `tag (8) + digest (24)`. The digest chains over the whole
prefix and is bound to the namespace, so equal keys mean equal bytes. The tag
groups runs of `RUN_BLOCKS` consecutive blocks, so that a Redis Cluster keeps a
run in one hash slot and a lookup touches few of them; it comes from the block
before the run (from the first block, for the first run). Because the tag is
part of the key, whoever holds a key can address the index.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b, sha256
from typing import Any, NamedTuple, NoReturn, cast

from kvstore.compiled import part
from kvstore.errors import UsageError
from kvstore.limits import PROMPT_TOKENS_MAX, TTL_S_MAX, USER_KEY_BYTES_MAX
from kvstore.types import TAG_BYTES, Key, Tokens

DIGEST_BYTES = 24
RUN_BLOCKS = 64
"""Blocks that share a tag: 64 store blocks of 256 tokens are 16,384 tokens."""

Field = str | int | float | bool | None
HashBlocks = Callable[[bytes, bytes, int, int], list[Key]]
"""The signature of `hash_blocks`: root, tokens as bytes, bytes of a block, blocks that share a
tag."""
HashNames = Callable[[bytes, list[object], int], list[Key | None]]
"""The signature of `hash_names`: root, names, and how many bytes a name may have."""
BindHashes = Callable[[bytes, list[bytes], int], list[Key]]
"""The signature of `bind_hashes`: root, hashes, blocks that share a tag."""
Chain = Callable[[bytes, bytes, int, list[bytes]], list[bytes]]
"""The signature of `chain`: the last hash, blocks, bytes of a block, and the extra of each."""


SALT_FIELD = "tenant_salt"
TTL_FIELD = "ttl_s"
"""A field that bounds the life of the namespace's blocks, in whole seconds."""
_BOUNDED = 1 << 31
_TTL_SHIFT, _TTL_BITS = 22, 9
_ID, _KEY = b"kvstore-salt-id", b"kvstore-salt"


def _salted(digest: bytes, salt: bytes) -> bytes:
    key = blake2b(salt, digest_size=32, person=_KEY).digest()
    return blake2b(digest, digest_size=32, key=key, person=b"kvstore-ns-salt").digest()


def ttl_of(namespace_id: int) -> int:
    """Return how many seconds blocks of that namespace may live; 0: as long as there is room.

    It stands in the id itself, so that whoever has a block knows it, a node after a restart too: up
    to 32 s exactly, above that rounded down by at most a sixteenth.
    """
    if not namespace_id & _BOUNDED:
        return 0
    code = namespace_id >> _TTL_SHIFT & (1 << _TTL_BITS) - 1
    return code if code < 16 else (16 + code % 16) << code // 16 - 1


def _ttl_code(ttl_s: Field) -> int:
    if type(ttl_s) is not int or not 1 <= ttl_s <= TTL_S_MAX:
        raise UsageError(TTL_FIELD, ttl_s, f"must be a whole number from 1 to {TTL_S_MAX}")
    shift = max(ttl_s.bit_length() - 5, 0)
    return (shift << 4) + (ttl_s >> shift)


class Namespace:
    """Fingerprint of everything that must match for bytes to be reusable.

    Built from named fields (model, dtype, layers, ...); two namespaces are the
    same exactly when all their fields are. Every key is bound to one. The field `ttl_s` bounds
    the life of its blocks (docs/decisions/0036).
    """

    __slots__ = ("_of_blocks", "_of_engine", "_of_values", "fields", "fingerprint", "id")

    def __init__(self, fields: Mapping[str, Field], *, salt: bytes = b"") -> None:
        """Compute the fingerprint. `salt` is a secret: with it, keys cannot be computed from fields
        and tokens alone. A field says which salt it is, by 32 bits that do not lead back to it."""
        if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
            raise UsageError("namespace", fields, "must be a mapping of names to values")
        if not isinstance(salt, bytes):
            raise UsageError("salt", type(salt).__name__, "must be bytes (see tenant_salt)")
        if salt:
            fields = {**fields, SALT_FIELD: blake2b(salt, digest_size=4, person=_ID).hexdigest()}
        self.fields: dict[str, Field] = dict(sorted(fields.items()))
        for name, value in self.fields.items():
            if not isinstance(value, str | int | float | None) or value != value:
                must = "must be text, a number, a truth value or None"
                raise UsageError(f"namespace[{name!r}]", value, must)
        of_fields = blake2b(self.canonical(), digest_size=32, person=b"kvstore-ns-v1").digest()
        self.id: int = int.from_bytes(of_fields[:4], "little") & _BOUNDED - 1
        """31 bits of the fields' hash, kept in slot headers so that a namespace can be cleared; 22
        where a field bounds the life of its blocks, and what `ttl_of` tells."""
        if TTL_FIELD in self.fields:
            bound = _BOUNDED | _ttl_code(self.fields[TTL_FIELD]) << _TTL_SHIFT
            self.id = bound | self.id & (1 << _TTL_SHIFT) - 1
        self.fingerprint: bytes = _salted(of_fields, salt) if salt else of_fields
        # One root for each kind of key: a name, tokens and an engine's hash may be
        # the same bytes and still never give the same key.
        self._of_values = sha256(b"value" + self.fingerprint).digest()
        self._of_blocks = sha256(b"block" + self.fingerprint).digest()
        self._of_engine = sha256(b"engine" + self.fingerprint).digest()

    def canonical(self) -> bytes:
        """Return the fields as JSON, the same bytes for the same fields."""
        return json.dumps(self.fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def named(cls, name: str, *, salt: bytes = b"") -> Namespace:
        """Return the namespace of plain `put`/`get` users."""
        if not isinstance(name, str) or not name:
            raise UsageError("namespace", name, "must be a name, not empty")
        return cls({"name": name}, salt=salt)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Namespace({self.fields!r})"

    def value_key(self, name: str | bytes) -> Key:
        """Return the key of a value put under a name of the user's choice."""
        (key,) = self.value_keys([name])
        return key

    def value_keys(self, names: Sequence[str | bytes]) -> list[Key]:
        """Return `value_key` for each of `names`. Raises `UsageError` for the first that is no
        name."""
        given: list[object] = list(names)
        keys = HASHER.names(self._of_values, given, USER_KEY_BYTES_MAX)
        if None in keys:
            _refuse_name(names[keys.index(None)])
        return cast("list[Key]", keys)

    def block_keys(self, tokens: Tokens, block_tokens: int) -> list[Key]:
        """Return the keys of all full blocks of `block_tokens` tokens at the head of `tokens`.

        digest[i] = sha256(digest[i-1] + tokens of block i as little-endian u32), the first one
        after a root of this namespace; a key carries the first 24 bytes of it. Raises `UsageError`
        for tokens that are no sequence of integers from 0 to 2**32 - 1, or more than
        `PROMPT_TOKENS_MAX`.
        """
        if not isinstance(block_tokens, int) or block_tokens < 1:
            raise UsageError("block_tokens", block_tokens, "must be a whole number, at least 1")
        count = _length(tokens) // block_tokens
        raw = _token_bytes(tokens, count * block_tokens)
        return HASHER.blocks(self._of_blocks, raw, block_tokens * 4, RUN_BLOCKS)

    def engine_keys(self, hashes: Sequence[bytes], blocks_per_key: int = 1) -> list[Key]:
        """Return keys from an engine's own chained block hashes, one key per `blocks_per_key` of
        them.

        The engine's hash already covers the prefix, LoRA, multimodal input and cache salt; here it
        is bound to the namespace.
        """
        if blocks_per_key < 1:
            raise UsageError("blocks_per_key", blocks_per_key, "must be at least 1")
        last = list(hashes[blocks_per_key - 1 :: blocks_per_key])
        return HASHER.bound(self._of_engine, last, RUN_BLOCKS)


def chained_hashes(last: bytes, blocks: bytes, step: int, others: list[bytes]) -> list[bytes]:
    """Return the hash of each block of `step` bytes, chained: sha256(hash before + block + other),
    the first after `last`, 32 bytes. There are as many blocks as `others`, at least."""
    return HASHER.chained(last, blocks, step, others)


def hash_blocks(root: bytes, raw: bytes, step: int, run_blocks: int) -> list[Key]:
    """Return the keys of the blocks of `step` bytes in `raw`; `run_blocks` of them share a tag."""
    digests: list[bytes] = []
    previous = root
    for start in range(0, len(raw), step):
        previous = sha256(previous + raw[start : start + step]).digest()
        digests.append(previous[:DIGEST_BYTES])
    return _with_tags(digests, run_blocks)


def hash_names(root: bytes, names: list[object], longest: int) -> list[Key | None]:
    """Return the key of each of `names`: text or bytes, 1 to `longest` of them as UTF-8; None for
    what is none."""
    keys: list[Key | None] = []
    for name in names:
        try:
            raw = name.encode() if isinstance(name, str) else name
        except UnicodeEncodeError:
            raw = None
        if isinstance(raw, bytes) and 0 < len(raw) <= longest:
            digest = sha256(root + raw).digest()[:DIGEST_BYTES]
            keys.append(digest[:TAG_BYTES] + digest)
        else:
            keys.append(None)
    return keys


def bind_hashes(root: bytes, hashes: list[bytes], run_blocks: int) -> list[Key]:
    """Return the keys of blocks that have those hashes; `run_blocks` of them share a tag."""
    return _with_tags([sha256(root + h).digest()[:DIGEST_BYTES] for h in hashes], run_blocks)


def chain(last: bytes, blocks: bytes, step: int, others: list[bytes]) -> list[bytes]:
    """Do as `chained_hashes` does."""
    hashes = []
    for i, other in enumerate(others):
        last = sha256(last + blocks[i * step : (i + 1) * step] + other).digest()
        hashes.append(last)
    return hashes


def _refuse_name(name: object) -> NoReturn:
    if not isinstance(name, str | bytes):
        raise UsageError("key", name, "must be str or bytes", typed=True)
    try:
        name.encode() if isinstance(name, str) else name
    except UnicodeEncodeError as e:
        raise UsageError("key", name, "must be text without lone surrogates") from e
    raise UsageError("key", name, f"must have 1 to {USER_KEY_BYTES_MAX} bytes")


class Hasher(NamedTuple):
    """Makes keys of prompts, of names and of hashes, and hashes of blocks."""

    blocks: HashBlocks
    names: HashNames
    bound: BindHashes
    chained: Chain


IN_PYTHON = Hasher(hash_blocks, hash_names, bind_hashes, chain)


def hasher(wanted: str | None, module: str = part.BLOCK_KEYS) -> Hasher:
    """Return `IN_PYTHON`, or the compiled functions (docs/decisions/0079) where they are there and
    this CPU has instructions for SHA-256. Raises `ImportError` where `wanted` is `yes` and they are
    not there."""
    compiled = part.load(wanted, module, part.BLOCK_KEYS_SOURCE)
    if compiled is None or not compiled.FAST:
        return IN_PYTHON
    return Hasher(
        compiled.block_keys, compiled.value_keys, compiled.engine_keys, compiled.chained_hashes
    )


HASHER = hasher(part.wanted())
"""The hasher of this process."""


def _with_tags(digests: list[bytes], run_blocks: int) -> list[Key]:
    keys: list[Key] = []
    for start in range(0, len(digests), run_blocks):
        tag = digests[max(start - 1, 0)][:TAG_BYTES]
        keys += [tag + digest for digest in digests[start : start + run_blocks]]
    return keys


def _length(tokens: Tokens) -> int:
    """Return the number of `tokens`, which must be a sequence and no text: its bytes are no
    tokens."""
    ordered = hasattr(tokens, "__len__") and hasattr(tokens, "__getitem__")
    if ordered and not isinstance(tokens, str | bytes | bytearray | Mapping):
        # Of no dimension; a view that was released; more than a length can say.
        with suppress(TypeError, ValueError, OverflowError):
            if len(tokens) <= PROMPT_TOKENS_MAX:
                return len(tokens)
    must = f"must be a list or a one-dimensional array of at most {PROMPT_TOKENS_MAX} integers"
    raise UsageError("tokens", tokens, must)


def _token_bytes(tokens: Tokens, count: int) -> bytes:
    """Return the first `count` tokens as little-endian u32."""
    if hasattr(tokens, "astype"):
        numbers: Any = tokens  # of numpy
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            raise UsageError("tokens", tokens, "must be a one-dimensional array of integers")
        if count and not 0 <= int(numbers.min()) <= int(numbers.max()) < 1 << 32:
            raise UsageError("tokens", tokens, "must be integers from 0 to 2**32 - 1")
        return bytes(numbers.astype("<u4")[:count].tobytes())
    try:
        packed = array("I", cast("Iterable[int]", tokens))
    except (OverflowError, TypeError, ValueError) as e:
        raise UsageError("tokens", tokens, "must be integers from 0 to 2**32 - 1") from e
    return packed.tobytes()[: count * 4]
