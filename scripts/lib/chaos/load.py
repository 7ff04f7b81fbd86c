"""Asks the engines of a chaos run, steadily; some requests are given up and asked again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from demo_model import MODEL

from chaos import plan

if TYPE_CHECKING:
    from engines import EngineProcess

NEW_TOKENS = 8
INTERVAL_S = 0.25
"""Between the starts of two requests of one engine, unless it takes longer."""
ANSWER_TIMEOUT_S = 60.0
"""A request that takes longer was not answered, and its engine is given up."""


def ask(
    engine: EngineProcess,
    kind: str,
    prompt: tuple[int, ...],
    started: float,
    give_up_after_s: float | None = None,
) -> plan.Answer:
    at = time.monotonic()
    try:
        done = engine.call(
            "generate",
            timeout_s=ANSWER_TIMEOUT_S,
            prompts=[list(prompt)],
            max_tokens=NEW_TOKENS,
            abort_after_s={} if give_up_after_s is None else {0: give_up_after_s},
        )[0]
    except (OSError, RuntimeError, ValueError) as e:
        took_s = time.monotonic() - at
        return plan.Answer(prompt, kind, at - started, took_s, error=f"{type(e).__name__}: {e}")
    return plan.Answer(prompt, kind, at - started, time.monotonic() - at, **done)


class Load:
    """Sends requests by one thread for each engine, one at a time, until told to stop."""

    def __init__(self, engines: list[EngineProcess], seed: int) -> None:
        self.answers: list[plan.Answer] = []
        self.given_up = 0
        self.started = time.monotonic()
        self._prompts: Iterator[tuple[str, tuple[int, ...]]] = plan.traffic(seed, MODEL.vocabulary)
        self._patience = plan.patience(seed)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._feed, args=(e,)) for e in engines]
        for thread in self._threads:
            thread.start()

    def _feed(self, engine: EngineProcess) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + INTERVAL_S
            with self._lock:
                kind, prompt = next(self._prompts)
                give_up_after_s = next(self._patience)
            if give_up_after_s is not None and not self._gave_up(engine, prompt, give_up_after_s):
                return
            answer = ask(engine, kind, prompt, self.started)
            self.answers.append(answer)
            if answer.tokens is None:
                return

    def _gave_up(self, engine: EngineProcess, prompt: tuple[int, ...], after_s: float) -> bool:
        """Ask and hang up. What that leaves behind must change no later answer."""
        answer = ask(engine, plan.NEW, prompt, self.started, after_s)
        if answer.tokens is None:
            self.answers.append(answer)
            return False
        self.given_up += len(answer.tokens) < NEW_TOKENS
        return True

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
