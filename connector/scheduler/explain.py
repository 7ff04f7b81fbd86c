"""Explains why requests did not hit: a history of each, a log line, a counter per reason.

The scheduling thread only notes things down. What must be asked (the store may
know that a block was evicted) and what is written to the log is done by a thread
of its own, with a bounded queue and so many questions and lines in a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from connector import metrics
from connector.limits import (
    EXPLAIN_EVENTS_MAX,
    EXPLAIN_LINES_MAX,
    EXPLAIN_LINES_PERIOD_S,
    EXPLAIN_NAMED_MAX,
    EXPLAIN_QUESTIONS_MAX,
    EXPLAIN_QUESTIONS_PERIOD_S,
    EXPLAIN_QUEUE_MAX,
    EXPLAIN_REQUESTS_MAX,
    MATCH_BLOCKS_MAX,
    SHUTDOWN_TIMEOUT_S,
    Clock,
)
from connector.messages import EngineRequest, trace_id
from connector.metrics import Counts
from connector.rate import Rate
from connector.scheduler.node_report import NodeReport
from connector.work_thread import WorkThread
from kvstore import Explanation, MissReason, Namespace
from kvstore.spi import Key, Missing, MissQuery

if TYPE_CHECKING:
    from connector.layout.geometry import StoreLayout
    from connector.scheduler.lazy_store import LazyStore
from connector.scheduler.lookup import Lookup

log = logging.getLogger(f"kvstore.{__name__}")

_ASKED = (MissReason.ABSENT, *(reason for reason in MissReason if reason.unreadable))
"""Reasons of a lookup that the store can say more about."""
_WORDS = {
    MissReason.ABSENT: "the index does not have it",
    **dict.fromkeys(_ASKED, "it cannot be read from here"),
    MissReason.DEADLINE: "the lookup was not answered in time",
    MissReason.BREAKER_OPEN: "the index failed lately and is not asked",
    MissReason.INDEX_ERROR: "the index could not be asked",
    MissReason.NO_STORE: "the store could not be opened",
    MissReason.TOO_BUSY: "too many lookups were waiting",
    MissReason.TOO_SHORT: "the prompt does not fill one block",
    MissReason.LOAD_FAILED: "it was found, and could not be loaded",
    MissReason.SKIPPED: "the request's own kv_transfer_params say so",
    MissReason.SLOWER: "it was found, and computing it is quicker than loading it",
    MissReason.NOT_TAKEN: "it was offered, and not taken: no room, or another connector won",
}


_LOOKED_UP = "lookup: %d tokens found, %d in the engine, %d offered"


@dataclass(slots=True, eq=False)
class _Trace:
    """Holds what is known of one request. The scheduling thread writes it until the request ends;
    only `failed` may be replaced by a better word of the same on our own thread."""

    request_id: str
    possible_tokens: int
    salted: bool
    trace_id: str = ""
    events: deque[tuple[str, tuple[object, ...]]] = field(
        default_factory=lambda: deque(maxlen=EXPLAIN_EVENTS_MAX)
    )
    """Texts with placeholders, and their values; they are put together when somebody asks."""
    local_tokens: int | None = None
    """Tokens in the engine's own cache when the request was first answered."""
    offered_tokens: int = 0
    loading: tuple[int, int] | None = None
    """(first token, tokens) of a load in flight."""
    hit_tokens: int = 0
    lookup: Lookup | None = None
    limited: MissReason | None = None
    """Why less was offered than was found, if that is so."""
    refused: MissReason | None = None
    """Why nothing was offered; None once something was answered."""
    failed: Missing | None = None
    """The first block that could not be loaded."""

    def note(self, words: str, *values: object) -> None:
        event = (words, values)
        if not self.events or self.events[-1] != event:
            self.events.append(event)


