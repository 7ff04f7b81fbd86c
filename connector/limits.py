"""Limits of the transfer package, by name (rule 9). Times in seconds, sizes as named."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that never run backwards."""

LOOKUP_WAIT_PER_STEP_S = 0.003
"""How long one engine step may wait for lookups, all requests together."""
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
SAVE_JOBS_MAX = 256
"""Save jobs that a scheduler keeps in flight; beyond it blocks wait for a later step."""
SAVE_JOB_BLOCKS_MAX = 64
"""Store blocks in one save job, so that pins of a long prompt are given back piecemeal."""
SAVE_BATCH_BLOCKS = 64
"""Store blocks that one reserve and one commit carry, unless they are larger than"""
SAVE_BATCH_BYTES = 64 << 20
"""this together."""
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

BLOCK_TOKENS_MAX_DEFAULT = 256
BLOCK_BYTES_MIN_DEFAULT = 1 << 20
BLOCK_TOKENS_MAX = 1 << 16
TIMEOUT_S_MAX = 600.0

SAY_EVERY_S = 30.0
"""How often the same trouble is logged; a node that is down drops every save."""
NODE_BYTES_MIN = 16 << 20
"""Of an embedded node: below it hardly a block would stay."""
