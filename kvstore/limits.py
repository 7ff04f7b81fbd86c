"""Limits that several modules share, by name (rule 9), and `Limits`, those that are settings.

Sizes in bytes, times in seconds. An operator sets the fields of `Limits` by `[limits]` of the file
that KVSTORE_CONFIG names; everything else is a constant
([0051](../docs/decisions/0051-constants-are-constants.md)).

Elsewhere stands, as a named constant at the head of the one module that uses it, what nobody
else has to know:

- the pace of its own work: how often it polls, tries again, looks around, at how much at a time;
- the deadline of a step that only it takes (a handshake, the start of a process);
- room that only it has (a cache, a pool of connections);
- sizes that are a format and no limit: headers, keys, digests, versions.

So whoever reviews what one peer can cost another reads this file, and whoever tunes one part
reads that part. `grep -rnE "^_?[A-Z_]+_(MAX|S|BYTES)(:.*)? =" kvstore connector` lists most.
Connectors have theirs in connector/limits.py, the router in its own modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvstore.settings.reader import NumberRange, check_settings

Count = Annotated[int, NumberRange(1)]
Seconds = Annotated[float, NumberRange(above=0)]

SEGMENT_BYTES_MIN = 64 << 10
VALUE_BYTES_MAX = 1 << 30
"""Size of one value; its node may allow less."""
EMBEDDED_NODE_BYTES_MIN = 8 << 20
"""Size down to which an embedded node is made smaller that does not fit into /dev/shm."""
SLOT_BYTES_MIN = 4 << 10
"""A page of a segment; smaller values take one too. Every page needs room for a 64-byte header
(1.6%), whatever lies in it."""
MOVED_BYTES_MAX = 64 << 20
"""Bytes of retained blocks that a node moves out of the way for one request, or for each value up
to its own size: its other clients wait for about 50 ms. A block counts 128 KiB more than it has. A
value that would need more finds no room."""
LOCK_PART_BYTES = 64 << 20
"""Bytes of a segment that a process page-locks, or maps, in one call."""
SLOTS_PER_SEGMENT_MAX = (1 << 32) - 1
"""Slots have 32 bits in records and headers, and so has their number."""

MESSAGE_BYTES_MAX = 8 << 20
"""Size of one control message, both ways."""
BATCH_KEYS_MAX = 4096
"""Keys in one control message or one index call; clients split longer ones."""
LIST_ROWS_MAX = 256
"""Blocks in one page of a listing: a node that answers it does nothing else meanwhile."""
HELD_MAX = 1 << 16
"""Reservations, and pinned slots, that a client can name when it connects; a node allows one client
fewer (core/node.py, `Limits`)."""
REDIS_ARGS_MAX = 1024
"""Arguments in one Redis command; a longer call is several commands in one pipeline."""
USER_KEY_BYTES_MAX = 4096
PATIENT_TIMEOUT_S = 1.0
"""Time for an answer of the index where nothing is computed meanwhile: at the first contact, which
opens a connection, and for people who ask for its state."""
TENSOR_DIMS_MAX = 16
BLOCK_TOKENS_MAX = 1 << 20
"""Tokens in one block of a client."""
PROMPT_TOKENS_MAX = 1 << 24
"""Tokens in one call: more than any model takes, and less than fills memory."""
SEGMENT_BYTES_MAX = SLOTS_PER_SEGMENT_MAX * SLOT_BYTES_MIN
"""Size of one node's segment, a page less than 16 TiB: more is a mistyped size."""
REPLACE_TRIES = 3
"""Attempts of a put that replaces, when others put another value meanwhile."""
META_BYTES_MAX = 255
NAMESPACE_BYTES_MAX = 4096
"""Fields of one namespace as JSON, as a client sends them to a node."""
NAMESPACE_FIELDS_MAX = 64
NAME_BYTES_MAX = 256
"""Bytes of the name that a user gives a value, as a client sends it to a node; longer names are not
sent."""
NAMES_WAITING_MAX = 4096
"""Names that a client has yet to send; further ones are not sent."""
NAMES_MESSAGE_BYTES_MAX = 32 << 10
"""Bytes of keys and names in one message: a socket must take it at once."""
CHECKED_BYTES_PER_S_MAX = 1 << 30
"""Bytes that a node reads again because clients report them as wrong: a tenth of its time."""

