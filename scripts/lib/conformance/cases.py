"""The cases of `scripts/conformance` that need one small Llama: keys, faults, restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from engines import Generated, cpu_dtype

from conformance.bench import BAD, NOT_RUN, TOKENS, Bench, Verdict, judge, tokens_of
from conformance.faults import flip_bits, lose_store

ABORTS_S = {0: 0.0, 1: 0.002, 2: 0.01}
HANDS_OVER = "KV is handed over from request to request, by no key"


def _pair(
    bench: Bench, case: str, tokens: int, *, spoil: Callable[[Bench], str] | None = None
) -> Verdict:
    """Have one engine compute, and ask another for the same."""
    wanted = bench.prompts(tokens)
    reference = tokens_of(bench.alone().generate(wanted))
    first, second = bench.sharing("first"), bench.sharing("second")
    if spoil is None:
        found = bench.share(first, second, wanted)
        return judge(case, reference, found, tokens * len(wanted), apart=False)
    if bench.hands_over:
        params = bench.hand_over(first, wanted)
    else:
        params = None
        first.generate(wanted)
        first.drain()
    if why_not := spoil(bench):
        return Verdict(case, NOT_RUN, detail=why_not)
    found = second.generate(wanted, kv_transfer_params=params)
    return judge(case, reference, found, tokens * len(wanted), apart=False)


def shared_prefix(bench: Bench) -> Verdict:
    """What one engine computed another one loads."""
    return _pair(bench, "shared-prefix", TOKENS + 2)


def long_prefix(bench: Bench) -> Verdict:
    """The same over four chunks of prefill."""
    return _pair(bench, "long-prefix", 3 * TOKENS + 2)


def shared_again(bench: Bench) -> Verdict:
    """After all of this the store still shares: where nothing was loaded it was meant."""
    return _pair(bench, "shared-again", TOKENS + 2)


def cache_salt(bench: Bench) -> Verdict:
    """Requests with different salts see nothing of each other."""
    if bench.hands_over:
        return Verdict("cache-salt", NOT_RUN, detail=HANDS_OVER)
    wanted = bench.prompts()
    reference = tokens_of(bench.alone().generate(wanted))
    first, second = bench.sharing("first"), bench.sharing("second")
    first.call("generate", prompts=wanted, max_tokens=16, abort_after_s={}, cache_salt="a")
    first.drain()
    found = second.call("generate", prompts=wanted, max_tokens=16, abort_after_s={}, cache_salt="b")
    asked = sum(map(len, wanted))
    return judge("cache-salt", reference, [Generated(**f) for f in found], asked, apart=True)


def aborts(bench: Bench) -> Verdict:
    """Requests that end while their KV is loading leave the engine right."""
    wanted = bench.prompts(count=4)
    reference = tokens_of(bench.alone().generate(wanted))
    first, second = bench.sharing("first"), bench.sharing("second")
    if bench.hands_over:
        params = bench.hand_over(first, wanted)
        second.generate(wanted, abort_after_s=ABORTS_S, kv_transfer_params=params)
        found = bench.share(first, second, wanted)
    else:
        first.generate(wanted)
        first.drain()
        second.generate(wanted, abort_after_s=ABORTS_S)
        found = second.generate(wanted)
    return judge("aborts-while-loading", reference, found, sum(map(len, wanted)), apart=False)


def preemption(bench: Bench) -> Verdict:
    """An engine whose memory does not hold its requests evicts some while they are saved."""
    if bench.hands_over:
        return Verdict("preemption", NOT_RUN, detail=HANDS_OVER)
    wanted = bench.prompts(TOKENS + 64, count=6)
    reference = tokens_of(bench.alone().generate(wanted, max_tokens=64))
    small = bench.sharing("small", kv_blocks=80, max_model_len=1024)
    asked = sum(map(len, wanted))
    found = small.generate(wanted, max_tokens=64)
    small.drain()
    verdict = judge("preemption", reference, found, asked, apart=False)
    if verdict.verdict in BAD:
        return verdict
    second = bench.sharing("second").generate(wanted, max_tokens=64)
    return judge("preemption", reference, second, asked, apart=False)


def killed_while_saving(bench: Bench) -> Verdict:
    """An engine dies (SIGKILL) with saves under way; what it left is whole, or it is not there."""
    if bench.hands_over:
        return Verdict("killed-while-saving", NOT_RUN, detail=HANDS_OVER)
    wanted = bench.prompts(count=4)
    reference = tokens_of(bench.alone().generate(wanted))
    second = bench.sharing("second")
    victim = bench.sharing("victim")
    victim.generate(wanted, max_tokens=1)
    os.kill(victim.pid, signal.SIGKILL)
    asked = sum(map(len, wanted))
    return judge("killed-while-saving", reference, second.generate(wanted), asked, apart=False)


def other_dtype(bench: Bench) -> Verdict:
    """Engines of another dtype share nothing: bytes of the one are numbers of the other."""
    wanted = bench.prompts()
    dtype = "bfloat16" if cpu_dtype() == "float32" else "float32"
    reference = tokens_of(bench.alone(f"alone in {dtype}", dtype=dtype).generate(wanted))
    found = bench.share(bench.sharing("first"), bench.sharing(f"in {dtype}", dtype=dtype), wanted)
    return judge("other-dtype", reference, found, sum(map(len, wanted)), apart=True)


def other_block_size(bench: Bench) -> Verdict:
    """Engines with another block size load what they can read, or nothing."""
    wanted = bench.prompts()
    reference = tokens_of(bench.alone("alone in 64s", block_size=64).generate(wanted))
    found = bench.share(bench.sharing("first"), bench.sharing("in 64s", block_size=64), wanted)
    return judge("other-block-size", reference, found, sum(map(len, wanted)), apart=False)


def _flip(bench: Bench) -> str:
    return flip_bits(bench.folder, bench.payload)


def _lose(bench: Bench) -> str:
    if bench.hands_over:
        return "the store is the engine that computed"
    return lose_store(bench.folder, bench.pids)


def flipped_bits(bench: Bench) -> Verdict:
    """Bits flip in the store's memory or files."""
    return _pair(
        bench,
        "flipped-bits",
        TOKENS + 2,
        spoil=lambda bench: flip_bits(bench.folder, bench.payload),
    )


def store_lost(bench: Bench) -> Verdict:
    """The store's process is killed, or its files are removed."""
    return _pair(
        bench, "store-lost", TOKENS + 2, spoil=lambda bench: lose_store(bench.folder, bench.pids)
    )


def new_weights(bench: Bench) -> Verdict:
    """Another model is put at the same path: the next engine must not load the former one's KV."""
    wanted = bench.prompts()
    reference = tokens_of(bench.alone("alone with others", bench.model(8)).generate(wanted))
    first = bench.sharing("first")
    found = bench.share(first, bench.sharing("with others", bench.mounted(8)), wanted)
    return judge("new-weights", reference, found, sum(map(len, wanted)), apart=True)
