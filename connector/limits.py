"""Limits of connectors that several modules share, by name (rule 9).

Times in seconds, sizes as named. What stands in a single module is said in kvstore/limits.py.
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
"""How long it waits however little is at stake, unless its user says less."""
RATE_WINDOW_S = 0.25
"""Time of steps after which an engine's rate is taken; of"""
RATE_WINDOWS_MAX = 64
"""such windows the best one counts."""
LOOKUP_TTL_S = 2.0
"""Age at which an answer is asked again. An older one costs a failed load, never wrong bytes."""
LOOKUP_QUEUE_MAX = 1024
"""Lookups waiting for their thread; one more is a miss at once."""
MATCH_BLOCKS_MAX = 4096
"""Store blocks of one prompt that are looked up; what is beyond is computed."""

LOAD_ATTEMPTS_MAX = 3
"""Failed loads of one request, after which all of it is computed."""
LOAD_JOBS_MAX = 1024
"""Loads waiting in one worker; one more fails at once and is computed."""
LOAD_STAGING_BYTES = 64 << 20
"""What a worker reads from other hosts at a time, before it goes into the engine's blocks."""
STEP_LOAD_BYTES = 1 << 30
"""What a step loads layer by layer, and may read from other hosts at a time; what it loads before
that comes in whole blocks."""
SAVE_JOBS_MAX = 256
"""Save jobs that a scheduler keeps in flight; beyond it blocks wait for a later step."""
SAVE_JOB_BLOCKS_MAX = 64
"""Store blocks in one save job, so that pins of a long prompt are given back piecemeal."""
RUN_TOUCHED_MAX = 2048
"""Store blocks of a prefix that a save of what follows keeps from being evicted before it."""
SAVE_BATCH_BLOCKS = 64
"""Store blocks that one reserve and one commit carry, unless they are larger than"""
SAVE_BATCH_BYTES = 64 << 20
"""this together."""
DEVICE_BATCH_BLOCKS = 64
"""Store blocks that are copied together: one launch, unless staging is full before."""
DEVICE_STAGING_BYTES = 16 << 20
"""Of a device's memory, four times for a worker: two for saves and two for loads, so that the
kernel of one runs beside the DMA of the other. A larger payload has as much as it needs."""
DEVICE_PAGES_MAX = 1 << 14
"""Engine blocks in one launch, unless a payload has more."""
DEVICE_BLOCKS_MAX = 32
"""Thread blocks that copy at a time, so that the engine has the rest of the device: enough to
outrun the bus by far."""
POOL_LOOK_EVERY_S = 1.0
"""How often a worker looks for memory of the store that is to be page-locked, or is gone."""
FORWARD_TIMEOUT_S = 600.0
"""A forward that takes longer saves nothing of what it has written layer by layer."""
PINNED_FRACTION_MAX = 0.25
"""Share of the engine's blocks that saves may keep from being reused."""

PAGE_PARTS_MAX = 1 << 12
"""Ranges of memory that one page of an engine may consist of (two a layer, at most)."""
LOCKED_KEYS_MAX = 2048
"""Blocks that an engine may keep locked; a lookup of one more does not find it."""
LOCK_TIMEOUT_S = 60.0
"""After that a lock that was not given back is over."""
TASKS_MAX = 256
"""Tasks of an engine waiting for their thread; one more fails at once."""
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
"""How many of them a user may name."""
EXPLAIN_REQUESTS_MAX = 1024
"""Requests that are remembered for `explain`, live ones and ended ones each."""
EXPLAIN_EVENTS_MAX = 16
"""Events of one request that are remembered, the last ones."""
EXPLAIN_QUEUE_MAX = 256
"""Questions and lines waiting for their thread; a further question is not asked."""
EXPLAIN_QUESTIONS_MAX, EXPLAIN_QUESTIONS_PERIOD_S = 20, 1.0
"""How many missing blocks one engine asks its nodes about in that time."""
EXPLAIN_LINES_MAX, EXPLAIN_LINES_PERIOD_S = 20, 10.0
"""How many requests that got less than possible have a log line in that time."""

STATS_SAMPLES_MAX = 1024
"""Durations of one kind that are kept until an engine asks for them, the last ones."""
EVENTS_MAX = 1 << 14
"""Block events waiting to be taken; beyond it the oldest are dropped."""
EVENTS_ANNOUNCED_MAX = 1 << 16
"""Stored blocks that are remembered so that their absence can be told, the last ones."""

BLOCK_TOKENS_MAX_DEFAULT = 256
BLOCK_BYTES_MIN_DEFAULT = 1 << 20
BLOCK_TOKENS_MAX = 1 << 16
TIMEOUT_S_MAX = 600.0

SAY_EVERY_S = 30.0
"""How often the same trouble is logged; a node that is down drops every save."""
NODE_BYTES_MIN = 16 << 20
"""Of an embedded node: below it hardly a block would stay."""

RESET_WAIT_S = 5.0
"""How long an engine's thread waits for a reset that its user asked for; then it goes on in the
background, and nothing is loaded until it is complete."""
RESET_RETRY_S = 1.0
"""Pause before a reset that was not complete is tried again."""
END_SAVES_S = 5.0
"""How long emptying an engine's cache waits for copies of saves that are running."""
FINGERPRINTS_KEPT_MAX = 1024
"""Fingerprints of weights and adapters that one process remembers."""

LOCKSTEP_TIMEOUT_S = 1800.0
"""How long one process of an engine waits for the others: as torch's own gloo groups do, since
between two prompts a process may do other things, save a checkpoint or train."""
LOCKSTEP_HEAD_BYTES = 1 << 13
"""Of a message between them that goes in one round."""
LOCKSTEP_MESSAGE_BYTES_MAX = 1 << 30

CONFIG_BYTES_MAX = 1 << 20
"""Characters of a configuration document."""
PORT_MAX = 65535
KV_RANKS_MAX = 1 << 16
"""Engines in one group of `kv_parallel_size`."""

FINISHED_PENDING_MAX = 1 << 16
"""Requests that some workers have reported as transferred and others have not (yet)."""
CONNECTORS_REGISTERED_MAX = 256
GROUP_WAIT_S = 60.0
"""How long one thread waits for another that starts or ends the process's connector."""
MULTI_CONNECTORS_MAX = 16
"""Connectors in one MultiConnector."""
COPY_BLOCKS_MAX = 1 << 20
"""Blocks in one `copy_kv_blocks`."""

TENSOR_MESSAGE_PART_BYTES = 1 << 20
"""Tensors handed over through the store are cut into values of this size: a value has to fit
into one node, and those of tests or demos are small."""
TENSOR_MESSAGE_BYTES_MAX = 2 << 30
"""What one sender may hold pinned; half the pins that a client may have are parts of this."""
TENSOR_MESSAGE_NAME_MAX = 256
PIPE_MESSAGES_MAX = 64
"""Messages sent and not yet received."""
LOOKUP_ENTRIES_MAX = 64
"""Entries inserted and not yet dropped."""
TRANSFER_TIMEOUT_S = 30.0
"""How long a pipe or a lookup buffer waits unless told otherwise."""
POLL_MIN_S = 0.0005
"""Pause before a store is asked again for what is not there yet; doubles up to"""
POLL_MAX_S = 0.01
"""this."""
VRAM_POOL_BYTES_MIN = 64 << 20
"""Of `vram_size_bytes`: a smaller pool holds too few blocks to be worth its memory."""
