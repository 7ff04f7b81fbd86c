"""Defines `kvstore.Client`, the front door for people who write their own code.

One class, so that all it can do is on one page: longer than other files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar, overload

from kvstore.client import arguments
from kvstore.client.base import ResetResult
from kvstore.client.explanation import Explanation, Missing, MissReason
from kvstore.client.health import Health, ask_index
from kvstore.client.missing.miss_query import about_block, about_value
from kvstore.client.nodes.deadlines import until
from kvstore.client.nodes.fetch import RemoteBlock
from kvstore.client.nodes.saving.link import Grants
from kvstore.client.payloads import tensors
from kvstore.client.pinned import NotPinned, Pinned, TokenMatch
from kvstore.client.session import BlockSession, Verify
from kvstore.client.values.getting import ValueGetter
from kvstore.client.values.saving import ValueSaver
from kvstore.errors import DeadlineError, NodeUnavailableError, UsageError
from kvstore.index.base import patient
from kvstore.index.redis.url import parse_url
from kvstore.keys import SALT_FIELD, Namespace
from kvstore.limits import RESET_TIMEOUT_S, Limits
from kvstore.secret import tenant_salt
from kvstore.transport.registry import SHM
from kvstore.transport.stream.security import StreamSecurity
from kvstore.types import (
    EXISTS,
    STORED,
    Array,
    Key,
    PutResult,
    Retained,
    Rows,
    StrPath,
    Tokens,
    Value,
    ValueLike,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("kvstore.client")

Pairs: TypeAlias = "Iterable[tuple[str | bytes, ValueLike]]"
Names = Sequence[str | bytes]
Several: TypeAlias = "Sequence[ValueLike | None] | Rows"
"""Values or buffers, or the rows of an array."""
A = TypeVar("A", bound=Array)
K = TypeVar("K", bound=str | bytes)
"""To a type checker a dict[str, int] is no Mapping[str | bytes, int]."""


class Client(arguments.Uncopied):
    """Put and get values and KV blocks. Thread-safe; make a new one after a fork: what
    this one has reserved or pinned can at most be read in the child.

    With no `url` (and no KVSTORE_URL) the embedded Redis and an embedded memory
    node of `node_size_bytes`, one for each key prefix, serve all such clients of this
    user on this machine, and end with the last of them; the largest value takes
    all of the node. With a `url`, values are saved to the memory nodes on this
    host that serve the same index (`node` names the one to save to).

    What is missing or cannot be reached is a miss: gets return None, puts say
    "rejected" and why. Only wrong arguments raise (`UsageError`), and calls that
    are about a node itself (`delete`, `pin`, `retain`, `clear`) when there is none
    (`NodeUnavailableError`, `DeadlineError`), and a put where /dev/shm has no room for
    the node that this client is to start (`NoSpaceError`).
    """

    _session_class: type[BlockSession] = BlockSession

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | Namespace = "default",
        key_prefix: str = "kv:default",
        node: str | None = None,
        node_size_bytes: int = 512 << 20,
        block_tokens: int = 256,
        run_dir: StrPath | None = None,
        verify: Verify = "never",
        signing_key: str | bytes | None = None,
        salt: str | bytes | None = None,
        limits: Limits | None = None,
        transports: Sequence[str] | None = None,
        security: StreamSecurity | None = None,
    ) -> None:
        """Raises `UsageError`, which names it, for a setting that is none, and when there is no
        Redis: neither a URL nor one to start; `IndexUnavailableError` when that does not start.

        - `url`: of Redis, a Redis Cluster or Sentinel (docs/decisions/0003); None takes
          KVSTORE_URL, else the embedded Redis.
        - `namespace`: whose values and blocks these are, a name or a `Namespace` of fields;
          clients with another one do not see them.
        - `key_prefix`: of all keys in Redis, the same for all that share nodes.
        - `node`: the name of the node of this host to save to; None: all of them.
        - `node_size_bytes`: of the embedded memory node that the first save starts.
        - `block_tokens`: tokens of one KV block, for the calls that take tokens.
        - `run_dir`: where processes of this host find each other; None takes KVSTORE_RUN_DIR,
          else a directory of this user.
        - `verify`: "always" writes checksums and compares them at every read, on this host
          too; "never" only where bytes cross a host or a disk. The same for all clients of a
          namespace: what one with "never" has saved, one with "always" cannot check and so
          never reads.
        - `signing_key`, `salt`: secrets (docs/security.md); None takes KVSTORE_SIGNING_KEY and
          KVSTORE_SALT, or what is in the files that these with _FILE name, else none. `salt`
          is for a namespace given by name; one that is made of fields has its own.
        - `limits`: deadlines and bounds (`Limits`), as far as they are a client's; None takes
          those of the file that KVSTORE_CONFIG names, else the defaults.
        - `transports`: those that may be used, of "shm", "cuda_ipc", "nixl"
          and "stream"; None takes KVSTORE_TRANSPORTS, else all.
        - `security`: what protects streams to other hosts (`StreamSecurity`); None takes
          KVSTORE_SECRET and KVSTORE_TLS_CA, _CERT and _KEY.
        """
        # Longer than other functions: all that a user may set is said in it.
        arguments.client_settings(**locals())
        if isinstance(namespace, str):
            namespace = Namespace.named(namespace, salt=tenant_salt(salt))
        self.namespace = namespace
        self.block_tokens = block_tokens
        self._closed = False
        self.session = self._session_class(
            url,
            key_prefix=key_prefix,
            node=node,
            run_dir=run_dir,
            verify=verify,
            signing_key=signing_key,
            limits=limits,
            node_size_bytes=node_size_bytes,
            transports=transports,
            security=security,
            waits_first=True,
        )
        # Who never closes it has the same at its end, or at the process's.
        self.session.machine.when_dropped(self, self.session.close)
        self.session.register_namespaces([self.namespace])
        self._reader = self.session.reader
        self._writer = self.session.writer
        self._getter = ValueGetter(self.session)
        self._verify = verify == "always"
        self._saver = ValueSaver(self.session, namespace.id)
        self._names = self.session.value_names.waiting
        self._explained: dict[str, int] = {}
        self._counts = {"stored": 0, "not_stored": 0}
        self._tokens: dict[str, int] = {}
        self.session.counted = {"": self._tokens, "client_": self._getter.counts}

    # --- putting ----------------------------------------------------------

    def put(self, key: str | bytes, value: ValueLike, *, replace: bool = False) -> PutResult:
        """Save one value: anything with the buffer protocol, a numpy array, a torch tensor.

        An existing key is left as it is, for a cache's values follow from their keys; the
        result says "exists" when it is this value, and "differs", which is not true, when it
        is another one. For keys of your own `replace=True` drops that first, on the nodes of
        this host and where the index says that it is; who reads meanwhile has a miss.
        """
        if replace is not False:
            return self._save_values([key], [value], replace)[0]
        raw_key = self._value_key(key)
        (result,) = self._saver.put([raw_key], [tensors.encode(value)])
        self._names.append((raw_key, key))
        self._counts["stored" if result in (STORED, EXISTS) else "not_stored"] += 1
        return result

    @overload
    def put_many(
        self, items: Mapping[K, ValueLike], *, replace: bool = False
    ) -> list[PutResult]: ...
    @overload
    def put_many(self, items: Pairs, *, replace: bool = False) -> list[PutResult]: ...
    def put_many(
        self, items: Mapping[K, ValueLike] | Pairs, *, replace: bool = False
    ) -> list[PutResult]:
        """`put` for a mapping or pairs, in a few requests for all; results in order.

        With `replace=True` the last value counts of those that are given for one key."""
        return self._save_values(*arguments.pairs(items), replace)

    def put_blocks(self, tokens: Tokens, blocks: Several) -> list[PutResult]:
        """Save the KV blocks at the head of `tokens`: `blocks[i]` is a buffer with the KV of
        tokens `i * block_tokens` to `(i + 1) * block_tokens`. At most as many as are full."""
        keys = self._block_keys(tokens)
        arguments.several("blocks", blocks, "buffers, one for each block")
        if len(blocks) > len(keys):
            raise UsageError(
                "blocks",
                f"{len(blocks)} blocks",
                f"{len(tokens)} tokens fill {len(keys)} of {self.block_tokens}",
            )
        payloads = [tensors.encode_block(blocks[i]) for i in range(len(blocks))]
        return self._counted(self._saver.save(keys[: len(blocks)], payloads))

    def _save_values(
        self, names: list[str | bytes], values: Sequence[Value], replace: bool
    ) -> list[PutResult]:
        arguments.flag("replace", replace)
        self._check_open()
        keys = self.namespace.value_keys(names)
        payloads = list(map(tensors.encode, values))
        results = (self._saver.replace if replace else self._saver.put)(keys, payloads)
        self._names.extend(zip(keys, names, strict=True))
        return self._counted(results)

    def _counted(self, results: list[PutResult]) -> list[PutResult]:
        stored = results.count(STORED) + results.count(EXISTS)
        self._counts["stored"] += stored
        self._counts["not_stored"] += len(results) - stored
        return results

    # --- getting ----------------------------------------------------------

    @overload
    def get(self, key: str | bytes, *, out: None = None) -> bytes | Array | None: ...
    @overload
    def get(self, key: str | bytes, *, out: A) -> A | None: ...
    @overload
    def get(self, key: str | bytes, *, out: Buffer) -> memoryview | None: ...
    def get(self, key: str | bytes, *, out: Value = None) -> Value:
        """Return the value as it was put (bytes, array, tensor with dtype and shape), None on a
        miss.

        With `out`, a writable contiguous buffer, array or CPU tensor, the bytes go there.
        One of plain bytes (a bytearray, a one-dimensional array or tensor of uint8) takes
        every value that fits, and the answer is a view of the part written. An array or
        tensor of anything else takes a value of its own dtype and shape, or as many bytes
        as it has of a value that was put as bytes, and is the answer itself. Raises
        `UsageError` when the value does not fit; `out` is then unchanged.
        """
        return self._getter.get(self._value_key(key), out)

    @overload
    def get_many(self, keys: Names, *, out: None = None) -> list[bytes | Array | None]: ...
    @overload
    def get_many(self, keys: Names, *, out: Sequence[A]) -> list[A | None]: ...
    @overload
    def get_many(self, keys: Names, *, out: Sequence[Buffer]) -> list[memoryview | None]: ...
    @overload
    def get_many(self, keys: Names, *, out: Several) -> list[memoryview | Array | None]: ...
    def get_many(self, keys: Names, *, out: Value = None) -> list[Value]:
        """`get` for each of `keys`, with one index round trip for all that were not seen before.

        Of several in `out`, one that does not fit is unchanged; others may have been filled."""
        self._check_open()
        arguments.several("keys", keys, "keys")
        if out is not None and len(arguments.several("out", out, "buffers")) != len(keys):
            raise UsageError(
                "out", f"{len(out)} buffers", f"must be one for each of {len(keys)} keys"
            )
        raw_keys = self.namespace.value_keys(keys)
        return self._getter.get_many(raw_keys, [None] * len(keys) if out is None else out)

    def get_blocks(self, tokens: Tokens, out: Several) -> int:
        """Read the KV blocks at the head of `tokens` into the buffers in `out`, in order.

        Returns how many leading blocks are there, whole and right; what `out` holds
        beyond them is undefined. What fits where is as for `get`: blocks that were put as
        arrays or tensors have a dtype and a shape.
        """
        keys = self._block_keys(tokens)[: len(arguments.several("out", out, "buffers"))]
        before = dict(self._reader.miss_reasons)
        got = self._getter.get_many(keys, [out[i] for i in range(len(keys))])
        hit = next((i for i, value in enumerate(got) if value is None), len(got))
        # Calls of other threads count there too: then a reason of theirs may be told.
        now = dict(self._reader.miss_reasons)
        why = [name for name, n in now.items() if n > before.get(name, 0)]
        missed = f"missed_tokens:{why[0] if why else MissReason.ABSENT.value}"
        for name, blocks in (
            ("asked_tokens", len(got)),
            ("hit_tokens", hit),
            (missed, len(got) - hit),
        ):
            if blocks:
                self._tokens[name] = self._tokens.get(name, 0) + blocks * self.block_tokens
        return hit

    def exists(self, key: str | bytes) -> bool:
        """Return whether a get would have hit a moment ago."""
        return self._reader.search((self._value_key(key),)) != [None]

    def match_prefix(self, tokens: Tokens) -> TokenMatch:
        """Return the longest leading run of full blocks of `tokens` in the store; one round
        trip."""
        found = self.session.match(self._block_keys(tokens))
        return TokenMatch(len(found) * self.block_tokens, len(found), found)

    def pin(self, key: str | bytes) -> Pinned | NotPinned:
        """Return a zero-copy view of a value that cannot be evicted while it is open; what it
        returns for a miss is false.

        Close it, or use it in a `with`, which gives None for a miss. Raises `UsageError` for a
        value that only a node of another host, or of another user, has: it can be read by `get`,
        and pinned by a client there.
        """
        raw_key = self._value_key(key)
        granted, done = Grants(), False
        try:
            try:
                pin = self._writer.pin(raw_key, granted)
            except (NodeUnavailableError, DeadlineError):
                self._check_not_remote(key, raw_key)
                raise
            if pin is None:
                self._check_not_remote(key, raw_key)
                return NotPinned()
            place = self._reader.place(raw_key, pin.record)
            if place is None or (self._verify and not self._reader.verified(raw_key, place)):
                return NotPinned()
            pinned = Pinned(place, pin)
            done = True
            return pinned
        finally:
            if not done:
                granted.close()

    def _check_not_remote(self, key: str | bytes, raw_key: Key) -> None:
        location = self._reader.search((raw_key,)).remote.get(0)
        if location is None:
            return
        now = self.session.machine.monotonic()
        announcement = self.session.remote.node(*location[:2], now)
        if announcement is not None:
            raise UsageError(
                "key",
                key,
                f"is on node {announcement.name} of {announcement.host}: only `get` "
                "reaches it from here",
            )

    def retain(self, key: str | bytes, for_s: int, tenant: str = "") -> Retained:
        """Keep a value on the nodes of this host from being evicted for `for_s` seconds, whoever
        ends meanwhile; 0 ends that. The answer is true when that is so. See `BlockStore.retain`,
        also for what raises.

        Unlike a pin it needs no client that lives, and has a budget (`Limits.retained_percent`).
        """
        self._check_open()
        (answer,) = self.session.retain([self._value_key(key)], for_s, tenant)
        return answer

    def retain_blocks(self, tokens: Tokens, for_s: int, tenant: str = "") -> list[Retained]:
        """`retain` for each full block of `tokens`, the head of the prefix first."""
        self._check_open()
        return self.session.retain(self._block_keys(tokens), for_s, tenant)

    def delete(self, key: str | bytes) -> bool:
        """Drop a value: on the nodes of this host, else on the node of another host that the
        index names. False when it was not there.

        Raises `NodeUnavailableError` or `DeadlineError` when a node that may have it cannot
        be asked.
        """
        return self.delete_many([key])[0]

    def delete_many(self, keys: Names) -> list[bool]:
        """`delete` for each of `keys`, in a few requests for all; results in order. When it raises,
        those whose nodes could be asked are dropped."""
        self._check_open()
        arguments.several("keys", keys, "keys")
        return self.session.drop(self.namespace.value_keys(keys))

    def clear(self, timeout_s: float = RESET_TIMEOUT_S) -> ResetResult:
        """Drop all values and blocks of this client's namespace, on every node of every host.

        The answer is true when all nodes have confirmed it: then nobody finds any more what
        was saved before. It says which have not within `timeout_s`, and what holds then.
        Raises `NodeUnavailableError` or `DeadlineError` when there are nodes and none could
        be told: then nothing is dropped.
        """
        self._check_open()
        return self.session.reset([self.namespace.id], arguments.seconds("timeout_s", timeout_s))

    # --- telling ----------------------------------------------------------

    def explain(self, tokens: Tokens) -> Explanation:
        """Return how much of `tokens` `get_blocks` could read now, and why not the next block.

        For people and logs: it asks the index, for a second at most, and the nodes of this host,
        for at most twice the deadline of a request.
        """
        keys = self._block_keys(tokens)
        with patient():
            found, missing = self._first_missing(tokens, keys)
        self._count_reason(missing)
        return Explanation(
            possible_tokens=len(keys) * self.block_tokens,
            hit_tokens=len(found) * self.block_tokens,
            disk_blocks=sum(map(_is_on_disk, found)),
            first_missing=missing,
        )

    def _first_missing(
        self, tokens: Tokens, keys: Sequence[Key]
    ) -> tuple[list[object], Missing | None]:
        """Return where the leading blocks are that are there, and why not the next one."""
        if not keys:
            detail = f"{len(tokens)} tokens do not fill one block of {self.block_tokens}"
            return [], Missing(block=0, reason=MissReason.TOO_SHORT, detail=detail)
        found = self._found(keys)
        hit = found.index(None) if None in found else len(keys)
        if hit == len(keys):
            return found, None
        question = about_block(hit, keys[hit], tokens, self.namespace, self.block_tokens)
        return found[:hit], self.session.why_missing(question)

    def _found(self, keys: Sequence[Key]) -> list[object]:
        """Return where each block is that can be read: nodes of other hosts are tried."""
        session, found = self.session, self._reader.search(keys)
        deadline = session.machine.monotonic() + session.limits.request_timeout_s / 2
        cannot = session.readability.cannot_read(found.remote.values(), deadline)
        return [
            None if isinstance(ref, RemoteBlock) and ref.location[:2] in cannot else ref
            for ref in found
        ]

    def explain_key(self, key: str | bytes) -> Explanation:
        """Return whether a get of `key` would hit now, and why not: `first_missing`, as `explain`
        otherwise."""
        raw_key, missing = self._value_key(key), None
        with patient():
            (found,) = self._found((raw_key,))
            if found is None:
                missing = self.session.why_missing(about_value(key, self.namespace))
        self._count_reason(missing)
        name = key if isinstance(key, str) else key.decode(errors="backslashreplace")
        return Explanation(
            possible_tokens=0,
            hit_tokens=0,
            first_missing=missing,
            disk_blocks=_is_on_disk(found),
            key=name,
        )

    def _count_reason(self, missing: Missing | None) -> None:
        if missing is None:
            return
        name = missing.reason.value
        self._explained[name] = self._explained.get(name, 0) + 1
        log.info("%s", missing)

    def ping(self) -> None:
        """Return when Redis answers, and lets this client look blocks up.

        Raises `IndexUnavailableError` otherwise, within twice `PATIENT_TIMEOUT_S`.
        """
        self._check_open()
        ask_index(self.session.index)

    def health(self) -> Health:
        """Return what works now: a round trip to Redis and one to each memory node of this host,
        and a connection to each of the others.

        Truthy when Redis and the nodes of this host do, or without any here one that can be read;
        its text says what does not. Starts nothing, and raises nothing for a peer's fault; nodes
        that hang cost `Limits.request_timeout_s` together.
        """
        self._check_open()
        session = self.session
        now = session.machine.monotonic()
        give_up_at = now + session.limits.request_timeout_s
        reached = session.reach((now + give_up_at) / 2)
        others = {
            one.name: str(one.fault or "")
            for one in reached
            if not (one.here and SHM in session.transports) and one.fault is one.unreadable
        }
        disks = {one.announcement.name: str(one.disks) for one in reached if one.disks}
        with until(give_up_at):
            health = session.health()
        return replace(health, others=others, disks=disks | dict(health.disks))

    def stats(self) -> dict[str, dict[str, int | float]]:
        """Counters of this client ("client") and of this host's node ("node", empty when gone).

        "transports" counts what was read, by transport. Misses are counted by `MissReason`:
        "missed" by calls that missed for another reason than that the index had no record,
        "explained" by calls of `explain`.
        """
        self._check_open()
        client: dict[str, int | float] = {**self._getter.counts, **self._counts}
        client["index_failures"] = self._reader.index_failures
        try:
            node = self._writer.stats()
        except (NodeUnavailableError, DeadlineError):
            node = {}
        return {
            "client": client,
            "node": node,
            "missed": dict(self._reader.miss_reasons),
            "explained": dict(self._explained),
            "transports": self._by_transport(),
        }

    def _by_transport(self) -> dict[str, int | float]:
        viewed, gets, remote = self.session.viewed, self._getter.counts, self._getter.remote_counts
        return {
            "shm_hits": gets["hits"] - remote["hits"] + viewed["hits"],
            "shm_bytes": gets["hit_bytes"] - remote["hit_bytes"] + viewed["hit_bytes"],
            **self.session.remote.counts,
        }

    def close(self) -> None:
        """Give everything back but pins that somebody still has a view of. Safe to call twice;
        every other call is a `UsageError` afterwards."""
        self._closed = True
        self.session.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("client", "(closed)", "make a new one: it was closed")

    def _value_key(self, key: str | bytes) -> Key:
        self._check_open()
        (raw_key,) = self.namespace.value_keys((key,))
        return raw_key

    def _block_keys(self, tokens: Tokens) -> list[Key]:
        self._check_open()
        return self.namespace.block_keys(tokens, self.block_tokens)

    def __repr__(self) -> str:
        nodes = (
            ", ".join(sorted({link.announcement.name for link in self._writer.links()}))
            or "none yet"
        )
        closed = ", closed" if self._closed else ""
        where = parse_url(self.session.url).label
        return f"Client({where!r}, nodes: {nodes}, namespace: {self._namespace_shown()}{closed})"

    def _namespace_shown(self) -> str:
        fields = self.namespace.fields
        return str(fields["name"] if set(fields) <= {"name", SALT_FIELD} else fields)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_on_disk(found: object) -> bool:
    return isinstance(found, RemoteBlock) and found.location.segment > 0
