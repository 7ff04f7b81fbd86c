"""Names the limits of connectors that several modules share (rule 9).

Times are in seconds, sizes in the unit of their name. What an operator sets is in
connector/settings.py; what stands in a single module is said in kvstore/limits.py.
"""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that never run backwards."""

LOOKUP_WAIT_PER_STEP_S = 0.003
"""How long one engine step may wait for lookups, all requests together."""
LOOKUP_TIMEOUT_S = 1.0
"""How long a request waits for its lookup at most, unless its user says otherwise."""
LOOKUP_TIMEOUT_MIN_S = 0.05
"""How long a request waits for its lookup however little is at stake, unless its user says less."""
RATE_WINDOW_S = 0.25
"""Time of steps after which an engine's rate is taken: one window."""
RATE_WINDOWS_MAX = 64
"""Windows of which the best one counts as an engine's rate."""
LOOKUP_TTL_S = 2.0
"""Age in seconds at which an answer is asked for again. An older one costs a failed load, never
wrong bytes."""
LOOKUP_QUEUE_MAX = 1024
"""Lookups waiting for their thread; one more is a miss at once."""
LOOKUP_AT_ONCE_KEYS = 256
"""Keys of one prompt that the engine's own thread looks for on this host, in about 2 microseconds
each; more are left to a thread."""
MATCH_BLOCKS_MAX = 4096
"""Store blocks of one prompt that are looked up; what is beyond is computed."""

HAND_OVER_WAIT_S = 2.0
"""How long a request waits at most for what a prefill engine says that it is saving."""
HAND_OVER_POLL_S = 0.005
"""How often such a request is looked up."""

LOAD_SOURCES_MAX = 64
"""Tiers and nodes whose speed a process remembers, those that were read last."""
READS_MAX = 256
"""Measured reads that a worker keeps for its next report, the last ones."""
LOAD_TIMEOUT_MIN_S = 0.5
"""Time that a load may take however quickly the engine would compute it."""
READ_TIMEOUT_MIN_S = 0.25
"""The same for each read of a load from elsewhere: TCP sends a lost packet again after 0.2 s."""
LOAD_TRY_BYTES = 2 << 20
"""What a worker reads first from a source whose speed it does not know."""
LOAD_WINDOW_S = 0.03
"""Time of one read from elsewhere, at the pace of the last one: between two a load that takes too
long ends, and loads from this host's memory come first."""
SAVE_YIELD_S = 0.05
"""How long each batch of saves waits for loads under way to end."""
LOAD_ATTEMPTS_MAX = 3
"""Failed loads of one request after which all of it is computed."""
LOAD_JOBS_MAX = 1024
"""Loads waiting in one worker; one more fails at once and is computed."""
LOAD_STAGING_BYTES = 64 << 20
"""What a worker reads from other hosts at a time, before it goes into the engine's blocks."""
STEP_LOAD_BYTES = 1 << 30
"""Bytes that a step loads layer by layer; the rest comes in whole blocks before that. Where some
blocks are on other hosts, the limit is `LOAD_STAGING_BYTES`."""
SAVE_JOBS_MAX = 256
"""Save jobs that a scheduler keeps in flight; beyond it blocks wait for a later step."""
SAVE_JOB_BLOCKS_MAX = 64
"""Store blocks in one save job, so that pins of a long prompt are given back piecemeal."""
WINDOWS_OF_ATTENTION_MAX = 8
"""Bytes of a block's windows, in those of its attention, up to which windows are saved everywhere
although the engine keeps only those at ends. DeepSeek-V4's are 83 times as many."""
RUN_TOUCHED_MAX = 2048
"""Store blocks of a prefix that a save of what follows keeps from being evicted before it."""
SHARED_ENDS_MAX = 1 << 14
"""Ends of prefixes that an engine remembers, behind which more than one prompt may go on."""
SAVE_BATCH_BLOCKS = 64
"""Store blocks that one reserve and one commit carry."""
SAVE_BATCH_BYTES = 64 << 20
"""Payload that one reserve and one commit carry; one larger block travels alone."""
DEVICE_BATCH_BLOCKS = 64
"""Store blocks that are copied together: one launch for each staging buffer that they fill."""
DEVICE_STAGING_BYTES = 8 << 20
"""Size of one staging buffer in a device's memory. A larger payload goes through it some layers at
a time. Buffers are larger where a single layer is, and larger by one payload where whole payloads
would leave more than an eighth of them empty."""
DEVICE_STAGING_BUFFERS = 4
"""Staging buffers for saves, and as many for loads: while the kernel fills or empties one, those
before it are on the bus."""
DEVICE_DIRECT_BYTES_MIN = 1 << 20
"""The smallest store block that is copied by DMA alone, without kernel and staging, if it is
contiguous in the engine's memory, as all layers of one engine block may be."""
DEVICE_PIECE_BYTES_MIN = 64 << 10
"""The smallest engine block of one layer that is copied by a DMA of its own where payloads are in
the order of tokens: the bus moves this much while the next DMA is begun."""
DEVICE_PAGES_MAX = 1 << 14
"""Engine blocks in one launch, unless a payload has more."""
DEVICE_BLOCKS_MAX = 32
"""Thread blocks that copy at a time: enough to outrun the bus by far, and few enough to leave the
device to the engine."""
COPY_STUCK_S = 10.0
"""Time after which a copy between engine and store is logged and counted as stuck. It cannot be
cancelled."""
POOL_LOOK_EVERY_S = 1.0
"""Seconds between two searches of a worker for memory of the store that is to be page-locked, or
was unmapped."""
PAGE_LOCK_BYTES_MAX = 64 << 30
"""Bytes of the node's memory that one worker page-locks, in the order of use; each GiB takes about
2 MiB of the device's memory."""
PAGE_LOCK_RETRY_S = 5.0
"""Pause before a part that could not be page-locked is tried again; it doubles each time."""
PAGE_LOCK_RETRY_MAX_S = 600.0
"""The longest of these pauses."""
FORWARD_TIMEOUT_S = 600.0
"""Time after which a forward saves nothing of what it has written layer by layer."""
PINNED_FRACTION_MAX = 0.25
"""Share of the engine's blocks that saves may keep from being reused."""

