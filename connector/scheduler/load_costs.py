"""Decides how much of a hit is loaded: as much as brings the first token soonest.

An engine computes the rest of a prompt when its load has ended, so the first token comes after

    loads before it + loading [0, j) + computing the rest

and j makes that shortest. Within a source both times grow evenly: compared are the ends at which
the source changes, where every KV group has what it needs. What a source costs is learnt from the
workers' reports. One that was never read costs nothing yet; one that was too slow is tried again
now and then, by a small load. Pure: time comes in as `now`. See docs/decisions/0117.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from connector.limits import LOAD_SOURCES_MAX, LOAD_TIMEOUT_MIN_S
from connector.messages import BlockRead, is_far
from kvstore.spi import Tier

if TYPE_CHECKING:
    from connector.layout.block_plan import Placement
    from connector.layout.geometry import StoreLayout
    from connector.scheduler.patience import ComputeRate
    from kvstore.spi import BlockRef

RETRY_S, RETRY_MAX_S = 1.0, 30.0
"""Pause before a source that was too slow is tried again; it doubles up to the longest."""
TRY_SHARE, TRY_MIN_S = 0.05, 0.02
"""Share of the time to a first token that such a try may take, and its least time."""
ENDS_MAX = 16
"""Ends of a load that are compared, the first of many."""
_KEPT = 0.75
"""Weight of what is known when one more read is added to it."""
_SURPRISE, _LATE_S, _EARLY_S = 2.0, 0.02, 0.001
"""A read that takes so many times as long as expected and more, or as short, is of another speed.
Smaller differences come from threads that wait for a processor."""
_WORTH, _WORTH_S = 1.03, 0.001
"""All is loaded where the first token comes so much later at most: estimates are no better."""

Rows = Sequence[Sequence[str | None]]
"""Per group and store block of a load: the slowest source of its shards."""
_Sums = tuple[float, float, float, float, float]


class SourceSpeed:
    """Estimates how long a read takes: a latency, and the same for each byte.

    One read that is much slower than expected is a doubt, two in a row are believed; a fast one is
    believed at once.
    """

    def __init__(self) -> None:
        self._sums: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Over reads of x bytes in y seconds, the last ones most: 1, 1/x, y/x, x, y."""
        self._doubt: BlockRead | None = None
        self.retry_at = float("-inf")
        self._pause_s = RETRY_S

    def seconds(self, size_bytes: float, *, doubting: bool = False) -> float:
        """Return how long a read of so many bytes takes, `doubting` at the last one's pace if that
        was much slower; 0: nobody knows."""
        count, inverse, unit, size, took = self._sums
        if not count:
            return 0.0
        expected_s = took / size * size_bytes
        # Least squares with weights 1/x, where sizes differ enough to tell a latency from a rate.
        spread = inverse * size - count * count
        if spread > count * count / 4:
            latency_s = (size * unit - count * took) / spread
            byte_s = (inverse * took - count * unit) / spread
            if latency_s > 0 and byte_s > 0:
                expected_s = latency_s + byte_s * size_bytes
        if doubting and self._doubt is not None:
            doubted_s = self._doubt.took_s / max(1, self._doubt.size_bytes) * size_bytes
            expected_s = max(expected_s, doubted_s)
        return expected_s

    def add(self, read: BlockRead) -> None:
        x, y = max(1, read.size_bytes), read.took_s
        known_s = self.seconds(x)
        slow = 0 < known_s < (y - _LATE_S) / _SURPRISE
        fast = known_s > _SURPRISE * y + _EARLY_S
        doubt, self._doubt = self._doubt, None
        if (slow or fast) and not self._says_latency(read):
            if slow and doubt is None:
                self._doubt = read
                return
            self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
            if fast:
                self.retry_at, self._pause_s = float("-inf"), RETRY_S
        count, inverse, unit, size, took = (_KEPT * old for old in self._sums)
        self._sums = (count + 1, inverse + 1 / x, unit + y / x, size + x, took + y)

    def _says_latency(self, read: BlockRead) -> bool:
        """Return whether a read agrees with those before it if each has a latency: a smaller one
        took no longer, or a larger one no less."""
        count, _, _, size, took = self._sums
        larger, longer = read.size_bytes - size / count, read.took_s - took / count
        slower = read.took_s * size > took * read.size_bytes
        return read.size_bytes > 0 and (larger < 0 >= longer if slower else larger > 0 <= longer)

    def tried(self, now: float) -> None:
        self.retry_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)


class Hit(NamedTuple):
    """Names what was found: `tokens` from the token `start` on."""

    placement: Placement
    start: int
    tokens: int
    sources: Callable[[Sequence[BlockRef]], Sequence[str]]


class Choice(NamedTuple):
    """Says how much of a hit to load."""

    tokens: int
    source: str = ""
    """What is too slow, if that is not all."""
    timeout_s: float | None = None
    """Time for a load that tries whether `source` is still slow; None: it is not such a load."""