STREAM_BLOCKS_MAX = BATCH_KEYS_MAX
"""Blocks in one request over a stream; clients split longer ones."""
STREAM_BATCH_BYTES_MAX = 64 << 20
"""Payload in one request over a stream, so that its deadline means something; one larger block
travels alone."""
CLAIMED_BYTES_MAX = 16 << 20
"""Bytes that a call allocates before it verifies the lengths that index records claim; beyond it
the nodes are asked first."""
STREAM_SLOW_BYTES_PER_S = 50 << 20
"""The slowest stream that does not count as stuck; a batch's deadline is lengthened by its bytes at
this rate."""
STREAM_FRAME_BYTES_MAX = 1 << 20
"""Size of a request over a stream without its payload."""
STREAM_CONNECTIONS_PER_NODE = 4
"""Connections that one client keeps to one node, which is the number of requests in flight."""
STREAM_CONNECTIONS_PER_READ = 3
"""Connections to one node for the blocks of one call, where this process has two cores for each and
other calls leave them."""
STREAM_SHARE_BYTES = 8 << 20
"""Bytes that are worth one more connection."""
STREAM_NODES_AT_ONCE = 64
"""Nodes (and shares of one) that one client reads from at a time, and those that it tries again:
each has a thread, which a silent node keeps for a whole deadline."""
STREAM_UNPROVEN_MAX = 64
"""Connections that have not yet proved that they know the secret, besides
`Limits.stream_connections_max`; for a new one the oldest of the address with most of them is
closed."""
STREAM_RESERVED_SHARE = 4
"""One client host may reserve one in this many bytes of a node by saves in flight; further saves of
it wait."""
TOLD_MAX = 1024
"""Hints of clients on other hosts that wait for a node's event loop; a further one is dropped."""
DISK_PIECE_BYTES = 1 << 20
"""Bytes of one call to a disk: with `DISK_THREADS` of them a fast drive is busy."""
DISK_KEYS_MAX = 16
"""Keys that a file of them has (secret.py): one that encrypts, and those before it."""
DISK_THREADS = 16
"""Threads with which one client reads from one disk."""
DISK_STAGING_BYTES = 64 << 20
"""Memory in which blocks of disks arrive in one client, together with what is kept from use while a
call to a disk hangs; one larger block has it alone."""

CUDA_IPC_NODES_MAX = 64
"""Nodes whose VRAM one client has open; the least recently used one is closed for the next."""
CUDA_IPC_OPEN_S = 1.0
"""Time that a node may take to hand its VRAM over; it is a thread beside an engine's."""
CUDA_IPC_WINDOW_BYTES = 256 << 20
"""Payload queued on the stream as one window, with one event; two such windows are in flight."""
CUDA_IPC_DRAIN_S = 10.0
"""Time that copies queued before a deadline may take beyond it. A device that is slower hangs, and
the memory they write to can neither be used nor given back."""
CUDA_BATCH_COPIES_MAX = 1024
"""Copies that one call of the CUDA driver queues (cuMemcpyBatchAsync)."""
DEMOTE_BLOCKS_MAX = 64
"""Blocks that leave VRAM for host memory at a time."""
DEMOTE_BYTES_MAX = 64 << 20
"""Payload that leaves VRAM at a time; one larger block travels alone."""
NAMES_LOOKED_UP_MAX = 8
"""Host names that one process looks up at the same time: each has a thread that cannot be
cancelled, and a further one fails at once."""
NAMES_KEPT_MAX = 1024
"""Host names whose addresses one process remembers."""

NIXL_REQUEST_BYTES_MAX = 16 << 20
"""Payload in one READ request, so that its deadline means something; larger batches are several."""
NIXL_PIECES_MAX = 4096
"""Pieces in one READ request, the headers before and after each among them."""
NIXL_REQUESTS_MAX = 4
"""READ requests of one client in flight, and parts of the arena they go into."""
NIXL_QUARANTINED_MAX = 2
"""Arenas into which late bytes may still come. With this many, nothing is read through NIXL."""
NIXL_PEERS_MAX = 256
"""Nodes whose NIXL endpoints one client knows."""
NIXL_OWNER_RETRY_AFTER_MAX_S = 60.0
"""The longest pause between two starts of a node's NIXL process when it dies repeatedly."""

