"""A picture's KV is for requests with that picture, whatever vLLM has named it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from connector_parts import TO_PREFILL
from vllm_model_config import BLOCK
from vllm_model_engine import MakeEngine, ModelEngine, expected_output, prompt
from vllm_pictures import add_picture, named, picture_engine

if TYPE_CHECKING:
    from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm
TOKENS = prompt(2 * BLOCK + 5)
CAT, DOG = b"a cat", b"a dog"
COUNTED = {"prefix_caching": False, "cache_gb": 0.0}
TOLD = [
    {"prefix_caching": True, "cache_gb": 4.0},
    {"prefix_caching": True, "cache_gb": 0.0},
    {"prefix_caching": False, "cache_gb": 4.0},
]
"""Settings with which vLLM looks at a picture, or takes a user's word for it."""


def run(engine: ModelEngine, name: str, picture: bytes, identifier: str, **more: Any) -> int:
    """Tokens that were loaded; the answer is that of this picture."""
    before = engine.loaded_tokens
    add_picture(engine, name, TOKENS, picture, identifier, **more)
    engine.run()
    count = len(engine.outputs[name])
    assert engine.outputs[name] == expected_output(TOKENS, count, context=picture)
    return engine.loaded_tokens - before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_picture_that_is_named_by_a_counter_is_neither_loaded_nor_saved(
    make: MakeEngine, store: MemoryBlockStore, rank: int
) -> None:
    """A second engine, a start later or beside it, counts from 1 again."""
    for name, picture in (("cat", CAT), ("dog", DOG)):
        engine = picture_engine(make, **COUNTED)
        identifier = named(**COUNTED, api_rank=rank)
        assert identifier == f"renderer{rank}-mm-1-image-0"
        assert run(engine, name, picture, identifier) == 0
        assert store.sealed() == []


def test_what_vllm_was_given_for_a_name_cannot_be_told_then(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    """A user's own name may spell vLLM's, and a digest of either is a digest."""
    for identifier in (named(**COUNTED, uuid="renderer0-mm-1-image-0"), "cat-7", 64 * "a"):
        assert run(picture_engine(make, **COUNTED), identifier, CAT, identifier) == 0
    assert store.sealed() == []


@pytest.mark.parametrize("settings", TOLD)
def test_with_other_settings_a_name_counts_however_it_reads(
    make: MakeEngine, settings: dict[str, Any]
) -> None:
    for name in ("cat-7", "renderer0-mm-1-image-0"):
        assert named(**settings, uuid=name) == name
        assert run(picture_engine(make, **settings), "first", CAT, name) == 0
        assert run(picture_engine(make, **settings), "again", CAT, name) == 2 * BLOCK
        assert run(picture_engine(make, **settings), "other", DOG, f"{name}-b") == 0


def test_text_is_shared_by_such_engines_as_by_others(make: MakeEngine) -> None:
    first, second = picture_engine(make, **COUNTED), picture_engine(make, **TOLD[0])
    for engine in (first, second):
        engine.serve("text", TOKENS)
        assert engine.outputs["text"] == expected_output(TOKENS, 4)
    assert second.loaded_tokens == 2 * BLOCK


def test_a_session_that_gets_a_picture_is_left_out_from_then_on(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    engine = picture_engine(make, **COUNTED)
    engine.add("text", TOKENS, max_tokens=40)
    request = engine.scheduler.requests["text"]
    hashed = engine.scheduler.connector._hashed(request)
    assert len(hashed.block_hashes) == 2
    assert hashed.part_hash is not None
    position = PlaceholderRange(offset=2 * BLOCK, length=4)
    request.mm_features.append(MultiModalFeatureSpec(None, "image", "renderer0-mm-1", position))
    assert (hashed.block_hashes, hashed.part_hash) == ((), None)


def test_a_hand_over_hands_nothing_over_and_waits_for_nothing(
    make: MakeEngine, store: MemoryBlockStore, token_by_token: None
) -> None:
    for name, picture in (("cat", CAT), ("dog", DOG)):
        producer = picture_engine(make, **COUNTED)
        params = {**TO_PREFILL, "kvstore_keys": True}
        assert run(producer, name, picture, named(**COUNTED), params=params, max_tokens=1) == 0
        told = producer.told[name]
        assert told["remote_num_tokens"] == 0
        assert told["kvstore_keys"]["last_key"] is None
        assert (
            run(picture_engine(make, **COUNTED), name, picture, named(**COUNTED), params=told) == 0
        )
    assert store.sealed() == []


def test_a_decode_engine_that_counts_does_not_wait_for_one_that_does_not(
    make: MakeEngine, token_by_token: None
) -> None:
    producer = picture_engine(make, **TOLD[0])
    run(producer, "p", CAT, "cat-7", params=TO_PREFILL, max_tokens=1)
    assert producer.told["p"]["remote_num_tokens"] == len(TOKENS)
    consumer = picture_engine(make, **COUNTED)
    add_picture(consumer, "d", TOKENS, CAT, "renderer0-mm-1-image-0", params=producer.told["p"])
    consumer.step()
    assert consumer.computed_tokens == len(TOKENS), "in its first step"


def test_it_is_said_at_start_where_a_model_takes_media(
    make: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> bool:
        found = "requests with media are not stored" in caplog.text
        caplog.clear()
        return found

    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        picture_engine(make, **COUNTED)
        assert said()
        for settings in TOLD:
            picture_engine(make, **settings)
        make(prefix_caching=False)
        assert not said()
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)


def test_names_that_users_give_are_for_one_salt_where_the_operator_says_so(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    def engine() -> ModelEngine:
        return picture_engine(make, **TOLD[0], media_needs_salt=True)

    for salt in (None, ""):
        assert run(engine(), "unsalted", CAT, "mine", cache_salt=salt) == 0
    assert store.sealed() == []
    assert run(engine(), "a", CAT, "mine", cache_salt="tenant-a") == 0
    assert run(engine(), "b", DOG, "mine", cache_salt="tenant-b") == 0
    assert run(engine(), "again", CAT, "mine", cache_salt="tenant-a") == 2 * BLOCK
    text = engine()
    text.serve("text", TOKENS)
    assert len(store.sealed()) == 3 * 2, "text needs no salt"
