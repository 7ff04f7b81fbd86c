"""What `kvstore run` adds to a command. Against vLLM's own parser:
tests/cli/test_vllm_command.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvstore.cli.engine_command import config_file, entry, given, merged, planned, transfer_config
from kvstore.errors import UsageError

OURS = transfer_config({})
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "engine_id": "e"}
LMCACHE = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
API_SERVER = "vllm.entrypoints.openai.api_server"


def plan(*command: str, **more: Any) -> list[str]:
    options = {"key_prefix": "kv:default", "merge": False, **more}
    return planned(command, options.pop("config", None), options.pop("env", {}), **options)


def connectors(config: dict[str, Any]) -> list[str]:
    return [one["kv_connector"] for one in config["kv_connector_extra_config"]["connectors"]]


@pytest.mark.parametrize(
    ("command", "engine", "arguments"),
    [
        ("vllm serve M --port 1", "vLLM", "M --port 1"),
        ("/opt/v/bin/vllm serve M", "vLLM", "M"),
        (f"python -m {API_SERVER} --model M", "vLLM", "--model M"),
        (f"/opt/v/bin/python3.11 -u -X dev -Wd -m {API_SERVER} --model M", "vLLM", "--model M"),
        (f"python -um {API_SERVER}", "vLLM", ""),
        ("python -m vllm.entrypoints.cli.main serve M", "vLLM", "M"),
        ("python3 /opt/v/bin/vllm serve M", "vLLM", "M"),
        ("numactl -N 0 vllm serve M", "vLLM", "M"),
        ("env A=1 taskset -c 0-3 python -m sglang.launch_server --model M", "SGLang", "--model M"),
        ("uv run vllm serve M", "vLLM", "M"),
        ("sglang serve M", "SGLang", "M"),
        ("python -m sglang.launch_server --model-path M", "SGLang", "--model-path M"),
    ],
)
def test_engines_are_known_by_every_way_to_start_their_servers(
    command: str, engine: str, arguments: str
) -> None:
    words = command.split()
    found = entry(words)
    assert found is not None
    name, at = found
    assert (name, " ".join(words[at:])) == (engine, arguments)


@pytest.mark.parametrize(
    "command",
    [
        "vllm",
        "vllm bench serve",
        "vllm chat",
        "python",
        "python -m",
        "python -m vllm.entrypoints.cli.main",
        "python -m vllm.entrypoints.cli.main bench",
        "python -c pass vllm serve",
        "python x.py serve",
        "python python vllm serve",
        "docker run image vllm serve M",
        "ssh host vllm serve M",
        "bash -c 'vllm serve M'",
        "trtllm-serve M",
        "env",
        "sleep 1",
    ],
)
def test_for_any_other_command_it_says_what_to_add(command: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan(*command.split())
    said = str(refused.value)
    assert said.startswith("command=")
    for needed in ("nothing was started", "KVSTORE_URL", "--kv-transfer-config", "recompute"):
        assert needed in said
    assert "--hicache-storage-backend dynamic" in said


def test_the_key_prefix_of_the_store_is_given_to_the_engine() -> None:
    *_, document = plan("vllm", "serve", "M", key_prefix="kv:x")
    assert json.loads(document)["kv_connector_extra_config"] == {"key_prefix": "kv:x"}
    *_, document = plan("sglang", "serve", "M", key_prefix="kv:x")
    assert json.loads(document)["key_prefix"] == "kv:x"


@pytest.mark.parametrize(
    "name", ["VLLM_KV_TRANSFER_CONFIG", "KV_TRANSFER_CONFIG", "vllm_kv_offloading_size"]
)
@pytest.mark.parametrize("by_env", [False, True])
def test_a_connector_in_the_environment_is_refused_by_name(name: str, by_env: bool) -> None:
    value = "8" if name.lower().endswith("size") else json.dumps(LMCACHE)
    command = ["env", f"{name}={value}"] if by_env else []
    env = {} if by_env else {name: value}
    with pytest.raises(UsageError, match=f"'{name} in the environment'"):
        plan(*command, "vllm", "serve", "M", env=env)
    *_, option, document = plan(*command, "vllm", "serve", "M", env=env, merge=True)[
        : None if value != "8" else -2
    ]
    assert option == "--kv-transfer-config"
    assert len(connectors(json.loads(document))) == 2
    assert plan("vllm", "serve", "M", env={name: ""})[-2] == "--kv-transfer-config"


def test_the_command_is_left_as_it_is_but_for_what_is_merged() -> None:
    words = ["--seed", "0", "--kv_transfer_config", json.dumps(LMCACHE), "--port", "1"]
    made = plan("vllm", "serve", "M", *words, merge=True)
    assert made[:-1] == ["vllm", "serve", "M", *words[:2], *words[4:], "--kv-transfer-config"]


def test_every_option_that_is_in_the_way_is_named() -> None:
    words = [
        "--kv_transfer-config={}",
        "--kv-transfer.kv_role",
        "kv_both",
        "--kv_offloading_size=1",
    ]
    with pytest.raises(UsageError) as refused:
        plan("vllm", "serve", "M", *words, config={"kv-offloading-size": 8})
    said = str(refused.value)
    for name in (
        "--kv_transfer-config;",
        "--kv-transfer.kv_role (--kv-transfer-config)",
        "--kv_offloading_size",
        "--kv-offloading-size in the",
    ):
        assert name in said


def test_what_a_file_says_with_dots_cannot_be_merged() -> None:
    config = {"kv-transfer-config.kv_connector": "LMCacheMPConnector"}
    with pytest.raises(UsageError, match=r"kv_connector in c\.yaml.*without a dot"):
        plan("vllm", "serve", "M", "--config", "c.yaml", config=config, merge=True)


@pytest.mark.parametrize("raw", ["[]", "{", "text"])
def test_what_is_no_object_cannot_be_merged(raw: str) -> None:
    with pytest.raises(UsageError, match="no object in JSON"):
        plan("vllm", "serve", "M", "--kv-transfer-config", raw, merge=True)


def test_ours_stands_behind_those_that_hand_over_and_before_other_caches() -> None:
    config = merged(NIXL, OURS)
    assert connectors(config) == ["NixlConnector", "KVStoreConnector"]
    assert (config["kv_role"], config["engine_id"]) == ("kv_producer", "e")
    assert "engine_id" not in config["kv_connector_extra_config"]["connectors"][0]
    assert connectors(merged(LMCACHE, OURS)) == ["KVStoreConnector", "LMCacheMPConnector"]


def test_a_multi_connector_gets_one_more() -> None:
    theirs = merged(NIXL, LMCACHE)
    assert connectors(merged(theirs, OURS)) == [
        "NixlConnector",
        "KVStoreConnector",
        "LMCacheMPConnector",
    ]


@pytest.mark.parametrize("own", [OURS, merged(NIXL, OURS)])
def test_a_store_that_is_there_keeps_its_settings(own: dict[str, Any]) -> None:
    theirs = {**own, "kv_load_failure_policy": "fail"}
    assert merged(theirs, OURS) == {**theirs, "kv_load_failure_policy": "recompute"}


def test_a_config_without_a_connector_gets_ours() -> None:
    assert merged({"engine_id": "e"}, OURS) == {"engine_id": "e", **OURS}


def test_the_config_file_is_the_word_behind_config() -> None:
    assert config_file(["M", "--config", "c.yaml"]) == "c.yaml"
    assert config_file(["M", "--config=c.yaml"]) is None
    assert config_file(["M", "--config"]) is None


# --- SGLang -----------------------------------------------------------------


def test_sglang_gets_a_host_tier_and_the_store_behind_it() -> None:
    made = plan("sglang", "serve", "M")
    assert made[3:8] == [
        *("--enable-hierarchical-cache", "--hicache-mem-layout", "page_first"),
        *("--hicache-storage-backend", "dynamic"),
    ]
    assert json.loads(made[-1])["class_name"] == "KVStoreHiCache"


@pytest.mark.parametrize("tier", ["--enable-hierarchical-cache", "--enable-hicache"])
def test_what_sglang_was_told_of_its_host_tier_stays(tier: str) -> None:
    words = [tier, "--hicache-mem-layout", "page_head"]
    made = plan("sglang", "serve", "M", *words)
    assert made[:6] == ["sglang", "serve", "M", *words]
    assert made[6] == "--hicache-storage-backend"


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        ["--hicache-storage-backend", "mooncake"],
        ["--hicache-storage-backend=file"],
        ["--enable-lmcache"],
        ["--enable-unified-cache-external-linker"],
    ],
)
def test_another_store_of_sglang_is_refused_by_name(words: list[str], merge: bool) -> None:
    with pytest.raises(UsageError, match=words[0].partition("=")[0]):
        plan("sglang", "serve", "M", *words, merge=merge)
    config = {words[0].strip("-").partition("=")[0]: words[-1].partition("=")[2] or words[-1]}
    with pytest.raises(UsageError, match="is another store"):
        plan("sglang", "serve", "M", "--config", "c.yaml", config=config, merge=merge)


def test_settings_of_the_store_are_kept_when_asked() -> None:
    mine = json.dumps({"class_name": "KVStoreHiCache", "tp_lcm_size": 4})
    words = ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-e", mine]
    with pytest.raises(UsageError, match="--merge; so has --hicache-storage-backend-e"):
        plan("sglang", "serve", "M", *words)
    made = json.loads(plan("sglang", "serve", "M", *words, merge=True)[-1])
    assert (made["tp_lcm_size"], made["backend_name"]) == (4, "kvstore")
    other = json.dumps({"class_name": "Other"})
    with pytest.raises(UsageError, match="is another store"):
        plan("sglang", "serve", "M", "--hicache-storage-backend-extra-config", other, merge=True)
    with pytest.raises(UsageError, match="no object"):
        plan("sglang", "serve", "M", "--hicache-storage-backend-extra-config", "@f", merge=True)


def test_a_key_without_its_value_is_no_reason_to_fail() -> None:
    assert [g.value for g in given(["--kv-transfer-config"], ["--kv-transfer-config"])] == [None]
    assert [g.value for g in given(["--kv-transfer-config", "--x"], ["--kv-transfer-config"])] == [
        None
    ]
