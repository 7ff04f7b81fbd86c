"""docs/llm-d.md and the requests of others' routers: each piece is read by what it is for.

Nothing of llm-d runs here. What its router does with an event, and what it and others send, was
taken from their sources and written anew: llm-d/llm-d-router at ebab687 (22 August 2026),
`pkg/kvevents/pool.go` and `pkg/kvevents/engineadapter/{common,vllm_adapter}.go`,
`pkg/sidecar/proxy/connector_nixlv2.go` and `connector_shared_storage.go`,
`pkg/coordinator/connectors/kv/nixl.go`; vllm-project/vllm at 030ea52,
`tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`; ai-dynamo/dynamo at 690ece4,
`components/src/dynamo/vllm/kv_connector_protocols.py` (`NixlConnectorProtocol`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from test_vllm_hand_over import decode
from vllm_model_config import BLOCK, ENGINE_BLOCK
from vllm_model_engine import MakeEngine, prompt
from vllm_server import commands

yaml: Any = pytest.importorskip("yaml")
pytestmark = pytest.mark.vllm
PAGE = Path(__file__).parents[4] / "docs" / "llm-d.md"
STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
"""Of a stored block, as its adapter orders them; others are passed over."""
INDEXED_KINDS = ("full_attention", "mla_attention", "sink_full_attention")


def options() -> dict[str, Any]:
    """The options of the page's engine, JSON as values."""
    (command,) = commands(PAGE)
    assert command[:3] == ["vllm", "serve", "MODEL"]
    named = dict(zip(command[3::2], command[4::2], strict=True))
    return {
        name: json.loads(value) if value.startswith("{") else value for name, value in named.items()
    }


def picker() -> dict[str, Any]:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return dict(yaml.safe_load(block))


def test_the_engines_options_are_what_vllm_takes() -> None:
    from vllm.config import KVTransferConfig
    from vllm.config.kv_events import KVEventsConfig

    given = options()
    transfer = KVTransferConfig(**given["--kv-transfer-config"])
    assert transfer.kv_load_failure_policy == "recompute"
    events = KVEventsConfig(**given["--kv-events-config"])
    assert events.enable_kv_cache_events
    kind, pod, model = events.topic.split("@")
    assert (kind, pod, model) == ("kv", "POD", "MODEL")


def test_the_router_listens_where_the_engines_speak() -> None:
    given, config = options(), picker()
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    producer = plugins["precise-prefix-cache-producer"]
    listens = producer["kvEventsConfig"]
    spoken = given["--kv-events-config"]
    assert spoken["topic"].startswith(listens["topicFilter"])
    port = int(spoken["endpoint"].rpartition(":")[2])
    assert listens["podDiscoveryConfig"]["socketPort"] == port
    assert producer["tokenProcessorConfig"]["blockSize"] == int(given["--block-size"])


def test_every_plugin_that_the_router_refers_to_is_declared() -> None:
    config = picker()
    declared = {plugin.get("name", plugin["type"]) for plugin in config["plugins"]}
    referred = {
        plugin["pluginRef"]
        for profile in config["schedulingProfiles"]
        for plugin in profile["plugins"]
    }
    for source in config["dataLayer"]["sources"]:
        referred |= {source["pluginRef"], *(one["pluginRef"] for one in source["extractors"])}
    assert referred <= declared
    (scorer,) = (one for one in config["plugins"] if one["type"] == "prefix-cache-scorer")
    assert scorer["parameters"]["prefixMatchInfoProducerName"] in declared


class Index:
    """What llm-d's router makes of events: which tiers of one pod have which of its own blocks."""

    def __init__(self) -> None:
        self.tiers: dict[int, set[str]] = {}
        """By an engine's hash, as 64 bits."""
        self.after: dict[int, tuple[int, tuple[int, ...]]] = {}

    def read(self, payload: bytes) -> None:
        _, events, *_ = msgpack.unpackb(payload)
        for event in events:
            assert isinstance(event, dict), "vLLM 0.32 sends maps"
            getattr(self, f"_{event['type']}")(event)

    def _BlockStored(self, event: dict[str, Any]) -> None:  # noqa: N802  # vLLM's word
        hashes, parent, tokens, size, *_ = (event.get(name) for name in STORED_FIELDS)
        if event.get("group_idx") is not None:  # else it is passed over without a word
            assert event["kv_cache_spec_kind"] in INDEXED_KINDS
            assert len(tokens) == size * len(hashes)
        before = hash64(parent) if parent is not None else 0
        assert not before or before in self.after, "of a block whose parent is unknown"
        for at, raw in enumerate(hashes):
            own = hash64(raw)
            part = tuple(tokens[at * size : (at + 1) * size])
            assert self.after.setdefault(own, (before, part)) == (before, part)
            self.tiers.setdefault(own, set()).add((event.get("medium") or "gpu").lower())
            before = own

    def _BlockRemoved(self, event: dict[str, Any]) -> None:  # noqa: N802
        for raw in event["block_hashes"]:
            self.tiers[hash64(raw)].discard((event.get("medium") or "gpu").lower())


