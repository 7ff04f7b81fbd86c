"""The cases of `scripts/conformance` that need one small Llama: keys, faults, restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

from engines import cpu_dtype

from conformance.bench import (
    BAD,
    HANDED_OVER,
    IN_ONE_ENGINE,
    LOADED,
    NOT_RUN,
    RECOMPUTED,
    SHARED,
    TOKENS,
    WITHIN,
    Bench,
    Verdict,
    forget,
    judge,
    tokens_of,
    worst,
)
from conformance.faults import flip_bits, flip_copies, lose_store

ABORTS_S = {0: 0.0, 1: 0.002, 2: 0.01}
CONTROL = "control: loads zeros"
BEGINNING_TOKENS = TOKENS // 2 + 16
"""Of prompts that go on otherwise. Blocks of every size that a store has here end at half of
`TOKENS`: whatever it keeps, so much is found and the rest runs through the same kernel shapes."""
OTHER_TOKENS = 64
"""Of prompts that begin otherwise."""


def _pair(
    bench: Bench, case: str, tokens: int, *, spoil: Callable[[Bench], str] | None = None
) -> Verdict:
    """Have one engine compute, and ask another for the same."""
    wanted = bench.prompts(tokens)
    reference = tokens_of(bench.alone().generate(wanted))
    first, second = bench.pair()
    told = bench.keep(first, wanted)
    if spoil is not None and (why_not := spoil(bench)):
        return Verdict(case, NOT_RUN, detail=why_not)
    found = second.generate(wanted, kv_transfer_params=told)
    return judge(case, reference, found, tokens * len(wanted), apart=False)


def shared_prefix(bench: Bench) -> Verdict:
    """What one engine computed another one loads. Where it does not: is KV handed over by what
    requests say, or does an engine find its own again?"""
    case = "shared-prefix"
    verdict = _pair(bench, case, TOKENS + 2)
    for way, without, said in (
        ("hands_over", HANDED_OVER, ""),
        ("within", WITHIN, f"{IN_ONE_ENGINE}: that one is asked again, its own cache forgotten"),
    ):
        if verdict.verdict != RECOMPUTED:
            break
        setattr(bench, way, True)
        verdict = _pair(bench, case, TOKENS + 2)
        if verdict.verdict == RECOMPUTED:
            setattr(bench, way, False)
        else:
            bench.without |= without
            verdict = replace(verdict, detail="; ".join(filter(None, (said, verdict.detail))))
    return verdict


def control(bench: Bench) -> Verdict:
    """The same into an engine where all that is loaded turns into zeros: a judge that lets it pass
    is no judge."""
    wanted = bench.prompts()
    reference = tokens_of(bench.alone().generate(wanted))
    spoiled = bench.sharing("spoiled")
    spoiled.call("spoil_loads")
    found = bench.share(spoiled if bench.within else bench.sharing("first"), spoiled, wanted)
    return judge(CONTROL, reference, found, sum(map(len, wanted)), apart=False)


def long_prefix(bench: Bench) -> Verdict:
    """The same over four chunks of prefill."""
    return _pair(bench, "long-prefix", 3 * TOKENS + 2)


def parts(bench: Bench) -> Verdict:
    """Of a prompt that goes on otherwise the beginning is loaded and no more; then the rest of the
    first prompt, whose beginning the engine has by now; behind another beginning nothing of it is;
    and a prompt that is in the store to its last token is answered."""
    case = "parts-of-prompts"
    wanted, tails = bench.prompts(), bench.prompts(TOKENS + 2 - BEGINNING_TOKENS)
    whole = bench.prompts(TOKENS)
    begun = [[*one[:BEGINNING_TOKENS], *tail] for one, tail in zip(wanted, tails, strict=True)]
    # Their first blocks are in the store, and so are the others: behind another beginning.
    ended = [
        [*other[:OTHER_TOKENS], *one[OTHER_TOKENS:]]
        for one, other in zip(wanted, whole, strict=True)
    ]
    asked = sum(map(len, wanted))
    alone = bench.alone()
    right = [tokens_of(alone.generate(prompts)) for prompts in (wanted, begun, ended)]
    first, second = bench.pair()
    bench.keep(first, [*wanted, *whole])
    verdicts = []
    for which, prompts, alike in (
        (1, begun, BEGINNING_TOKENS),
        (0, wanted, TOKENS),
        (2, ended, OTHER_TOKENS),
    ):
        verdict = judge(case, right[which], second.generate(prompts), asked, apart=False)
        if verdict.cached_tokens > alike * len(prompts):
            verdict = replace(verdict, verdict=SHARED, detail=f"{alike} of each are alike")
        verdicts.append(verdict)
    # Its kernel shapes are others than of the first time: that it is answered is all.
    second.generate(whole)
    return worst(*verdicts)


def shared_again(bench: Bench) -> Verdict:
    """After all of this the store still shares: where nothing was loaded it was meant."""
    return _pair(bench, "shared-again", TOKENS + 2)


def cache_salt(bench: Bench) -> Verdict:
    """Requests with different salts see nothing of each other."""
    wanted = bench.prompts()
    reference = tokens_of(bench.alone().generate(wanted))
    first, second = bench.pair()
    bench.keep(first, wanted, cache_salt="a")
    found = second.generate(wanted, cache_salt="b")
    return judge("cache-salt", reference, found, sum(map(len, wanted)), apart=True)


def aborts(bench: Bench) -> Verdict:
    """Requests that end while their KV is loading leave the engine right."""
    wanted = bench.prompts(count=4)
    reference = tokens_of(bench.alone().generate(wanted))
    first, second = bench.pair()
    told = bench.keep(first, wanted)
    second.generate(wanted, abort_after_s=ABORTS_S, kv_transfer_params=told)
    if bench.hands_over:
        found = bench.share(first, second, wanted)
    else:
        if bench.within:
            second.drain()
            forget(second)
        found = second.generate(wanted)
    return judge("aborts-while-loading", reference, found, sum(map(len, wanted)), apart=False)


def preemption(bench: Bench) -> Verdict:
    """An engine whose memory does not hold its requests evicts some while they are saved."""
    wanted = bench.prompts(TOKENS + 64, count=6)
    reference = tokens_of(bench.alone().generate(wanted, max_tokens=64))
    small = bench.sharing("small", kv_blocks=80, max_model_len=1024)
    asked = sum(map(len, wanted))
    found = small.generate(wanted, max_tokens=64)
    small.drain()
    verdict = judge("preemption", reference, found, asked, apart=False)
    if verdict.verdict in BAD:
        return verdict
    if bench.within:
        forget(small)
    second = small if bench.within else bench.sharing("second")
    found = second.generate(wanted, max_tokens=64)
    return judge("preemption", reference, found, asked, apart=False)


def killed_while_saving(bench: Bench) -> Verdict:
    """An engine dies (SIGKILL) with saves under way; what it left is whole, or it is not there."""
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


def flipped_bits(bench: Bench) -> Verdict:
    """Bits flip in the store's files, or in what processes hold of it in their memory."""
    in_memory = False

    def spoil(bench: Bench) -> str:
        nonlocal in_memory
        in_memory = bool(flip_bits(bench.folder, bench.payload))
        return "" if not in_memory or _flip_copies(bench) else NOWHERE

    verdict = _pair(bench, "flipped-bits", TOKENS + 2, spoil=spoil)
    if in_memory and verdict.verdict == LOADED:
        # Which of the copies the store reads cannot be told from outside.
        return replace(verdict, verdict=NOT_RUN, detail="what was changed was not what was loaded")
    return verdict