PAGE_PARTS_MAX = 1 << 12
"""Ranges of memory that one page of an engine may consist of (two a layer, at most)."""
LOCKED_KEYS_MAX = 2048
"""Blocks that an engine may keep locked; a lookup of one more does not find it."""
LOCK_TIMEOUT_S = 60.0
"""Time after which a lock that was not given back ends."""
TASKS_MAX = 256
"""Tasks of an engine waiting for their thread; one more fails at once."""
DRAIN_TIMEOUT_S = 60.0
"""How long an engine that empties its memory waits for the job that runs, which has deadlines of
its own: several calls of the store."""
TASK_THREADS = 4
"""Threads that copy an engine's chunks at the same time."""
INVENTORY_KEYS_MAX = 1 << 16
"""Chunks that one LMCache server remembers to have stored; beyond it the oldest are not counted,
listed or deleted any more."""
INVENTORY_CHECK_KEYS = 256
"""Chunks among them that are looked up each second; those that the nodes have evicted are not
counted any more."""
LIST_PAGE_KEYS_MAX = 1024
"""Chunks on one page of a listing, however many were asked for."""
RESULTS_MAX = 4096
"""Results that an engine has not asked for; beyond it the oldest are dropped."""

IDLE_WAIT_S = 0.002
"""How long an engine step without a forward waits for a transfer to end."""
SHUTDOWN_TIMEOUT_S = 5.0
"""How long closing waits for a transfer thread."""
STORE_RETRY_S = 1.0
"""Pause before a store that could not be opened is tried again."""

