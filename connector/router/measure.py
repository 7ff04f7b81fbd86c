"""Sends prompts through the router in rounds, then to a single engine, and prints a table.

    round 1    nobody has seen the prompts: prefilled in one engine, decoded in another
    round 2    the same prompts: all blocks are in the store, only the decode engine works
    further    the same, for as long as --rounds says: take things away meanwhile
    at last    a single engine that loads nothing computes every prompt: what is right

Exit status 0 only if every request was answered, every answer is the single engine's and
round 2 loaded every full block of every prompt. The last line is one JSON object.

What was loaded the decode engines' own counters say: after a hand-over an answer's
`cached_tokens` are what the prefill engine had in its cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import aiohttp

from connector.router.routing import Role

PREFIX_TOKENS = 2048
TAIL_TOKENS = 2
"""Tokens that every engine computes in a step of its own (vllm-cpu.yaml), so that all run the same
kernels on the same shapes. Only the KV can then make answers differ."""
NEW_TOKENS = 16
VOCABULARY = 4096
REQUEST_TIMEOUT_S = 120.0
START_TIMEOUT_S = 600.0
COUNTERS_TIMEOUT_S = 2.0
LOADED = re.compile(
    r'^vllm:prompt_tokens_by_source_total{.*source="external_kv_transfer".*} (\S+)', re.MULTILINE
)
"""The counter of a vLLM engine for prompt tokens that its connector loaded."""
DATA = b"data: "


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """Holds one answer: its tokens, the time to the first one, and which way the request took."""

    tokens: list[int]
    ttft_s: float
    loaded_tokens: int
    prefill: str
    decode: str


@dataclass(slots=True)
class Round:
    answers: list[MeasuredAnswer | None] = field(default_factory=list)
    """Answers by prompt; None where the request failed."""
    errors: list[str] = field(default_factory=list)

    @property
    def loaded_tokens(self) -> int:
        return sum(a.loaded_tokens for a in self.answers if a is not None)

    @property
    def loaded_every_block(self) -> bool:
        """Return whether each prompt's full blocks were loaded; what is behind them may have been,
        too."""
        return all(a is not None and a.loaded_tokens >= PREFIX_TOKENS for a in self.answers)


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> MeasuredAnswer:
    """Return one streamed completion. Raises `aiohttp.ClientError`, `TimeoutError`,
    `ValueError`."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    started = time.perf_counter()
    ttft_s = 0.0
    tokens: list[int] = []
    async with session.post(f"{url.rstrip('/')}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {(await answer.text())[:200]}")
        async for line in answer.content:
            if not line.startswith(DATA) or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[len(DATA) :])
            for choice in chunk.get("choices", ()):
                tokens += choice.get("token_ids") or ()
            if tokens and not ttft_s:
                ttft_s = time.perf_counter() - started
        if len(tokens) != NEW_TOKENS:
            raise ValueError(f"the stream ended after {len(tokens)} of {NEW_TOKENS} tokens")
        return MeasuredAnswer(
            tokens,
            ttft_s,
            0,
            answer.headers.get("X-KVStore-Prefill", "-"),
            answer.headers.get("X-KVStore-Decode", url),
        )


async def loaded_by_now(session: aiohttp.ClientSession, router: str) -> dict[str, int]:
    """Return how many prompt tokens each decode engine has loaded since it was started; without
    those that do not say it."""
    loaded: dict[str, int] = {}
    timeout = aiohttp.ClientTimeout(total=COUNTERS_TIMEOUT_S)
    async with session.get(f"{router.rstrip('/')}/engines", timeout=timeout) as answer:
        engines = await answer.json()
    for url in (one["url"] for one in engines if one["role"] == Role.DECODE):
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{url}/metrics", timeout=timeout) as answer:
                loaded[url] = sum(int(float(n)) for n in LOADED.findall(await answer.text()))
    return loaded


async def one_round(
    session: aiohttp.ClientSession, url: str, prompts: list[list[int]], *, routed: bool
) -> Round:
    """Send all prompts, one at a time, so that the time of the first token and what an engine loads
    meanwhile belong to that prompt."""
    done = Round()
    for prompt in prompts:
        try:
            before = await loaded_by_now(session, url) if routed else {}
            answer = await ask(session, url, prompt)
            after = (await loaded_by_now(session, url) if routed else {}).get(answer.decode, 0)
            loaded = max(0, after - before.get(answer.decode, after))
            done.answers.append(replace(answer, loaded_tokens=loaded))
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            done.answers.append(None)
            done.errors.append(f"{type(e).__name__}: {e}")
    return done


