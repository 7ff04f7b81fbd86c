"""Requests with pictures, named as vLLM's own front end names them, for model engines."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_model_engine import MakeEngine, ModelEngine

OFFSET, LENGTH = 4, 8
"""Where in the prompt the picture's placeholders are."""


def named(
    prefix_caching: bool,
    cache_gb: float,
    uuid: str | None = None,
    *,
    api_rank: int = 0,
) -> str:
    """Return what vLLM calls the first picture of an API process that has just started; empty for
    one that it looks at."""
    media = SimpleNamespace(mm_processor_cache_gb=cache_gb)
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    renderer = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        config=SimpleNamespace(cache_config=cache),
        _validate_mm_uuids=lambda *_: None,
    )
    items = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    uuids = {} if uuid is None else {"image": [uuid]}
    request = f"renderer{api_rank}-mm-1"
    names = function_of("renderers/base.py", "_process_mm_uuids")(
        renderer, {}, items, uuids, request
    )
    return str(names["image"][0]) if "image" in names else ""


def function_of(path: str, name: str) -> Callable[..., Any]:
    """Return a function of a file of vLLM's that needs nothing of its module, which takes half a
    minute to import."""
    import vllm

    file = Path(next(iter(vllm.__path__))) / path
    (found,) = (
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    names: dict[str, Any] = {}
    module = ast.Module([found], [])
    flags = annotations.compiler_flag
    exec(compile(module, str(file), "exec", flags, dont_inherit=True), names)
    function: Callable[..., Any] = names[name]
    return function


def picture_engine(
    make: MakeEngine, *, prefix_caching: bool, cache_gb: float, **more: Any
) -> ModelEngine:
    """Makes an engine of a model that takes pictures, with vLLM's two settings."""
    engine = make(prefix_caching=prefix_caching, media_cache_gb=cache_gb, **more)
    scheduler = engine.scheduler
    scheduler.max_num_encoder_input_tokens = 10**6
    # No encoder runs: what a picture does to the KV is the model's `contexts`.
    scheduler._try_schedule_encoder_inputs = lambda request, start, count, budget, **_: (
        [],
        count,
        budget,
        [],
        [],
    )
    return engine


def add_picture(
    engine: ModelEngine, name: str, tokens: list[int], picture: bytes, identifier: str, **more: Any
) -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=OFFSET, length=LENGTH),
    )
    engine.contexts[name] = picture
    engine.add(name, tokens, mm_features=[feature], **more)
