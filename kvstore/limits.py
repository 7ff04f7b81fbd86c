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
"""One value; and never more than its node has."""
EMBEDDED_NODE_BYTES_MIN = 8 << 20
"""What an embedded node that does not fit into /dev/shm is made smaller to, at least."""
SLOT_BYTES_MIN = 4 << 10
"""A page of a segment: smaller values take one too. Every page needs room for a 64-byte header
(1.6%), whatever lies in it."""
MOVED_BYTES_MAX = 64 << 20
"""Bytes of retained blocks that a node moves out of the way for one request, or for each value up
to its own size: its other clients wait for about 50 ms. A block counts 128 KiB more than it has;
what would need more finds no room."""
LOCK_PART_BYTES = 64 << 20
"""What of a segment a process page-locks, or maps, in one call."""
SLOTS_PER_SEGMENT_MAX = (1 << 32) - 1
"""Slots, and how many there are, are 32 bits in records and headers."""

MESSAGE_BYTES_MAX = 8 << 20
"""One control message, both ways."""
BATCH_KEYS_MAX = 4096
"""Keys in one control message or one index call; clients split longer ones."""
LIST_ROWS_MAX = 256
"""Blocks in one page of a listing: a node that answers it can do nothing else meanwhile."""
HELD_MAX = 1 << 16
"""Reservations, and pinned slots, that a client can say it holds when it connects; what a node
lets one client hold (`Limits`) is less."""
REDIS_ARGS_MAX = 1024
"""Arguments in one Redis command; a longer call is several commands in one pipeline."""
USER_KEY_BYTES_MAX = 4096
PATIENT_TIMEOUT_S = 1.0
"""For an answer of the index where nobody computes meanwhile: at the first contact, which opens a
connection, and to people who ask how it is."""
TENSOR_DIMS_MAX = 16
BLOCK_TOKENS_MAX = 1 << 20
"""Tokens in one block of a client."""
PROMPT_TOKENS_MAX = 1 << 24
"""Tokens in one call: more than any model takes, and less than fills memory."""
SEGMENT_BYTES_MAX = SLOTS_PER_SEGMENT_MAX * SLOT_BYTES_MIN
"""Of one node, a page less than 16 TiB: more is a mistyped size."""
REPLACE_TRIES = 3
"""How often a put that replaces tries again when others put another value meanwhile."""
META_BYTES_MAX = 255
NAMESPACE_BYTES_MAX = 4096
"""Fields of one namespace as JSON, as a client tells a node of them."""
NAMESPACE_FIELDS_MAX = 64
NAME_BYTES_MAX = 256
"""Of what a user calls a value, as a client tells a node of it; longer names are not told."""
NAMES_WAITING_MAX = 4096
"""Names that a client has yet to tell; further ones are not told."""
NAMES_MESSAGE_BYTES_MAX = 32 << 10
"""Of keys and names in one message: a socket must take it at once."""
CHECKED_BYTES_PER_S_MAX = 1 << 30
"""What a node reads again because clients say that it is wrong: a tenth of its time."""

STREAM_BLOCKS_MAX = BATCH_KEYS_MAX
"""Blocks in one request over a stream; clients split longer ones."""
STREAM_BATCH_BYTES_MAX = 64 << 20
"""Payload in one request over a stream, so that its deadline means something; one larger block
travels alone."""
CLAIMED_BYTES_MAX = 16 << 20
"""What a call makes room for on the word of records in the index; beyond it the nodes are asked
first whether blocks are as long as that."""
STREAM_SLOW_BYTES_PER_S = 50 << 20
"""A stream slower than this counts as stuck: what a batch's deadline is lengthened by."""
STREAM_FRAME_BYTES_MAX = 1 << 20
"""A request over a stream without its payload."""
STREAM_CONNECTIONS_PER_NODE = 4
"""Connections that one client keeps to one node: requests at the same time."""
STREAM_CONNECTIONS_PER_READ = 3
"""Connections to one node that the blocks of one call come by, where this process has two cores
for each and other calls leave them."""
STREAM_SHARE_BYTES = 8 << 20
"""What is worth a connection more."""
STREAM_NODES_AT_ONCE = 64
"""Nodes (and shares of one) that one client reads from, and those that it tries again, at the same
time: each has a thread, which a silent node keeps for a whole deadline."""
STREAM_UNPROVEN_MAX = 64
"""Connections that have not proved to know the secret yet, besides `Limits.stream_connections_max`;
for a new one the oldest of the address with most of them is closed."""
STREAM_RESERVED_SHARE = 4
"""One client host may have reserved one in so many bytes of a node by saves under way; whoever
wants more waits for its own."""
TOLD_MAX = 1024
"""Hints of clients on other hosts that wait for a node's event loop; one more is passed over."""
CUDA_IPC_NODES_MAX = 64
"""Nodes whose VRAM one client has open; the one not used for longest goes for the next."""
CUDA_IPC_OPEN_S = 1.0
"""How long a node may take to hand its VRAM over; it is a thread beside an engine's."""
CUDA_IPC_WINDOW_BYTES = 256 << 20
"""Payload queued on the stream as one, with one event; two such windows are under way."""
CUDA_IPC_DRAIN_S = 10.0
"""How long copies that were queued before a deadline may take beyond it: a device that is
slower than this hangs, and what they write to can neither be used nor given back."""
CUDA_BATCH_COPIES_MAX = 1024
"""Copies that one call of the CUDA driver queues (cuMemcpyBatchAsync)."""
DEMOTE_BLOCKS_MAX = 64
"""Blocks that leave VRAM for host memory at a time."""
DEMOTE_BYTES_MAX = 64 << 20
"""Payload that leaves VRAM at a time; one larger block travels alone."""
NAMES_LOOKED_UP_MAX = 8
"""Host names that one process looks up at the same time: each has a thread that cannot be called
off, and one more fails at once."""
NAMES_KEPT_MAX = 1024
"""Host names whose addresses one process remembers."""