class LoadCosts:
    """Knows what loads cost by source, and which are under way. Any thread may `choose`."""

    def __init__(self, layout: StoreLayout, rate: ComputeRate) -> None:
        self._layout = layout
        self._rate = rate
        size = layout.block_tokens
        self._block_bytes = [group.geometry.payload_bytes(size) for group in layout.groups]
        """Payload of a store block on one worker, by group."""
        self._sources: dict[str, SourceSpeed] = {}
        self._under_way: dict[str, float] = {}
        """Request -> seconds that its load from elsewhere takes, in their order."""
        self._first_since = 0.0

    def add(self, reads: Iterable[BlockRead]) -> None:
        for read in reads:
            speed = self._sources.pop(read.source, None) or SourceSpeed()
            speed.add(read)
            self._sources[read.source] = speed
            if len(self._sources) > LOAD_SOURCES_MAX:
                del self._sources[next(iter(self._sources))]

    def choose(
        self, hit: Hit, compute_tokens: int, usable: Callable[[int], int], now: float
    ) -> Choice:
        """Return how much to load of a hit without which the engine computes `compute_tokens`.
        `usable` cuts a number of store blocks to a prefix of which every group has what it
        needs."""
        _, start, tokens, _ = hit
        rate = self._rate.tokens_per_s
        if rate is None or not self._doubtful(tokens, tokens / rate, now):
            return Choice(tokens)
        size = self._layout.block_tokens
        first, last = start // size, -(-(start + tokens) // size)
        rows, wait_s = self._rows(hit), self._wait_s(now)

        def first_token_s(load: int) -> float:
            load_s, far = self._load_s(rows, start, load)
            return load_s + far * wait_s + (compute_tokens - load) / rate

        changes = (i for i in range(1, last - first) if any(row[i] != row[i - 1] for row in rows))
        ends = [usable(first + i) for i, _ in zip(changes, range(ENDS_MAX), strict=False)]
        loads = {0, tokens, *(max(0, end * size - start) for end in ends)}
        best = min(loads, key=first_token_s)
        enough_s = _WORTH * first_token_s(best) + _WORTH_S
        if first_token_s(tokens) <= enough_s:
            return Choice(tokens)
        begin = (start + best) // size
        rest = (name for row in rows for name in row[begin - first :] if name)
        source = max(rest, key=self._block_s, default=Tier.HOST)
        speed = self._sources.get(source)
        only_waits = first_token_s(tokens) - wait_s <= enough_s
        if only_waits or speed is None or now < speed.retry_at:
            return Choice(best, source)
        share, step = TRY_SHARE * compute_tokens, 1
        while (first_try := usable(begin + step) * size - start) <= best and begin + step < last:
            step *= 2
        load = max(first_try, usable(begin + int(share) // size) * size - start)
        load = min(load, tokens) if load > best else tokens
        return Choice(load, source, self._load_s(rows, start, best)[0] + share / rate + TRY_MIN_S)

    def begin(
        self, request_id: str, hit: Hit, choice: Choice, now: float
    ) -> tuple[float | None, float | None]:
        """Note that all of a hit is loaded. Return how long that may take, and how long computing
        it takes, in seconds: None where the engine's rate is not known."""
        rate = self._rate.tokens_per_s
        if rate is None:
            return None, None
        compute_s = hit.tokens / rate
        timeout_s = max(compute_s, LOAD_TIMEOUT_MIN_S)
        if choice.timeout_s is not None:
            timeout_s = choice.timeout_s
            self._sources[choice.source].tried(now)
        load_s, far = self._load_s(self._rows(hit), hit.start, hit.tokens)
        if far:
            timeout_s += self._wait_s(now)
            self._first_since = self._first_since if self._under_way else now
            self._under_way[request_id] = load_s
        return timeout_s, compute_s

    def end(self, request_id: str, now: float) -> None:
        """Note that every worker is done with the load of this request, if it had one."""
        if self._under_way.pop(request_id, None) is not None:
            self._first_since = now

    def _wait_s(self, now: float) -> float:
        """Return how long a load waits for those from elsewhere before it. One that takes longer
        than expected is expected to take as long again."""
        first_s, *others_s = list(self._under_way.values()) or [0.0]
        took_s = now - self._first_since if self._under_way else 0.0
        return abs(first_s - took_s) + sum(others_s)

    def _doubtful(self, tokens: int, compute_s: float, now: float) -> bool:
        """Return whether some source is so slow that a load might not be worth it."""
        size_bytes = sum(self._block_bytes) * tokens / self._layout.block_tokens
        known_s = (self._seconds(name, size_bytes) for name in list(self._sources))
        return self._wait_s(now) + max(known_s, default=0.0) > compute_s / 2

    def _rows(self, hit: Hit) -> Rows:
        size = self._layout.block_tokens
        span = slice(hit.start // size, -(-(hit.start + hit.tokens) // size))
        length = span.stop - span.start
        rows = [[*row[span], *[None] * (length - len(row[span]))] for row in hit.placement]
        found = [placed.found if placed else () for row in rows for placed in row]
        names = iter(hit.sources([ref for refs in found for ref in refs]))
        shards = ([next(names) for _ in refs] for refs in found)
        slowest = [max(own, key=self._block_s, default=None) for own in shards]
        return [slowest[i : i + length] for i in range(0, len(slowest), length or 1)]

    def _block_s(self, source: str) -> float:
        return self._seconds(source, self._block_bytes[0])

    def _seconds(self, source: str, size_bytes: float) -> float:
        # Memory that was slow once had to wait for the processor: no doubt stays.
        speed = self._sources.get(source)
        return 0.0 if speed is None else speed.seconds(size_bytes, doubting=is_far(source))

    def _load_s(self, rows: Rows, start: int, tokens: int) -> tuple[float, bool]:
        """Return how long loading the first `tokens` of these takes, and whether some of it comes
        from elsewhere."""
        size, sizes = self._layout.block_tokens, Counter[str]()
        first, end = start // size, -(-(start + tokens) // size)
        for group, row, block_bytes in zip(
            self._layout.groups, rows, self._block_bytes, strict=True
        ):
            needed = group.needed_from(start + tokens) // size if group.forgetful else first
            for name in row[max(needed - first, 0) : end - first] if tokens else ():
                if name is not None:
                    sizes[name] += block_bytes
        took_s = sum(self._seconds(name, size_bytes) for name, size_bytes in sizes.items())
        return took_s, any(map(is_far, sizes))