NOWHERE = "its bytes are in no file of {dir}, no memory node of it and no memory of its processes"


def _flip_copies(bench: Bench) -> int:
    """Flip bits of copies of the KV in the memory of engines and of the store's processes."""
    kv = bench.sharing("first").call("kv")
    own = {
        engine.pid: [(at, size) for at, size in engine.call("kv")["places"]]
        for engine in map(bench.sharing, bench.names_of_sharing())
    }
    needles = [bytes.fromhex(one) for one in kv["needles"]]
    return sum(flip_copies(pid, needles, own.get(pid, [])) for pid in [*own, *bench.pids])


def store_lost(bench: Bench) -> Verdict:
    """The store's process is killed, or its files are removed. KV that is handed over is lost with
    the engine that computed it."""

    def spoil(bench: Bench) -> str:
        engines = [bench.sharing("first").pid] if bench.hands_over else []
        return lose_store(bench.folder, [*bench.pids, *engines])

    return _pair(bench, "store-lost", TOKENS + 2, spoil=spoil)


def new_weights(bench: Bench) -> Verdict:
    """Another model is put at the same path: the next engine must not load the former one's KV."""
    wanted = bench.prompts()
    reference = tokens_of(bench.alone("alone with others", bench.model(8)).generate(wanted))
    first = bench.sharing("first")
    found = bench.share(first, bench.sharing("with others", bench.mounted(8)), wanted)
    return judge("new-weights", reference, found, sum(map(len, wanted)), apart=True)
