"""Runs one vLLM engine with users who talk to it in turns; `EngineProcess` starts it for cliff.py.

A user has a history; each turn adds new tokens to it, asks, and adds the answer. At its longest it
is begun anew, from the same first tokens. The next turn begins when the one before has ended, so
there are always as many requests as users.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

from engines import Driver, EngineSettings, make_llm, sampling, serve


class User:
    """Holds one user's history."""

    def __init__(self, number: int, shape: dict[str, int]) -> None:
        self._random = random.Random(number)
        self._shape = shape
        self._first = self._tokens(shape["first"])
        self.history = list(self._first)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(2, self._shape["vocabulary"]) for _ in range(count)]

    def ask(self) -> list[int]:
        """Return the next prompt."""
        grown = len(self.history) + self._shape["new"] + self._shape["answer"]
        if grown > self._shape["longest"]:
            self.history = list(self._first)
        self.history += self._tokens(self._shape["new"])
        return self.history

    def hear(self, answer: list[int]) -> None:
        self.history += answer


class UsersDriver(Driver):
    """Adds the users to what an engine of the tests can do."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._users: list[User] = []

    def talk(self, users: int, seconds: float, shape: dict[str, int]) -> dict[str, float]:
        """Let so many users talk, and return what ended within so many seconds once each had an
        answer, and how much of it was not computed. Users go on where they were the last time."""
        while len(self._users) < users:
            self._users.append(User(len(self._users), shape))
        waiting: dict[str, tuple[User, int]] = {}
        seen = {"turns": 0, "tokens": 0, "prompt_tokens": 0, "cached_tokens": 0}
        answered: set[User] = set()
        end_at = math.inf

        def ask(user: User) -> None:
            name = f"u{self._next}"
            self._next += 1
            prompt = user.ask()
            waiting[name] = user, len(prompt)
            given = {"prompt_token_ids": list(prompt)}
            self.engine.add_request(name, given, sampling(shape["answer"], None))

        for user in self._users[:users]:
            ask(user)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if not output.finished:
                    continue
                user, prompt_tokens = waiting.pop(output.request_id)
                answer = list(output.outputs[0].token_ids)
                user.hear(answer)
                now = time.perf_counter()
                if now >= end_at:
                    continue
                if end_at < math.inf:
                    seen["turns"] += 1
                    seen["tokens"] += prompt_tokens + len(answer)
                    seen["prompt_tokens"] += prompt_tokens
                    seen["cached_tokens"] += output.num_cached_tokens or 0
                answered.add(user)
                if len(answered) == users and end_at == math.inf:
                    end_at = now + seconds
                ask(user)
        self.drain()
        return {**seen, "seconds": seconds}


def make_driver(model: str, settings: EngineSettings) -> UsersDriver:
    return UsersDriver(make_llm(model, settings))


if __name__ == "__main__":
    serve(make_driver)