TP_SIZES_DEFAULT = (1, 2, 4, 8)
"""Tensor-parallel sizes of writers whose blocks are looked for; each costs a key per block."""
TP_SIZES_MAX = 8
"""Tensor-parallel sizes that a user may name."""
EXPLAIN_REQUESTS_MAX = 1024
"""Requests that are remembered for `explain`, live ones and ended ones each."""
EXPLAIN_EVENTS_MAX = 16
"""Events of one request that are remembered, the last ones."""
EXPLAIN_NAMED_MAX = 16
"""Requests of one id that are explained: a client's may have several prompts or answers."""
EXPLAIN_QUEUE_MAX = 256
"""Questions and lines waiting for their thread; a further question is not asked."""
EXPLAIN_QUESTIONS_MAX = 20
"""Missing blocks that one engine asks its nodes about in `EXPLAIN_QUESTIONS_PERIOD_S`."""
EXPLAIN_QUESTIONS_PERIOD_S = 1.0
"""The time to which `EXPLAIN_QUESTIONS_MAX` applies."""
EXPLAIN_LINES_MAX = 20
"""Requests that got less than possible and have a log line, in `EXPLAIN_LINES_PERIOD_S`."""
EXPLAIN_LINES_PERIOD_S = 10.0
"""The time to which `EXPLAIN_LINES_MAX` applies."""

PREFETCH_QUEUE_MAX = 64
"""Wishes to prefetch that wait for their thread; a further one is not carried out."""
PREFETCH_BATCH_BLOCKS = 8
"""Blocks that are brought from other hosts at a time, and are in memory twice meanwhile."""
PREFETCH_TIMEOUT_S = 10.0
"""How long one such batch may take; then the rest of that prompt stays where it is."""
RETAIN_QUEUE_MAX = 1024
"""Wishes to retain blocks that wait for their thread; a further one is not carried out."""
STATS_SAMPLES_MAX = 1024
"""Durations of one kind that are kept until an engine asks for them, the last ones."""
EVENTS_MAX = 1 << 14
"""Block events waiting to be taken; beyond it the oldest are dropped."""
EVENTS_ANNOUNCED_MAX = 1 << 16
"""Stored blocks, the last ones, that are remembered so that their removal can be announced."""

BLOCK_TOKENS_MAX_DEFAULT = 64
BLOCK_BYTES_MIN_DEFAULT = 1 << 20
"""The default block grows to this many bytes per shard, up to `BLOCK_TOKENS_MAX_DEFAULT` tokens."""
BLOCK_TOKENS_MAX = 1 << 16
TTL_S_MAX = 30 * 24 * 3600
"""The longest bound on the life of blocks (`ttl_s`), as in the store."""
RETAINED_S_MAX = 30 * 24 * 3600
TENANT_BYTES_MAX = 256
"""Bytes of a tenant's name, as in the store (`BlockStore.retain`)."""
TIMEOUT_S_MAX = 600.0

SAY_EVERY_S = 30.0
"""Pause between two log lines about the same trouble; a node that is down drops every save."""
NODE_BYTES_MIN = 16 << 20
"""The smallest embedded node: in a smaller one hardly a block would stay."""

RESET_WAIT_S = 5.0
"""How long an engine's thread waits for a reset that its user asked for; then it goes on in the
background, and nothing is loaded until it is complete."""
RESET_RETRY_S = 1.0
"""Pause before a reset that was not complete is tried again."""
END_SAVES_S = 5.0
"""How long emptying an engine's cache waits for copies of saves, and again of loads."""
FINGERPRINTS_KEPT_MAX = 1024
"""Fingerprints of weights and adapters that one process remembers."""

LOCKSTEP_TIMEOUT_S = 1800.0
"""Time that one process of an engine waits for the others. It is that of torch's own gloo groups,
because a process may save a checkpoint or train between two prompts."""
LOCKSTEP_HEAD_BYTES = 1 << 13
"""Bytes of a message between them that are sent in one round."""
LOCKSTEP_MESSAGE_BYTES_MAX = 1 << 30

CONFIG_BYTES_MAX = 1 << 20
"""Characters of a configuration document."""
PORT_MAX = 65535
KV_RANKS_MAX = 1 << 16
"""Engines in one group of `kv_parallel_size`."""