def hash64(raw: int | bytes) -> int:
    """The last eight bytes, big-endian."""
    return raw if isinstance(raw, int) else int.from_bytes(raw[-8:], "big")


def sent(events: list[Any]) -> bytes:
    """As vLLM's own publisher encodes a batch."""
    import msgspec
    from vllm.distributed.kv_events import EventBatch

    return bytes(msgspec.msgpack.Encoder().encode(EventBatch(ts=0.0, events=events)))


def test_its_index_has_blocks_of_the_store_as_a_second_tier(make: MakeEngine) -> None:
    engine, index = make(events=True), Index()
    tokens = prompt(3 * BLOCK + 5)
    engine.serve("a", tokens, max_tokens=1)
    # A pod's events come in this order: what is computed is said before it is saved.
    index.read(sent([e for e in engine.events if e.medium == "GPU"]))
    of_vllm = set(index.after)
    index.read(sent([e for e in engine.events if e.medium == "CPU"]))
    assert set(index.after) == of_vllm, "the same blocks, by the same names"
    assert [*index.tiers.values()] == [{"gpu", "cpu"}] * (3 * BLOCK // ENGINE_BLOCK)


def test_a_block_that_the_store_lost_leaves_that_tier_alone(make: MakeEngine, store: Any) -> None:
    engine, index = make(events=True), Index()
    tokens = prompt(2 * BLOCK + 5)
    engine.serve("a", tokens)
    index.read(sent(engine.events))
    engine.scheduler.reset_prefix_cache()
    (lost, *_) = store.sealed()
    store.evict(lost)
    engine.events.clear()
    engine.serve("again", tokens)
    gone = [e for e in engine.events if type(e).__name__ == "BlockRemoved" and e.medium == "CPU"]
    index.read(sent(gone))
    per_block = BLOCK // ENGINE_BLOCK
    assert sum("cpu" not in tiers for tiers in index.tiers.values()) == per_block


# The four send the same today; a change in one of them is to be a change here.
NULLS = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
ASKED: dict[str, dict[str, Any]] = {
    "vLLM's toy proxy": {"do_remote_decode": True, "do_remote_prefill": False, **NULLS},
    "llm-d's sidecar, nixlv2": {"do_remote_decode": True, "do_remote_prefill": False, **NULLS},
    "Dynamo's prefill worker": {"do_remote_decode": True, "do_remote_prefill": False, **NULLS},
    "llm-d's coordinator": {"do_remote_decode": True, "do_remote_prefill": False, **NULLS},
}


@pytest.mark.parametrize("who", list(ASKED))
@pytest.mark.covers("prefill and decode apart, by the router", "model")
def test_a_router_of_others_hands_a_prompt_over(
    make: MakeEngine, token_by_token: None, who: str
) -> None:
    """Through JSON both ways, as over HTTP, and unread in between."""
    tokens = prompt(2 * BLOCK + 9)
    producer = make()
    producer.serve("p", tokens, max_tokens=1, params=json.loads(json.dumps(ASKED[who])))
    told = json.loads(json.dumps(dict(producer.told["p"])))
    assert told["do_remote_prefill"] is True
    assert decode(make(), tokens, told) == 1


def test_llm_ds_sidecar_without_parameters_meets_in_the_store(
    make: MakeEngine, token_by_token: None
) -> None:
    """`shared-storage`: the same prompt twice, and nothing about KV in either request."""
    tokens = prompt(2 * BLOCK + 9)
    producer = make()
    producer.serve("p", tokens, max_tokens=1)
    engine = make()
    engine.serve("d", tokens, max_tokens=1)
    assert engine.computed_tokens == 9