WEIGHTS_TIMEOUT_S = 60.0
"""Time that the fingerprint of a model's weights may take; cold, over a slow network, the reads
take most of it."""
WEIGHTS_THREADS = 8
"""Files of weights that are read at the same time."""
WEIGHT_FILES_MAX = 4096
"""Files of one model's weights; more are not a model."""
WEIGHT_WHOLE_BYTES_MAX = 8 << 20
"""Files of weights up to this size are read whole: adapters, indexes, code."""
WEIGHT_HEADER_BYTES_MAX = 100 << 20
"""The limit of safetensors itself for a header."""
WEIGHT_SAMPLE_BYTES = 4096
WEIGHT_SAMPLES_MAX = 16384
"""Samples of all files of one model together: 64 MiB."""
WEIGHT_SAMPLES_MIN = 16
"""Samples of each file, however many files there are."""

RETAINED_BY_ONE_SHARE = 2
"""One tenant may have retained one in this many bytes of what the node may retain."""
RETAINED_S_MAX = 30 * 24 * 3600
"""Time for which a block may be retained at once; a caller that wants longer asks again."""
TENANT_BYTES_MAX = 256
"""Bytes of a tenant's name, as UTF-8."""
TTL_S_MAX = 30 * 24 * 3600
"""The longest bound on the life of a namespace's blocks."""
EXPIRED_AT_ONCE_BYTES = 16 << 20
"""Bytes of blocks whose life is over that a node wipes before it serves the next request: 5 ms."""
RESET_NAMESPACES_MAX = 64
"""Namespaces that one reset names; clients split longer ones."""
RESETS_IDS_MAX = 1024
"""Namespaces of all resets that a node remembers together: 5.5 KB of its announcement."""
RESET_TIMEOUT_S = 5.0
"""Time that a reset waits for all nodes to confirm it: they hear of it with a heartbeat."""
RESET_LISTENS_S = 2.0
"""Time for which the index must have answered before a reset counts its nodes as complete: an index
that was just emptied hears of nodes with their next heartbeat."""
RESETS_SETTLE_S = 3.0
"""Time that a node starting with the blocks of a former start waits for the others to repeat the
resets it missed, when the index may have lost them."""

EVENT_KEYS_MAX = 4096
"""Blocks in one event that a node publishes; more are several."""
EVENT_MESSAGE_BYTES_MAX = 1 << 20
"""Size of one message of such events."""
EVENT_BACKLOG_MAX = 1 << 18
"""Blocks, and messages, that wait until they are published; what comes beyond it is left out, which
routers see as a gap in the sequence. As many published ones are kept for listeners that missed
them."""
EVENT_MESSAGES_WAITING_MAX = 1024
"""Messages that wait for one router that is slower than its node; it misses further ones, and sees
that too."""
EVENT_CONNECTIONS_MAX = 512
"""Connections to a node's events, in both of its sockets; for a new one the oldest of the address
with most of them is closed. They are also at most an eighth of the files that the node may open,
because a listener shows no secret."""
EVENT_REPLAYS_MAX = 256
"""Questions of routers that wait for an answer: for a snapshot of a node's blocks, or until there
is room for it. A further question is not answered, and its router asks again."""
EVENT_ANSWER_BYTES_MAX = 64 << 20
"""Bytes of all answers that routers have asked a node for and not taken yet; one may be larger when
there is no other. Further questions wait."""
EVENT_ANSWERS_MAX = 2
"""Answers of one router that it has not taken, and as many of its questions that wait."""
EVENT_ANSWER_TAKEN_S = 10.0
"""Time after which a router that has not taken its answer is disconnected if others wait for room;
over TCP also one that takes nothing of it for this long."""
EVENT_SOURCES_MAX = 1024
"""Nodes whose events one process listens to."""
EVENT_BLOCKS_MAX = 1 << 24
"""Blocks of one node that a listener remembers."""
EVENTS_SILENT_S = 3.0
"""Time of silence after which a node counts as empty for its listeners: it sends every second."""
EVENTS_ANSWER_S = 1.0
"""Time that a node may take to begin an answer to a listener's question, and between two parts of
it, before it is asked again."""

SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 4096

INDEX_WARNED_EVERY_S = 30.0
"""Pause between two warnings of one client or node that the index cannot be asked."""
INDEX_LOOKED_AFTER_EVERY_S = 10.0
"""Pause between two checks of a client whether it can ask the index, whatever it asks otherwise."""

NODE_TTL_S = 6.0
"""Time after its last heartbeat at which a dead node is gone for every client that reaches the
index, and for others after they last heard of it."""
NODE_BELIEVED_S = 1.0
"""Time for which a client uses what it heard of a node without asking the index again; part of
`NODE_TTL_S`."""
FIRST_NODE_WAIT_S = 5.0
"""Time that the first save of a client that may start a node waits for an index that does not say
whether the node there, which names its index otherwise, is one of its own."""
FIRST_QUESTION_WAIT_S = 1.0
"""The same for a client that starts no node, and so has Redis running already."""
RESTART_WITHIN_S = 600.0
"""Time for which the segment of a dead node waits for the next start. Afterwards any other process
of this user on the host frees it (segment/abandoned.py); earlier only a node of the same run
directory that needs the memory does."""
RESETS_KEPT_S = 2 * RESTART_WITHIN_S
"""Time for which the index keeps resets after the last node that knew of them: longer than a
segment waits for its next start."""
SEGMENTS_SEEN_MAX = 1024
"""Segments of this user in /dev/shm that one search covers; the others wait for the next."""

LOOKUP_LINKS_MAX = 8
"""Connections of one client to one Redis server for reading; further threads wait for one, within
their time-out."""
PUBLISH_LINKS_MAX = 2
"""The same for connections by which nodes write."""
SCRUB_KEYS_MAX = 512
"""Keys that a node compares with the index, four times a second. It takes 0.2 ms of Redis; 100,000
blocks take 50 s."""
PENDING_REMOVE_MAX = 1 << 16
"""Index removals waiting; beyond it the oldest are dropped (a stale record is a miss)."""
NAMESPACES_MAX = 256
"""Namespaces whose fields a node remembers for `explain` and `kvstore ls`."""
SHM_RESERVE_BYTES = 16 << 20
"""Bytes that a new segment leaves free in /dev/shm for everyone else."""
CGROUP_RESERVE_BYTES = 256 << 20
"""Bytes of a container's memory, besides the segment, for a node's process and Redis."""
STREAM_IDLE_TIMEOUT_S = 600.0
"""Time after which a connection over a stream without a request is closed; clients connect
again."""
STREAM_HANDSHAKE_TIMEOUT_S = 1.0
"""Time for a peer to prove that it knows the secret, from its first byte; and the same before that
byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one node or client that an operator may set."""

    clients: Count = 1024
    """Clients on its host that a node serves at the same time."""
    pins_per_client: Annotated[int, NumberRange(1, HELD_MAX)] = 4096
    """Slots that one client may have pinned."""
    retained_percent: Annotated[int, NumberRange(1, 80)] = 50
    """Share of the node's memory that may be retained, half of it for one tenant; the rest stays
    evictable."""
    stream_connections_max: Annotated[int, NumberRange(1, 1 << 16)] = 256
    """Connections of other hosts that a node serves at the same time; each has a thread."""
    redis_timeout_s: Seconds = 0.05
    """Time that a lookup may take; then it is a miss."""
    publish_timeout_s: Seconds = 0.5
    """Time that the node may wait for Redis when it publishes; its clients wait for it."""
    request_timeout_s: Seconds = 2.0
    """Time that a client waits for a node's answer."""
    stream_timeout_s: Seconds = 1.0
    """Time that a client waits for one batch from or to a node on another host, besides the time
    that its bytes take at `STREAM_SLOW_BYTES_PER_S`."""

    def __post_init__(self) -> None:
        check_settings(self, inside="limits.")
