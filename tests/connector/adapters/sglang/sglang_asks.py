"""Prompts for whole SGLang servers, and a save that is waited for."""

from __future__ import annotations

import random

from redis_servers import wait_until
from sglang_server import PAGE_TOKENS, SGLangServer
from tiny_models import ModelShape

PROMPT_TOKENS = 25 * PAGE_TOKENS + 5
"""More than the 256 that SGLang asks a storage for at least."""
WHOLE_PAGES_TOKENS = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
SAVE_TIMEOUT_S = 60.0


def prompt(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(2, ModelShape().vocabulary) for _ in range(PROMPT_TOKENS)]


def saved_tokens(server: SGLangServer) -> float:
    return server.metrics().get("sglang:backuped_tokens_total", 0.0)


def save(
    server: SGLangServer, asked: list[int], page_tokens: int = PAGE_TOKENS, **request: str
) -> list[int]:
    """Have a server compute a prompt that is new to it, and save its pages."""
    before = saved_tokens(server)
    answer = server.generate(asked, **request)
    assert answer.cached_tokens == 0
    whole = before + len(asked) // page_tokens * page_tokens
    wait_until(lambda: saved_tokens(server) >= whole, "it saved", SAVE_TIMEOUT_S)
    return answer.tokens