async def wait_for(session: aiohttp.ClientSession, url: str) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at:
        try:
            async with session.get(f"{url.rstrip('/')}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)
    raise SystemExit(f"{url} was not up after {START_TIMEOUT_S:.0f} s")


async def run(options: argparse.Namespace) -> int:
    rng = random.Random(options.seed)
    tokens = PREFIX_TOKENS + TAIL_TOKENS
    prompts = [
        [rng.randrange(2, VOCABULARY) for _ in range(tokens)] for _ in range(options.prompts)
    ]
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for url in (options.single, options.router):
            await wait_for(session, url)
        rounds = []
        for number in range(1, options.rounds + 1):
            done = await one_round(session, options.router, prompts, routed=True)
            rounds.append(done)
            answered = len(prompts) - len(done.errors)
            print(
                f"round {number}: {answered} of {len(prompts)} answered, "
                f"{done.loaded_tokens} tokens loaded{_ways(done)}",
                flush=True,
            )
            for error in done.errors:
                print(f"round {number}: {error}", flush=True)
            await asyncio.sleep(options.pause_s)
        right = await one_round(session, options.single, prompts, routed=False)
    return _tell(rounds, right)


def _ways(done: Round) -> str:
    """Return how many prompts each engine prefilled and decoded, as far as the router said so."""
    answers = [a for a in done.answers if a is not None]
    parts = []
    for word, names in (
        ("prefilled", [a.prefill for a in answers]),
        ("decoded", [a.decode for a in answers]),
    ):
        counts = sorted(Counter(n for n in names if n not in ("-", "none")).items())
        parts += (
            [f"; {word} " + ", ".join(f"{n} at {name}" for name, n in counts)] if counts else []
        )
    return "".join(parts)


def _tell(rounds: list[Round], right: Round) -> int:
    """Return the table and the summary; the exit status."""
    first, again = rounds[0], rounds[min(1, len(rounds) - 1)]
    rows = []
    for i, computed in enumerate(right.answers):
        answers = [done.answers[i] for done in rounds]
        same = computed is not None and all(
            a is not None and a.tokens == computed.tokens for a in answers
        )
        shown = [computed, first.answers[i], again.answers[i]]
        times = ["-" if a is None else f"{a.ttft_s * 1e3:.0f} ms" for a in shown]
        loaded = [0 if a is None else a.loaded_tokens for a in shown[1:]]
        rows.append([str(i), *times, *map(str, loaded), "yes" if same else "NO"])
    head = [
        *("prompt", "single engine", "split, round 1", "split, round 2"),
        *("loaded, round 1", "loaded, round 2", "identical"),
    ]
    print("\ntime to first token")
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    for line in [head, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    loaders: Counter[str] = Counter()
    for done in rounds:
        for answer in done.answers:
            if answer is not None:
                loaders[answer.decode] += answer.loaded_tokens
    print()
    for name, loaded_tokens in sorted(loaders.items()):
        print(f"{name} loaded {loaded_tokens} tokens")
    count = len(right.answers)
    identical = sum(
        a is not None and b is not None and a.tokens == b.tokens
        for done in rounds
        for a, b in zip(done.answers, right.answers, strict=True)
    )
    summary = {
        "requests": count * len(rounds),
        "answered": sum(a is not None for done in rounds for a in done.answers),
        "identical": identical,
        "tokens_possible": count * (PREFIX_TOKENS + TAIL_TOKENS - 1),
        "tokens_loaded": [done.loaded_tokens for done in rounds],
        "ttft_single_ms": _median_ms(right),
        "ttft_split_ms": [_median_ms(done) for done in rounds],
    }
    print(json.dumps(summary))
    good = identical == count * len(rounds) and again.loaded_every_block
    return 0 if good else 1


def _median_ms(done: Round) -> float | None:
    times = [a.ttft_s for a in done.answers if a is not None]
    return round(statistics.median(times) * 1e3, 1) if times else None


def positive(text: str) -> int:
    """Read a number for argparse: nothing sent is nothing shown."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router", required=True, metavar="URL")
    parser.add_argument("--single", required=True, metavar="URL", help="an engine that never loads")
    parser.add_argument("--prompts", type=positive, default=8)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each round")
    parser.add_argument("--seed", type=int, default=20)
    return parser


def main() -> int:
    return asyncio.run(run(parser().parse_args()))


if __name__ == "__main__":
    sys.exit(main())