NIXL_REQUEST_BYTES_MAX = 16 << 20
"""Payload in one READ request, so that its deadline means something; larger batches are several."""
NIXL_PIECES_MAX = 4096
"""Pieces in one READ request, the headers before and after each among them."""
NIXL_REQUESTS_MAX = 4
"""READ requests of one client at the same time: so many such parts has the arena they go into."""
NIXL_QUARANTINED_MAX = 2
"""Arenas that late bytes may still come into. With so many, nothing is read through NIXL."""
NIXL_PEERS_MAX = 256
"""Nodes whose NIXL endpoints one client knows."""
NIXL_OWNER_RETRY_AFTER_MAX_S = 60.0
"""Between two starts of a node's NIXL process when it dies again and again."""

WEIGHTS_TIMEOUT_S = 60.0
"""How long the fingerprint of a model's weights may take; cold, over a slow network, it is reads
that wait."""
WEIGHTS_THREADS = 8
"""Files of weights that are read at the same time."""
WEIGHT_FILES_MAX = 4096
"""Files of one model's weights; more are no model."""
WEIGHT_WHOLE_BYTES_MAX = 8 << 20
"""Files of weights up to this size are read whole: adapters, indexes, code."""
WEIGHT_HEADER_BYTES_MAX = 100 << 20
"""What safetensors itself allows a header."""
WEIGHT_SAMPLE_BYTES = 4096
WEIGHT_SAMPLES_MAX = 16384
"""Samples of all files of one model together: 64 MiB."""
WEIGHT_SAMPLES_MIN = 16
"""Of each file, however many there are."""

RETAINED_S_MAX = 30 * 24 * 3600
"""How long a block may be retained at a time; who wants it longer asks again."""
TENANT_BYTES_MAX = 256
"""Of a tenant's name, as UTF-8."""
TTL_S_MAX = 30 * 24 * 3600
"""The longest bound on the life of a namespace's blocks; without one it has none."""
EXPIRED_AT_ONCE_BYTES = 16 << 20
"""What a node wipes of blocks whose life is over before it serves the next request: 5 ms."""
RESET_NAMESPACES_MAX = 64
"""Namespaces that one reset names; clients split longer ones."""
RESETS_IDS_MAX = 1024
"""Namespaces of all resets that a node remembers together: 5.5 KB of its announcement."""
RESET_TIMEOUT_S = 5.0
"""How long a reset waits for all nodes to confirm it: they hear of it with a heartbeat."""
RESET_LISTENS_S = 2.0
"""How long the index must have answered before a reset believes that it has seen all nodes: one
that was emptied a moment ago hears of them with their next heartbeat."""
RESETS_SETTLE_S = 3.0
"""How long a node that starts with the blocks of a former start waits for the others to say
again which resets it missed, when the index may have lost what they had said."""

EVENT_KEYS_MAX = 4096
"""Blocks in one event that a node publishes; more are several."""
EVENT_MESSAGE_BYTES_MAX = 1 << 20
"""One message of such events."""
EVENT_BACKLOG_MAX = 1 << 18
"""Blocks, and messages, that wait until they are published; what comes beyond it is not, which
routers see as a gap in the sequence. As many that were published are kept for who missed them."""
EVENT_MESSAGES_WAITING_MAX = 1024
"""Messages that wait for one router that is slower than its node; it misses further ones, and
sees that too."""
EVENT_CONNECTIONS_MAX = 512
"""Connections to a node's events, in both of its sockets; for a new one the oldest of the address
with most of them is closed. Nor are they more than an eighth of the files that the node may open:
whoever listens shows no secret."""
EVENT_REPLAYS_MAX = 256
"""Questions of routers that wait for an answer: for a snapshot of a node's blocks, or until there
is room for it. Who asks for more is not answered, and asks again."""
EVENT_ANSWER_BYTES_MAX = 64 << 20
"""Of answers that routers have asked a node for and not taken yet, all together; one may be larger
when there is no other. Questions that are asked meanwhile wait."""
EVENT_ANSWERS_MAX = 2
"""Such answers of one router, and as many of its questions that wait."""
EVENT_ANSWER_TAKEN_S = 10.0
"""A router that has not taken its answer for so long while others wait for room is hung up on, and
over TCP so is one that takes nothing of it for so long, whoever waits."""
EVENT_SOURCES_MAX = 1024
"""Nodes whose events one process listens to."""
EVENT_BLOCKS_MAX = 1 << 24
"""Blocks of one node that a listener remembers."""
EVENTS_SILENT_S = 3.0
"""A node whose events are not heard for so long holds nothing for its listeners: it speaks every
second."""
EVENTS_ANSWER_S = 1.0
"""How long a node may take to begin an answer to what a listener missed, and between two parts of
it, before it is asked again."""

SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 4096

INDEX_WARNED_EVERY_S = 30.0
"""Between two warnings of one client or node that the index cannot be asked."""
INDEX_LOOKED_AFTER_EVERY_S = 10.0
"""How often a client looks whether it can ask the index, whatever it asks otherwise."""

NODE_TTL_S = 6.0
"""A node that died is gone for every client that reaches the index this long after its last
heartbeat, and after the client last heard of it where the index cannot be reached."""
NODE_BELIEVED_S = 1.0
"""How long a client uses what it heard of a node without asking the index again; part of
`NODE_TTL_S`."""
FIRST_NODE_WAIT_S = 5.0
"""How long the first save of a client that may start a node waits for an index that does not
say whether the node there, which names its index otherwise, is one of its own."""
FIRST_QUESTION_WAIT_S = 1.0
"""How long the first save of a client that starts no node, and so has Redis running already,
waits for that index."""
RESTART_WITHIN_S = 600.0
"""How long after a node died its segment waits for the next start: then whatever else of this
user lives on the host frees it (segment/abandoned.py), and before that a node of the same run
directory that needs the memory."""
RESETS_KEPT_S = 2 * RESTART_WITHIN_S
"""How long the index keeps resets after the last node that knew of them: longer than a segment
waits for its next start."""
SEGMENTS_SEEN_MAX = 1024
"""Segments of this user in /dev/shm that one look takes in; the others wait for the next."""

LOOKUP_LINKS_MAX = 8
"""Connections of one client to one Redis server for reading; further threads wait for one, within
their time-out."""
PUBLISH_LINKS_MAX = 2
"""The same for what nodes write."""
SCRUB_KEYS_MAX = 512
"""Keys that a node compares with the index, four times a second. A look at as many takes 0.2 ms of
Redis; 100,000 blocks are gone through in 50 s."""
PENDING_REMOVE_MAX = 1 << 16
"""Index removals waiting; beyond it the oldest are dropped (a stale record is a miss)."""
NAMESPACES_MAX = 256
"""Namespaces whose fields a node remembers for `explain` and `kvstore ls`."""
SHM_RESERVE_BYTES = 16 << 20
"""What a new segment leaves free in /dev/shm for everyone else."""
CGROUP_RESERVE_BYTES = 256 << 20
"""What a node's process, and Redis beside it, need besides the segment of a container's memory."""
STREAM_IDLE_TIMEOUT_S = 600.0
"""A connection over a stream without a request for so long is closed; clients connect again."""
STREAM_HANDSHAKE_TIMEOUT_S = 1.0
"""For a peer to show that it knows the secret: from its first byte, and before that for it to
come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one node or client that an operator may set."""

    inline_bytes: Annotated[int, NumberRange(1, MESSAGE_BYTES_MAX // 2)] = 32 << 10
    """A value up to this size travels in the reserve request itself, and one that is put alone up
    to twice this size."""
    clients: Count = 1024
    """Clients on its host that a node serves at the same time."""
    reservations_per_client: Annotated[int, NumberRange(1, HELD_MAX)] = 8192
    """Slots that one client may have reserved and not committed."""
    pins_per_client: Annotated[int, NumberRange(1, HELD_MAX)] = 4096
    """Slots that one client may keep from being reused."""
    retained_percent: Annotated[int, NumberRange(1, 80)] = 50
    """Of the node's memory at most so much is retained; the rest is for whatever comes."""
    retained_tenant_percent: Annotated[int, NumberRange(1, 80)] = 25
    """The same for one tenant."""
    stream_connections_max: Annotated[int, NumberRange(1, 1 << 16)] = 256
    """Connections of other hosts that a node serves at the same time; each has a thread."""
    redis_timeout_s: Seconds = 0.05
    """How long a lookup may take; then it is a miss."""
    publish_timeout_s: Seconds = 0.5
    """How long the node may wait for Redis when it publishes; its clients wait for it."""
    request_timeout_s: Seconds = 2.0
    """How long a client waits for a node's answer."""
    stream_timeout_s: Seconds = 1.0
    """How long a client waits for one batch from or to a node on another host, besides
    the time that its bytes take at `STREAM_SLOW_BYTES_PER_S`."""

    def __post_init__(self) -> None:
        check_settings(self, inside="limits.")
