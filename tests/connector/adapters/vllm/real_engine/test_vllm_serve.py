"""Real API servers, started with the commands of docs/engines.md: answers, /metrics, events.

One server has the store alone, one has it beside a connector of vLLM's inside
vLLM's MultiConnector and publishes events. As in test_vllm_engine.py prompts are
T + 2 tokens and every server splits its prefill at T.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import ModelShape, build_model, cpu_dtype
from redis_servers import RedisServer
from stores import NodeProcess
from vllm_server import (
    PROJECT,
    Subscriber,
    VllmServer,
    build_tokenizer,
    changed,
    commands,
    kvstore_settings,
)

from connector.metrics import METRICS
from kvstore.testing.ports import held_ports

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]
BLOCK = 64
ENGINE_BLOCK = 32
T = 4 * BLOCK
WAIT_S = 60.0


class Servers(NamedTuple):
    alone: VllmServer
    beside: VllmServer
    """The one inside MultiConnector."""
    events: Subscriber
    """Of `beside`."""
    files: Path
    """Where the other connector of `beside` keeps its KV."""


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 500) for _ in range(T + 2)] for _ in range(count)]


@pytest.fixture(scope="module")
def events_port() -> Iterator[int]:
    """Held: its server binds it half a minute later, and others take ports meanwhile."""
    with held_ports(1) as (port,):
        yield port


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, events_port: int) -> Iterator[Servers]:
    path = tmp_path_factory.mktemp("serve")
    model = build_model(path / "llama", ModelShape(context_tokens=1024))
    build_tokenizer(model, 512)
    redis = RedisServer()
    node = NodeProcess(redis)
    place = {**node.engine_settings, "load_timeout_s": 30.0, "block_tokens": BLOCK}
    files = path / "files"
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }

    def here(transfer: dict[str, Any]) -> None:
        (settings,) = kvstore_settings(transfer)
        settings.update(place)
        for child in transfer["kv_connector_extra_config"].get("connectors", ())[1:]:
            child["kv_connector_extra_config"]["shared_storage_path"] = str(files)

    def start(command: list[str], name: str) -> VllmServer:
        command = changed(command, "--kv-transfer-config", here)
        if "--kv-events-config" in command:
            endpoint = {"endpoint": f"tcp://*:{events_port}"}
            command = changed(command, "--kv-events-config", lambda config: config.update(endpoint))
        command[command.index("MODEL")] = str(model)
        small = (
            f"--dtype {cpu_dtype()} --enforce-eager --block-size {ENGINE_BLOCK} --seed 0 "
            f"--max-model-len 1024 --max-num-batched-tokens {T} --max-num-seqs 8 "
            "--num-gpu-blocks-override 128"
        )
        return VllmServer([*command, *small.split()], env, path / f"{name}.log")

    first, second, *_ = commands(PROJECT / "docs" / "engines.md")  # alone, under MultiConnector
    started: list[VllmServer] = []
    subscriber = Subscriber(events_port)
    try:
        started += [start(first, "alone"), start(second, "beside")]
        for server in started:
            server.wait()
        yield Servers(*started, subscriber, files)
    finally:
        for server in started:
            server.close()
        subscriber.close()
        node.close()
        redis.close()


def counted(server: VllmServer, name: str, at_least: float = 1) -> dict[str, float]:
    """/metrics, once `name` has come so far; small requests keep the server stepping, for it
    hands out what was counted with its steps."""
    found = {}
    for i in range(int(WAIT_S)):
        found = server.metrics()
        if found.get(name, 0) >= at_least:
            return found
        server.complete([2 + i, 3, 4], max_tokens=2)
    raise AssertionError(f"{name} is {found.get(name)}, not {at_least}")


def test_every_metric_is_in_metrics_from_the_start(servers: Servers) -> None:
    for server in (servers.alone, servers.beside):
        found = server.metrics()
        for metric in METRICS:
            if not metric.label:
                suffix = "_count" if metric.buckets else "_total"
                assert f"vllm:{metric.name}{suffix}" in found


def test_every_metric_of_the_dashboard_is_in_metrics_from_the_start(servers: Servers) -> None:
    dashboard = PROJECT / "deploy" / "grafana" / "dashboards" / "kvstore.json"
    asked = set(re.findall(r"vllm:\w+", dashboard.read_text()))
    assert asked <= {name.partition("{")[0] for name in servers.alone.metrics()}


def test_what_one_server_computed_the_other_loads_and_both_count_it(servers: Servers) -> None:
    wanted = prompts(3, seed=1)
    answers = [servers.alone.complete(prompt) for prompt in wanted]
    blocks = len(wanted) * T // BLOCK
    saved = counted(servers.alone, "vllm:kvstore_saved_blocks_total", blocks)
    assert saved["vllm:kvstore_saved_blocks_total"] == blocks
    assert saved["vllm:kvstore_saved_bytes_total"] % blocks == 0
    assert saved["vllm:kvstore_save_seconds_count"] >= 1
    before = servers.beside.metrics()
    assert [servers.beside.complete(prompt) for prompt in wanted] == answers
    after = counted(
        servers.beside,
        "vllm:kvstore_hit_tokens_total",
        before["vllm:kvstore_hit_tokens_total"] + len(wanted) * T,
    )

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("vllm:kvstore_loaded_blocks_total") == blocks
    assert grown("vllm:kvstore_loaded_bytes_total") == saved["vllm:kvstore_saved_bytes_total"]
    assert grown("vllm:kvstore_read_bytes_total{shm}") >= grown("vllm:kvstore_loaded_bytes_total")
    assert grown("vllm:kvstore_load_seconds_count") == len(wanted)
    assert grown("vllm:kvstore_found_blocks_total") >= blocks
    assert grown("vllm:external_prefix_cache_hits_total") == len(wanted) * T
    assert grown("vllm:prompt_tokens_cached_by_source_total{host}") == len(wanted) * T


def test_the_reason_of_a_miss_is_a_label(servers: Servers) -> None:
    name = "vllm:kvstore_missed_requests_total{never-stored}"
    before = servers.alone.metrics().get(name, 0)
    # On a busy machine a lookup may end by its deadline, which is another reason.
    for seed in range(100, 110):
        servers.alone.complete(*prompts(1, seed=seed))
        with suppress(AssertionError):
            assert counted(servers.alone, name, before + 1)[name] > before
            return
    raise AssertionError(servers.alone.metrics())


@pytest.mark.covers("MultiConnector", "engine")
@pytest.mark.covers("KV events", "engine")
def test_a_server_beside_another_connector_saves_to_both_and_says_what_is_stored(
    servers: Servers,
) -> None:
    (prompt,) = prompts(1, seed=3)
    servers.events.poll(0.1)
    servers.events.events.clear()
    files = set(servers.files.glob("*"))
    answer = servers.beside.complete(prompt)
    assert set(servers.files.glob("*")) > files, "the other connector's"
    said: list[Any] = []
    for _ in range(int(WAIT_S)):
        events = servers.events.poll(1.0)
        said = [e for e in events if getattr(e, "medium", None) == "CPU"]
        if sum(len(e.token_ids) for e in said) >= T:
            break
    device = {h for e in servers.events.events if e.medium == "GPU" for h in e.block_hashes}
    assert [t for e in said for t in e.token_ids] == prompt[:T]
    assert {h for e in said for h in e.block_hashes} <= device
    assert all((e.block_size, e.locality) == (ENGINE_BLOCK, "LOCAL") for e in said)
    assert servers.alone.complete(prompt) == answer


def test_trap_the_log_of_a_server_has_what_the_connector_says(servers: Servers) -> None:
    """vLLM writes no INFO of loggers other than its own."""
    counted(servers.alone, "vllm:kvstore_missed_requests_total{never-stored}")
    for server in (servers.alone, servers.beside):
        assert f"kvstore: blocks of {BLOCK} tokens" in server.log
        assert "kv_load_failure_policy is" not in server.log
    assert re.search(
        r"kvstore: request .*: 0 of 256 tokens hit; block 0: never-stored", servers.alone.log
    )