class RequestHistory:
    """Remembers what became of the last `EXPLAIN_REQUESTS_MAX` requests. `explain` is for any
    thread."""

    def __init__(
        self,
        store: LazyStore,
        layout: StoreLayout,
        clock: Clock = time.monotonic,
        counts: Counts | None = None,
    ):
        """Count in `counts`, if given."""
        self._counts = counts or Counts()
        self._store = store
        self._layout = layout
        self._clock = clock
        self._lock = threading.Lock()
        """Held for microseconds: questions and log lines are outside it."""
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._explanations: OrderedDict[str, Explanation] = OrderedDict()
        """Explanations of requests that have ended."""
        self._questions = Rate(EXPLAIN_QUESTIONS_MAX, EXPLAIN_QUESTIONS_PERIOD_S)
        self._lines = Rate(EXPLAIN_LINES_MAX, EXPLAIN_LINES_PERIOD_S)
        self._lines_left_out = 0
        self.say: Callable[[str], None] = log.info
        """Writes the line of a request."""
        self.reasons: dict[str, int] = {}
        """Requests that got less than was possible, by reason."""
        self.totals = dict.fromkeys(
            ("requests", "possible_tokens", "hit_tokens", "local_tokens", "not_asked"), 0
        )
        self._report = NodeReport(store, self._counts)
        self._ending: dict[str, _Trace] = {}
        """Traces of requests that have ended, until our own thread has logged them."""
        self._thread: WorkThread[Callable[[], None]] = WorkThread(
            "kvstore-explain", lambda work: work(), EXPLAIN_QUEUE_MAX
        )
        self._thread.start()

    # Noted by the scheduling thread

    def refused(self, request: EngineRequest, reason: MissReason) -> None:
        """Note that nothing was offered, and why."""
        trace = self._trace(request)
        trace.refused = reason
        trace.note("nothing offered: %s", reason)

    def barred(self, request: EngineRequest, failed_loads: int) -> None:
        """Note that nothing is offered any more, after too many failed loads."""
        self._trace(request).note("nothing offered: %d loads failed", failed_loads)

    def answered(
        self,
        request: EngineRequest,
        lookup: Lookup,
        run: int,
        local_tokens: int,
        tokens: int,
        *,
        limited: MissReason | None = None,
    ) -> None:
        """Note that a lookup led to an offer of `tokens`; `run` blocks were found and not barred.
        `limited`: why no more of them were offered."""
        trace = self._trace(request)
        trace.lookup, trace.refused, trace.limited = lookup, None, limited
        trace.offered_tokens = tokens
        if trace.local_tokens is None:  # not again while it waits for room, or after a preemption
            trace.local_tokens = min(local_tokens, trace.possible_tokens)
            blocks = len(lookup.keys[0][0]) if lookup.keys else 0
            self._counts.add(metrics.LOOKUP_BLOCKS, blocks)
            self._counts.add(metrics.FOUND_BLOCKS, lookup.run)
        if run < lookup.run:
            trace.note("lookup: %d blocks barred after a failed load", lookup.run - run)
        found_tokens = run * self._layout.block_tokens
        trace.note(_LOOKED_UP, found_tokens, local_tokens, tokens)

    def allocated(self, request_id: str, first_token: int, tokens: int) -> None:
        """Note for how many of the tokens that were offered the engine made room."""
        trace = self._traces.get(request_id)
        if trace is not None:
            trace.note("engine took %d of %d", tokens, trace.offered_tokens)
            trace.loading = (first_token, tokens) if tokens else None

    def load_failed(self, request_id: str, block: int, keys: tuple[Key, ...]) -> None:
        """Note that store block `block` could not be loaded; what lies before it was."""
        trace = self._traces.get(request_id)
        if trace is None or trace.loading is None:
            return
        first_token, _ = trace.loading
        trace.loading = None
        trace.hit_tokens += max(0, block * self._layout.block_tokens - first_token)
        trace.note("load failed at block %d", block)
        failed = _missing(block, MissReason.LOAD_FAILED)
        if trace.failed is None:
            trace.failed = failed
            self._post(partial(self._ask_failed, trace, trace.lookup, block, keys))

    def load_ended(self, request_id: str) -> None:
        trace = self._traces.get(request_id)
        if trace is not None and trace.loading is not None:
            trace.hit_tokens += trace.loading[1]
            trace.note("loaded %d tokens", trace.loading[1])
            trace.loading = None

    def noted(self, request_id: str, words: str) -> None:
        """Note what else became of a request, on any thread; one that is over is passed over."""
        trace = self._traces.get(request_id)
        if trace is not None:
            trace.note("%s", words)

    def finished(self, request_id: str) -> None:
        """Count a request that is over, and have its line written."""
        trace = self._traces.pop(request_id, None)
        if trace is None:
            return
        self._ending[request_id] = trace
        if not self._post(partial(self._tell, trace)):
            self._tell(trace, quietly=True)

    # Asked by people

    def explain(self, request_id: str) -> Explanation | None:
        """Return what became of a request so far; None when it is not known (any more)."""
        trace = self._traces.get(request_id) or self._ending.get(request_id)
        return self._explanations.get(request_id) if trace is None else self._explanation(trace)

    def explain_named(self, api_id: str) -> list[Explanation]:
        """Return what became of the requests that a client knows as `api_id`, the last
        `EXPLAIN_NAMED_MAX`: engines put a prefix before it and numbers behind it."""
        with self._lock:
            ended = list(self._explanations)
        # Copied at once: the scheduling thread goes on meanwhile.
        known = dict.fromkeys([*ended, *self._ending.copy(), *self._traces.copy()])
        named = [name for name in known if f"-{api_id}-" in f"-{name}-"]
        found = [self.explain(name) for name in named[-EXPLAIN_NAMED_MAX:]]
        return [one for one in found if one is not None]

    def explain_refused(
        self, request: EngineRequest, local_tokens: int, why: MissReason | str
    ) -> Explanation:
        """Explain a request that would not be looked up, and that nobody has made."""
        trace = self._new_trace(request)
        trace.local_tokens = min(local_tokens, trace.possible_tokens)
        block = trace.local_tokens // self._layout.block_tokens
        if isinstance(why, MissReason):
            trace.failed = _missing(block, why)
        else:
            trace.failed = Missing(block=block, reason=MissReason.SKIPPED, detail=why)
        return self._explanation(trace)

    def explain_lookup(
        self,
        request: EngineRequest,
        lookup: Lookup,
        local_tokens: int,
        tokens: int,
        limited: MissReason | None,
    ) -> Explanation:
        """Explain a request that would load `tokens`, and that nobody has made; waits for nodes."""
        trace = self._new_trace(request)
        trace.lookup, trace.hit_tokens, trace.limited = lookup, tokens, limited
        trace.local_tokens = min(local_tokens, trace.possible_tokens)
        if lookup.short in _ASKED:
            self._ask_absent(lookup, by_a_person=True)
        found = self._explanation(trace)
        # What is found and not loaded is computed in any case: the last token's block.
        whole = found.reason is MissReason.NOT_TAKEN
        return replace(found, first_missing=None) if whole else found

    def stats(self) -> dict[str, dict[str, int]]:
        """Return totals over the requests that have ended, and how many missed for which reason."""
        return {"requests": dict(self.totals), "missed": dict(self.reasons)}

    def close(self) -> None:
        """Stop the thread; waits at most `SHUTDOWN_TIMEOUT_S`."""
        self._thread.end()
        self._thread.join(SHUTDOWN_TIMEOUT_S)

    # On the thread of lookups

    def looked_up(self, lookup: Lookup) -> None:
        """Ask at once why a block is absent: soon the request itself will store it."""
        self._counts.observe(metrics.LOOKUP_SECONDS, lookup.answered_at - lookup.submitted_at)
        if lookup.short in _ASKED:
            self._post(partial(self._ask_absent, lookup))

    # On our own thread

    def _ask_absent(self, lookup: Lookup, *, by_a_person: bool = False) -> None:
        group, shard = lookup.first_missing()
        key = lookup.keys[group][shard][lookup.run]
        lookup.why = self._ask(lookup, lookup.run, key, by_a_person=by_a_person)

    def _ask_failed(
        self, trace: _Trace, lookup: Lookup | None, block: int, keys: tuple[Key, ...]
    ) -> None:
        if lookup is None:
            return
        for key in keys:
            why = self._ask(lookup, block, key)
            if why is not None and why.reason is not MissReason.BEING_WRITTEN:
                detail = f"{_WORDS[MissReason.LOAD_FAILED]}: {why.detail}"
                trace.failed = replace(why, reason=MissReason.LOAD_FAILED, detail=detail)
                return

    def _ask(
        self, lookup: Lookup, block: int, key: Key, *, by_a_person: bool = False
    ) -> Missing | None:
        namespace = self._namespace_of(lookup, block, key)
        if namespace is None:
            return None
        store = self._store.get()
        if store is None or not (by_a_person or self._questions.allows(self._clock())):
            with self._lock:
                self.totals["not_asked"] += 1
            return None
        return store.why_missing(
            MissQuery(block, key, namespace, partial(self._first_key_in, lookup))
        )

    def _namespace_of(self, lookup: Lookup, block: int, key: Key) -> Namespace | None:
        """Return whose key it is, among the engine's own; None for one of another writer's
        split."""
        for group, shards in zip(self._layout.groups, lookup.keys, strict=True):
            for namespace, keys in zip(group.namespaces, shards, strict=True):
                if block < len(keys) and keys[block] == key:
                    return namespace
        return None

    def _first_key_in(self, lookup: Lookup, namespace: Namespace) -> Key | None:
        """Return the key of the prompt's first block in a namespace whose blocks may be longer."""
        layout = self._layout
        size = namespace.fields.get("block_tokens", layout.block_tokens)
        if not isinstance(size, int) or size < 1 or size % layout.hash_block_tokens:
            return None
        per_key = size // layout.hash_block_tokens
        return next(iter(namespace.engine_keys(lookup.hashes[:per_key], per_key)), None)

    def _tell(self, trace: _Trace, *, quietly: bool = False) -> None:
        explanation = self._explanation(trace)
        self._remember(explanation)
        self._count(explanation)
        if not quietly:
            self._report.send()
        self._ending.pop(trace.request_id, None)
        if quietly or explanation.first_missing is None or explanation.possible_tokens == 0:
            return
        if self._lines.allows(self._clock()):
            left_out = self._lines.refused - self._lines_left_out
            self._lines_left_out = self._lines.refused
            more = f" ({left_out} such lines were left out before it)" if left_out else ""
            self.say(f"kvstore: {explanation}{more}")

    # Both

    def _remember(self, explanation: Explanation) -> None:
        """Keep how a request ended, without what its lookup holds."""
        with self._lock:
            self._explanations[explanation.request_id] = explanation
            while len(self._explanations) > EXPLAIN_REQUESTS_MAX:
                self._explanations.popitem(last=False)

    def _count(self, explanation: Explanation) -> None:
        missing, counts = explanation.first_missing, self._counts
        counts.add(metrics.REQUESTS)
        counts.add(metrics.POSSIBLE_TOKENS, explanation.possible_tokens)
        counts.add(metrics.HIT_TOKENS, explanation.hit_tokens)
        counts.add(metrics.LOCAL_TOKENS, explanation.local_tokens)
        if missing is not None:
            counts.add(metrics.MISSED_REQUESTS, 1, missing.reason.value)
        self._report.add(explanation)
        with self._lock:
            self.totals["requests"] += 1
            self.totals["possible_tokens"] += explanation.possible_tokens
            self.totals["hit_tokens"] += explanation.hit_tokens
            self.totals["local_tokens"] += explanation.local_tokens
            if missing is not None:
                name = missing.reason.value
                self.reasons[name] = self.reasons.get(name, 0) + 1

    def _explanation(self, trace: _Trace) -> Explanation:
        local_tokens = trace.local_tokens or 0
        return Explanation(
            possible_tokens=trace.possible_tokens,
            # A preempted request may be loaded twice, and with blocks of its output.
            hit_tokens=min(trace.hit_tokens, trace.possible_tokens - local_tokens),
            local_tokens=local_tokens,
            first_missing=self._first_missing(trace),
            request_id=trace.request_id,
            trace_id=trace.trace_id,
            events=tuple(words % values for words, values in tuple(trace.events)),
        )

    def _first_missing(self, trace: _Trace) -> Missing | None:
        got_tokens = (trace.local_tokens or 0) + trace.hit_tokens
        # One token is computed in any case: its output is wanted.
        if 0 < trace.possible_tokens <= got_tokens + 1:
            return None
        block = got_tokens // self._layout.block_tokens
        if trace.failed is not None:
            return trace.failed
        if trace.refused is not None:
            return _missing(block, trace.refused)
        lookup = trace.lookup
        if lookup is None:
            return None
        if got_tokens < lookup.run * self._layout.block_tokens:
            reason = trace.limited or MissReason.NOT_TAKEN
            return _missing(block, reason) if trace.loading is None else None
        if lookup.short is None:
            return None
        missing = lookup.why or _missing(lookup.run, lookup.short)
        unknown = missing.reason in (MissReason.ABSENT, MissReason.NEVER_STORED)
        if trace.salted and lookup.run == 0 and unknown:
            detail = f"nothing is there under the request's cache salt; {missing.detail}"
            return replace(missing, reason=MissReason.SALT, detail=detail)
        return missing

    def _trace(self, request: EngineRequest) -> _Trace:
        trace = self._traces.get(request.request_id)
        if trace is None:
            trace = self._traces[request.request_id] = self._new_trace(request)
            while len(self._traces) > EXPLAIN_REQUESTS_MAX:
                self._traces.popitem(last=False)
        return trace

    def _new_trace(self, request: EngineRequest) -> _Trace:
        layout = self._layout
        blocks = min(
            len(request.block_hashes) // layout.hashes_per_key,
            request.num_prompt_tokens // layout.block_tokens,
            MATCH_BLOCKS_MAX,
        )
        salted = bool(getattr(request, "cache_salt", None))
        tokens = blocks * layout.block_tokens
        return _Trace(request.request_id, tokens, salted, trace_id(request))

    def _post(self, work: Callable[[], None]) -> bool:
        if self._thread.put(work):
            return True
        with self._lock:
            self.totals["not_asked"] += 1
        return False


def _missing(block: int, reason: MissReason) -> Missing:
    return Missing(block=block, reason=reason, detail=_WORDS.get(reason, str(reason)))
