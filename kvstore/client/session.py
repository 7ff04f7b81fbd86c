"""Defines `BlockSession`: the store as connectors see it, over the index and this host's node.

It decides little: which of its parts answers, and what their failures mean for the caller.
`lookups` says which node has a block, on this host first, then by `index`; `reader` reads on this
host, `remote` elsewhere; `writer` saves here, `remote_writer` where there is no node here. What
passes through it:

    a key, looked up  -> `BlockRef`: was in the index a moment ago. A hint (rule 7); plain data,
                         may cross processes and be kept for as long as one likes.
    a `BlockRef`      -> view: bytes in place, or fetched. Not yet a hit: who copies from it asks
                         `valid()` afterwards, and takes False for a miss (rule 4).
    a key, reserved   -> `Reservation`: memory to write to, until `commit` or `abort`, one of them,
                         once. Its `saver` granted it and takes it back (nodes/saving).

A session is open from its making to `close`. Each part reaches its peers when it is first
needed, and by itself again after they failed: the index behind a circuit breaker
(index/outage.py), a node of this host as soon as its directory shows that it lives, one of
another host after a pause (nodes/remote.py). So no call has to know what an earlier one met.

Any thread may call; parts lock what they share. A thread of the session's own (`_look_after`)
lets go of dead nodes.

Must never happen:

- a lookup or a read that raises because the index or a node is down, or that waits beyond its
  deadline: it is a miss, with its reason;
- bytes written to memory that is not reserved, or is no longer (rule 5);
- a save acknowledged that its node has not sealed.

One class, because it is the contract `BlockStore` on one page; most calls are a few lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

from kvstore.client import arguments
from kvstore.client.arguments import Uncopied, tenant_id, whole
from kvstore.client.base import (
    AnyReservation,
    BlockRef,
    BlockView,
    HostView,
    LookupResult,
    MissQuery,
    PoolMapping,
    PrefixMatch,
    ReserveAnswer,
    ResetResult,
)
from kvstore.client.block_lookup import BlockLookup
from kvstore.client.dropping import drop_everywhere
from kvstore.client.explanation import Missing
from kvstore.client.health import Health, IndexWatch, ask_index
from kvstore.client.missing.explain import Explainer
from kvstore.client.nodes.corruption_reporter import CorruptionReporter
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.disks import OwnDisks
from kvstore.client.nodes.fetch import FetchedBlock, RemoteBlock
from kvstore.client.nodes.landing import ArrivedInVram, VramLanding, divided
from kvstore.client.nodes.readability import Reach, Readability
from kvstore.client.nodes.reaper import EVERY_S, Reaper
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.client.nodes.saving import savers
from kvstore.client.nodes.saving.host_writer import HostWriter
from kvstore.client.nodes.saving.remote_writer import RemoteWriter
from kvstore.client.nodes.saving.value_names import ValueNames
from kvstore.client.reader import Reader
from kvstore.client.reset_everywhere import reset_everywhere
from kvstore.config_file import read_config
from kvstore.errors import IndexUnavailableError, InternalError, NodeUnavailableError
from kvstore.index.base import Index
from kvstore.index.open import OpenedIndex, open_guarded
from kvstore.keys import Namespace
from kvstore.limits import LOCK_PART_BYTES, RESET_TIMEOUT_S, RETAINED_S_MAX, Limits
from kvstore.machine import REAL, Machine
from kvstore.protocol.control_requests import Wants
from kvstore.record import RecordSigner
from kvstore.rundir import run_dir as default_run_dir
from kvstore.secret import SIGNING_KEY, secret
from kvstore.segment.abandoned import Sweeper
from kvstore.segment.attached import AttachedShm
from kvstore.segment.layout import Layout
from kvstore.transport.registry import CUDA_IPC, DISK, SHM, Transports, allowed
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import StreamTransport
from kvstore.types import Key, PutResult, Retained, StrPath, Tier

# What few sessions use is imported where it is used.
if TYPE_CHECKING:
    from kvstore.client.nodes.vram import VramNodes
    from kvstore.cuda.base import CudaDevice, DeviceRange
    from kvstore.transport.cuda_memory import DeviceBlock

Verify = Literal["never", "always"]


def _mapping(shm: AttachedShm | None, *, writable: bool) -> list[PoolMapping]:
    if shm is None:
        return []
    block = shm.superblock
    try:
        memory = shm.payload[:]
    except ValueError:  # closed meanwhile
        return []
    return [PoolMapping(memory, LOCK_PART_BYTES, writable, block.node_id, block.epoch)]


class BlockSession(Uncopied):
    """Implements `kvstore.client.base.HostBlockStore`. Lookups are lazy: nothing is contacted yet.

    `url` is a Redis URL (see docs/decisions/0003); None takes KVSTORE_URL, else the
    embedded Redis of this machine. `node` names the local node to write to, None
    takes all that serve the same index. With `verify="always"` payload checksums
    are written and every read is checked against them, on this host too. With a
    `signing_key` (None: KVSTORE_SIGNING_KEY) only records signed with it count. With
    `node_size_bytes` the first save starts the embedded memory node, of that size,
    when there is neither a URL nor a node. `transports` are those that may be used
    (transport/registry.py; None takes KVSTORE_TRANSPORTS, else all): without "shm" the
    nodes of this host are as far away as any other. `security` is what streams are
    protected by; None takes it from the environment. With a `device`, blocks that nodes
    of this host keep in VRAM are read too. `sees_vram` is for a process without one that
    looks up for others that have: it says of a node's id and epoch whether they can read
    its VRAM (`open_vram`). With a `nixl_device`, what comes from other hosts by RDMA may
    arrive in memory of that device (`views_on_device`). With `waits_first` the first call that
    needs the index may take `PATIENT_TIMEOUT_S`; without, another thread makes the first contact.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key_prefix: str = "kv:default",
        node: str | None = None,
        run_dir: StrPath | None = None,
        verify: Verify = "never",
        signing_key: str | bytes | None = None,
        limits: Limits | None = None,
        node_size_bytes: int | None = None,
        transports: Sequence[str] | None = None,
        security: StreamSecurity | None = None,
        device: CudaDevice | None = None,
        sees_vram: Callable[[int, int], bool] | None = None,
        nixl_device: CudaDevice | None = None,
        waits_first: bool = False,
        machine: Machine = REAL,
    ) -> None:
        # Longer than other functions: it makes the parts, each from those before it.
        arguments.session_settings(**locals())
        self.machine = machine
        self._now = machine.monotonic
        key = secret(SIGNING_KEY, signing_key)
        self.limits = limits or read_config().limits()
        self.run_dir = default_run_dir(run_dir)
        self.verify = verify
        self.key_prefix = key_prefix
        self._waits_first = waits_first
        self._opened: OpenedIndex = self._open_index(url)
        self.index: Index = self._opened.index
        self.url: str = self._opened.url
        self.embedded: bool = self._opened.embedded
        self.transports = allowed(transports)
        self.viewed = {"hits": 0, "hit_bytes": 0}
        """Blocks of this host that `views` has handed out."""
        self._watch = IndexWatch(self.index, machine.monotonic)
        self._reaper = self._new_reaper()
        self._sweeper = Sweeper(self.run_dir)
        signer = RecordSigner(key, key_prefix) if key else None
        stream = StreamTransport(security or StreamSecurity.from_environment())
        ways = Transports(self.transports, stream, Layout, nixl_device)
        self.nodes = NodeDirectory(
            self.run_dir,
            self.index,
            key_prefix,
            use=SHM in self.transports,
            disks=DISK in self.transports,
            offered=ways.of,
            signer=signer,
            mapping=self._reaper.start,
            machine=machine,
        )
        self._reporter = CorruptionReporter(self.limits.request_timeout_s, machine=machine)
        self.remote = RemoteNodes(
            self.nodes,
            ways,
            self.limits.stream_timeout_s,
            self._vram_nodes(device, sees_vram),
            OwnDisks(self.nodes, self._reporter.report),
        )
        self._landing = None if nixl_device is None else VramLanding(nixl_device)
        self.readability = Readability(self.nodes, self.remote, verifies=verify == "always")
        self.reader = Reader(
            self.index,
            self.readability,
            signer=signer,
            reporter=self._reporter,
            watch=self._watch,
        )
        self.lookups = BlockLookup(self.index, self.reader, signer, self.limits.redis_timeout_s)
        self.writer = HostWriter(
            self.nodes,
            name=node,
            timeout_s=self.limits.request_timeout_s,
            checksums=verify == "always",
            start_node=self._node_starter(key_prefix, node, node_size_bytes, key),
        )
        self.value_names = ValueNames(self.writer)
        self.remote_writer = RemoteWriter(
            self.remote,
            self.lookups.readable,
            self.writer.introductions,
            self.lookups.taken,
            machine=machine,
        )
        self._explainer = Explainer(
            self.index, self.readability, self.limits.request_timeout_s, signer
        )
        self.counted: Mapping[str, Mapping[str, int]] = {}
        """What a `Client` counts for its host's node, by what goes before each name there."""
        self._told: dict[str, int] = {}
        self._reaper.start()

    def _open_index(self, url: str | None) -> OpenedIndex:
        return open_guarded(
            url,
            key_prefix=self.key_prefix,
            run_dir=self.run_dir,
            limits=self.limits,
            waits_first=self._waits_first,
        )

    def _new_reaper(self) -> Reaper:
        return Reaper(self._look_after, EVERY_S if self._waits_first else 0.0)

    def _vram_nodes(
        self, device: CudaDevice | None, seen: Callable[[int, int], bool] | None
    ) -> VramNodes | None:
        wanted = device is not None or seen is not None
        if not wanted or CUDA_IPC not in self.transports:
            return None
        from kvstore.client.nodes.vram import VramNodes

        return VramNodes(
            self.nodes,
            device,
            seen,
            verifies=self.verify == "always",
            report=self._reporter.report,
        )

    def _node_starter(
        self, key_prefix: str, node: str | None, size_bytes: int | None, key: bytes | None
    ) -> Callable[[], None] | None:
        if size_bytes is None or node is not None or not self.embedded:
            return None
        from kvstore.client.nodes.saving.embedded_node import start_embedded_node

        return lambda: start_embedded_node(
            self.run_dir, key_prefix=key_prefix, size_bytes=size_bytes, signing_key=key
        )

    def _look_after(self) -> None:
        """Warn of an index that fails. Keep nothing of dead nodes: their next start may need the
        room in /dev/shm."""
        self._watch.look(self._now())
        now = self._now()
        self.nodes.check(now)
        self.reader.let_go()
        self.writer.let_go()
        self.value_names.tell()
        self._tell_counted()
        self.remote.look_after()
        if self._sweeper.due(now):
            self._sweeper.sweep()

    def _tell_counted(self) -> None:
        """Tell a node how much was counted since the last time."""
        counted = self.counted.items()
        now = {start + name: n for start, of in counted for name, n in dict(of).items()}
        grown = {name: n - self._told.get(name, 0) for name, n in now.items()}
        if any(grown.values()) and self.report({name: n for name, n in grown.items() if n}):
            self._told = now

    def match(self, keys: Sequence[Key], timeout_s: float | None = None) -> PrefixMatch:
        """See `BlockStore.match`. The index's own deadline (`redis_timeout_s`) bounds the wait for
        it; with a `timeout_s` shorter than what it took, its answer counts as too late.
        While the index is away, another `redis_timeout_s` at most goes into this host's segments.
        """
        return self.lookups.match(keys, timeout_s)

    def lookup(self, keys: Sequence[Key], timeout_s: float | None = None) -> LookupResult:
        """See `BlockStore.lookup`; its deadline is that of `match`."""
        return self.lookups.lookup(keys, timeout_s)

    def tiers(self, found: Sequence[BlockRef]) -> list[Tier]:
        return self.lookups.tiers(found)

    def sources(self, found: Sequence[BlockRef]) -> list[str]:
        return self.lookups.sources(found)

    def view(self, found: BlockRef) -> HostView | None:
        (view,) = self.views([found], None)
        return view

    def views(
        self, found: Sequence[BlockRef], staging: memoryview | None, timeout_s: float | None = None
    ) -> Iterator[HostView | None]:
        """See `BlockStore.views`. Those of other hosts come when the first of them is asked for."""
        return self._views(found, staging, None, timeout_s)

    def views_on_device(
        self, found: Sequence[BlockRef], staging: memoryview | None, timeout_s: float | None = None
    ) -> Iterator[BlockView | None]:
        """`views`, of which those that came by RDMA may be in memory of the `nixl_device`: checked
        there, and good until `staging` is used again. For one `staging` of this session only; with
        any other, and where the device cannot take them, all are in the host's memory."""
        landing = None
        if self._landing is not None and staging is not None:
            landing = self._landing.beside(staging)
        try:
            for view in self._views(found, staging, landing, timeout_s):
                on_device = view.vram if isinstance(view, FetchedBlock) else None
                yield view if on_device is None else ArrivedInVram(on_device)
        except InternalError:
            if self._landing is not None:
                self._landing.lost()
            raise

    def _views(
        self,
        found: Sequence[BlockRef],
        staging: memoryview | None,
        landing: DeviceRange | None,
        timeout_s: float | None,
    ) -> Iterator[HostView | None]:
        deadline = None if timeout_s is None else self._now() + timeout_s
        refs = [self.reader.resolve(one.key, one.record) for one in found]
        into, rooms = None, None
        if staging is not None and any(isinstance(ref, RemoteBlock) for ref in refs):
            into, rooms = divided(staging, landing, refs)
        fetched: Sequence[object] = ()
        for i, (one, ref) in enumerate(zip(found, refs, strict=True)):
            if isinstance(ref, RemoteBlock):
                fetched = fetched or self.reader.read(refs, into, deadline, rooms)
                yield cast("HostView | None", fetched[i])
                continue
            if ref is None or (self.verify != "never" and not self.reader.verified(one.key, ref)):
                yield None
            else:
                self.viewed["hits"] += 1
                self.viewed["hit_bytes"] += len(ref.buffer)
                yield ref

    def open_vram(self) -> frozenset[tuple[int, int]]:
        """Id and epoch of the nodes whose VRAM this process has open and can read. From the first
        call on it opens, beside, all of this host that it can; never waits."""
        return self.remote.open_vram()

    def device_view(self, found: BlockRef) -> DeviceBlock | None:
        """Return a block of this host's VRAM in place, for kernels of the caller's; close it. None
        for one that is elsewhere, or is not there any more."""
        location = self.reader.remote_location(found.key, found.record)
        return (
            None if location is None else self.remote.device_view(found.key, location, self._now())
        )

    def reserve(
        self, keys: Sequence[Key], size_bytes: int, namespace_id: int
    ) -> list[ReserveAnswer]:
        try:
            return self.writer.reserve(Wants(keys, size_bytes), namespace_id)
        except NodeUnavailableError:
            here = self.writer.no_node()
            if here is None:
                raise
        try:
            return self.remote_writer.reserve(keys, size_bytes, namespace_id)
        except NodeUnavailableError as e:
            raise NodeUnavailableError(f"{here}; elsewhere: {e}") from e

    def commit(self, reservations: Sequence[AnyReservation]) -> list[PutResult]:
        return savers.commit(reservations, self.limits.request_timeout_s, self._now)

    def abort(self, reservations: Sequence[AnyReservation]) -> None:
        savers.abort(reservations, self.limits.request_timeout_s, self._now)

    def touch(self, keys: Sequence[Key], *, saved: bool = False, left: bool = False) -> None:
        self.writer.touch(keys, self._now(), saved=saved, left=left)

    def were_read(self, keys: Sequence[Key]) -> list[bool | None]:
        return self._explainer.were_read(keys)

    def report(self, counts: Mapping[str, int]) -> bool:
        return self.writer.report(counts)

    def pin(self, keys: Sequence[Key]) -> list[BlockRef | None]:
        records = self.writer.pin_many(keys)
        return [
            BlockRef(key, record) if record is not None else None
            for key, record in zip(keys, records, strict=True)
        ]

    def unpin(self, found: Sequence[BlockRef]) -> None:
        self.writer.unpin_many([(f.key, f.record) for f in found])

    def retain(self, keys: Sequence[Key], for_s: int, tenant: str = "") -> list[Retained]:
        whole("for_s", for_s, 0, RETAINED_S_MAX)
        return self.writer.retain(keys, for_s, tenant_id(tenant)) if keys else []

    def drop(self, keys: Sequence[Key]) -> list[bool]:
        return drop_everywhere(self.reader, self.writer, self.remote, keys) if keys else []

    def clear(self, namespace_id: int) -> int:
        return self.writer.clear(namespace_id)

    def reset(
        self, namespace_ids: Sequence[int], timeout_s: float = RESET_TIMEOUT_S
    ) -> ResetResult:
        return reset_everywhere(
            self.writer,
            self.remote_writer,
            self.index,
            self.nodes,
            namespace_ids,
            timeout_s,
            alone=self.embedded,
        )

    def read_bytes(self) -> Mapping[str, int]:
        return {SHM: self.viewed["hit_bytes"], **self.remote.read_bytes()}

    def mappings(self) -> Sequence[PoolMapping]:
        found: list[PoolMapping] = []
        with contextlib.suppress(NodeUnavailableError):
            for writer in self.writer.writers():
                link = writer.linked
                if link is not None:
                    found += _mapping(link.memory.shm, writable=True)
        for attached in self.nodes.mapped:
            found += _mapping(attached.shm, writable=False)
        return found

    @property
    def why_not_to_vram(self) -> str:
        """Why what comes by RDMA does not arrive in VRAM, for people; empty when it does."""
        landing = self._landing
        return (landing.reason if landing is not None else "") or self.remote.why_not_to_vram

    def register_namespaces(self, namespaces: Iterable[Namespace]) -> None:
        self.writer.register_namespaces(namespaces)

    def why_missing(self, question: MissQuery) -> Missing:
        return self._explainer.why(question)

    def health(self) -> Health:
        """A round trip to the index and one to each node of this host. Starts nothing, raises
        nothing for a peer's fault."""
        index = ""
        try:
            ask_index(self.index)
        except IndexUnavailableError as e:
            index = str(e)
        nodes, disks = self.writer.health()
        return Health(index=index, nodes=nodes, disks=disks)

    def reach(self, deadline: float) -> list[Reach]:
        """Return which nodes there are, and why this client cannot read those that it cannot: each
        is tried, by `deadline` in seconds of the machine's clock."""
        return self.readability.reach(deadline)

    def close(self) -> None:
        self._watch.close()
        self._reaper.close()
        self._explainer.close()
        self.value_names.tell()
        if self.writer.links():  # else the end of a client would wait for a node to answer
            self._tell_counted()
        self.writer.close()
        self.reader.close()
        self.remote.close()
        if self._landing is not None:
            self._landing.close()
        self.nodes.close()
        self._opened.close()
