"""Engines of the model of TensorRT-LLM's executor, with the adapter and without."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
from trtllm_model_engine import BLOCK, ModelEngine

from kvstore.testing.blockstore import MemoryBlockStore

Make = Callable[..., ModelEngine]
PROMPT = random.Random(1).choices(range(2, 90), k=8 * BLOCK + 1)


def maker(adapter: Any, made: list[ModelEngine], **defaults: Any) -> Make:
    def make(**changes: Any) -> ModelEngine:
        made.append(
            ModelEngine(
                lambda args, rank: adapter.KVStoreWorker(args),
                adapter.KVStoreScheduler,
                **{**defaults, **changes},
            )
        )
        return made[-1]

    return make


class Shared:
    """The store, which an engine does not close."""

    def __init__(self, store: MemoryBlockStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        return None


def alone(prompt: list[int], max_tokens: int = 3, **more: Any) -> list[int]:
    """What an engine without a connector answers."""

    class Nothing:
        def __getattr__(self, name: str) -> Any:
            answers: dict[str, Any] = {
                "get_num_new_matched_tokens": (0, False),
                "get_finished": ([], []),
                "request_finished": False,
            }
            return lambda *args: answers.get(name)

    ranks = more.pop("ranks", 1)
    engine = ModelEngine(lambda args, rank: Nothing(), lambda args: Nothing(), ranks=ranks)
    return engine.generate([prompt], max_tokens, **more)[0].generated


def request_of(engine: ModelEngine, prompt: list[int], max_tokens: int) -> Any:
    from trtllm_model_engine import Request

    return Request(next(engine.ids), list(prompt), max_tokens)