FINISHED_PENDING_MAX = 1 << 16
"""Requests that some workers have reported as transferred and others have not."""
CONNECTORS_REGISTERED_MAX = 256
"""Names of connectors that one process knows."""
GROUP_WAIT_S = 60.0
"""How long one thread waits for another that starts or ends the process's connector."""
MULTI_CONNECTORS_MAX = 16
"""Connectors in one MultiConnector."""
COPY_BLOCKS_MAX = 1 << 20
"""Blocks in one `copy_kv_blocks`."""

TENSOR_MESSAGE_PART_BYTES = 1 << 30
"""Size of the parts into which a tensor handed over through the store is cut: the store's own
limit."""
TENSOR_MESSAGE_PART_BYTES_MIN = 1 << 20
"""Size down to which a part is halved that a node has no room for: nodes of tests or demos are
small, and a large hole is rare in a nearly full node."""
TENSOR_MESSAGE_BYTES_MAX = 2 << 30
"""What one sender may hold pinned; half the pins that a client may have are parts of this, of the
smallest size."""
TENSOR_MESSAGE_NAME_MAX = 256
PIPE_MESSAGES_MAX = 64
"""Messages sent and not yet received."""
LOOKUP_ENTRIES_MAX = 64
"""Entries inserted and not yet dropped."""
LOOKUP_PRODUCERS_MAX = 16
"""Producers of one lookup buffer; a consumer asks the store once for each at every look."""
TRANSFER_TIMEOUT_S = 30.0
"""How long a pipe or a lookup buffer waits unless told otherwise."""
POLL_MIN_S = 0.0005
"""Pause before a store is asked again for what is not there yet; it doubles each time."""
POLL_MAX_S = 0.01
"""The longest of these pauses."""
ROUTER_IN_FLIGHT_MAX = 4096
"""Requests that a router has in flight; a further one is told to come back. They are also at most
three in eight of the files that the router may open, because each takes two."""
ROUTER_BODY_BYTES_MAX = 16 << 20
"""Bytes of one request's body."""
ROUTER_LISTS_MAX = 1 << 18
"""Lists and objects in a body, counted by their brackets before it is parsed."""
ROUTER_VALUES_MAX = 1 << 20
"""Values in a body, counted by their commas: the tokens of the longest prompts."""
ROUTER_HEADERS_BYTES_MAX = 64 << 10
"""One line of a request's head, and one of an engine's answer."""
ROUTER_HEAD_TIMEOUT_S = 10.0
"""How long the head of a connection's first request may take to come."""
ROUTER_IDLE_TIMEOUT_S = 75.0
"""How long a connection stays open after an answer, until the head of its next request is there."""
ROUTER_IDLE_CLIENTS_MAX = 8192
"""Connections without a request; for a new one the oldest of the address with most of them is
closed. With two for each request in flight they are also at most half of the files that the router
may open, or a sixteenth beside requests that take those."""
ROUTER_BODY_TIMEOUT_S = 30.0
"""Time that a body may take to arrive, within the request's time."""
ROUTER_STOP_S = 10.0
"""Time for which a router that is told to end continues its requests; then it cuts them off.
Containers are killed after this time."""
ROUTER_ANSWER_BYTES_MAX = 64 << 20
"""Bytes of one answer of an engine that is not streamed."""
ROUTER_BLOCKS_ASKED_MAX = 1 << 14
"""Blocks that another router may ask for at a time."""
ROUTER_TOKENIZE_TIMEOUT_S = 2.0
"""Time that a router waits for an engine to tokenize a prompt; then it routes without the
tokens."""
ROUTER_LOAD_GAP_MAX = 8
"""An engine with this many more requests in flight than the least loaded gets none for its
cache."""
VRAM_POOL_BYTES_MIN = 64 << 20
"""The smallest `vram_size_bytes`: a smaller pool holds too few blocks to be worth its memory."""
