"""KVTransferConfig: what it takes, what it refuses and says, where it comes from."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from each_input import each

from connector.transfer import config as config_module
from connector.transfer.config import KVTransferConfig
from kvstore import UsageError

FULL: dict[str, Any] = {
    "kv_connector": "KVStoreConnector",
    "engine_id": "engine-1",
    "kv_buffer_device": "cpu",
    "kv_buffer_size": 5e8,
    "kv_role": "kv_both",
    "kv_rank": 1,
    "kv_parallel_size": 2,
    "kv_ip": "10.0.0.1",
    "kv_port": 1234,
    "kv_connector_extra_config": {"url": "redis://host:6379", "block_tokens": 64},
    "kv_connector_module_path": "my.module",
    "enable_permute_local_kv": True,
    "kv_load_failure_policy": "fail",
}


def test_every_field_can_be_given_and_comes_back() -> None:
    assert set(FULL) == {f.name for f in dataclasses.fields(KVTransferConfig)}
    config = KVTransferConfig.from_dict(FULL)
    assert config.to_dict() == FULL
    assert KVTransferConfig.from_json(json.dumps(FULL)) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_without_a_connector_nothing_is_transferred() -> None:
    config = KVTransferConfig()
    assert (config.kv_port, config.kv_buffer_size, config.kv_ip) == (14579, 1e9, "127.0.0.1")
    assert config.kv_load_failure_policy == "recompute"
    assert not config.is_kv_transfer_instance
    # A role alone is not enough.
    lone = KVTransferConfig(kv_role="kv_both")
    parts = (lone.is_kv_transfer_instance, lone.is_kv_producer, lone.is_kv_consumer)
    assert parts == (False, False, False)


@pytest.mark.parametrize(
    ("role", "producer", "consumer"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_role_says_who_saves_and_who_loads(role: Any, producer: bool, consumer: bool) -> None:
    config = KVTransferConfig(kv_connector="C", kv_role=role)
    assert config.is_kv_transfer_instance
    assert (config.is_kv_producer, config.is_kv_consumer) == (producer, consumer)


def test_engines_get_ids_of_their_own() -> None:
    ids = {KVTransferConfig().engine_id for _ in range(3)}
    assert len(ids) == 3
    assert all(ids)
    assert KVTransferConfig.from_dict({"engine_id": None}).engine_id


@each(
    ("field", "value", "says"),
    [
        ("kv_role", "kv_sender", "kv_producer, kv_consumer, kv_both"),
        ("kv_role", None, "must be given with kv_connector"),
        ("kv_connector", "", "not empty"),
        ("kv_connector", 7, "must be a string"),
        ("engine_id", 7, "must be a string"),
        ("kv_buffer_device", "", "not empty"),
        ("kv_buffer_device", None, "must be a string"),
        ("enable_permute_local_kv", "maybe", "must be true or false"),
        ("enable_permute_local_kv", 2, "must be true or false"),
        ("enable_permute_local_kv", None, "must be true or false"),
        ("kv_buffer_size", 0, "above 0"),
        ("kv_buffer_size", float("nan"), "above 0"),
        ("kv_buffer_size", float("inf"), "above 0"),
        ("kv_buffer_size", True, "above 0"),
        ("kv_buffer_size", "1GB", "above 0"),
        ("kv_buffer_size", "nan", "above 0"),
        ("kv_rank", 2, "from 0 to 1"),
        ("kv_rank", -1, "at least 0"),
        ("kv_parallel_size", 0, "from 1"),
        ("kv_ip", "", "not empty"),
        ("kv_port", 0, "from 1 to 65535"),
        ("kv_port", 65536, "from 1 to 65535"),
        ("kv_port", True, "from 1 to 65535"),
        ("kv_port", "65536", "from 1 to 65535"),
        ("kv_port", "1e3", "from 1 to 65535"),
        ("kv_port", 1.5, "from 1 to 65535"),
        ("kv_connector_extra_config", [1], "must be a table of names"),
        ("kv_connector_extra_config", {1: 2}, "must be a table of names"),
        ("kv_connector_module_path", "", "not empty"),
        ("kv_load_failure_policy", "ignore", "recompute, fail"),
    ],
)
def test_refusal_names_the_field_and_the_limit(field: str, value: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        KVTransferConfig.from_dict({**FULL, field: value})
    assert caught.value.field == field
    assert says in str(caught.value)


PEOPLES_DOCUMENTS = {
    "prefill and decode by NCCL, of the first release": (
        '{"kv_connector":"PyNcclConnector","kv_role":"kv_consumer","kv_rank":1,'
        '"kv_parallel_size":2,"kv_buffer_size":5e9,"kv_ip":"10.0.0.1","kv_port":14579}',
        {"kv_rank": 1, "kv_parallel_size": 2, "kv_buffer_size": 5e9, "kv_ip": "10.0.0.1"},
    ),
    "a rank without the number of engines": (
        '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_consumer","kv_rank":1}',
        {"kv_rank": 1, "kv_parallel_size": 1},
    ),
    "numbers in quotes": (
        '{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_buffer_size":"1e1",'
        '"kv_port":"21001","kv_connector_extra_config":{"http_port":"20003"}}',
        {"kv_buffer_size": 10.0, "kv_port": 21001},
    ),
    "other devices": (
        '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"xpu",'
        '"enable_permute_local_kv":"True"}',
        {"kv_buffer_device": "xpu", "enable_permute_local_kv": True},
    ),
    "of a platform that is a plug-in": (
        '{"kv_connector":"AscendStoreConnector","kv_role":"kv_both","kv_buffer_device":"npu"}',
        {"kv_buffer_device": "npu"},
    ),
}


@each("name", PEOPLES_DOCUMENTS)
def test_documents_that_vllms_releases_take_are_taken(name: str) -> None:
    document, expected = PEOPLES_DOCUMENTS[name]
    config = KVTransferConfig.from_json(document)
    assert {field: getattr(config, field) for field in expected} == expected
    assert KVTransferConfig.from_dict(config.to_dict()) == config


def test_unknown_field_is_refused_and_the_known_are_listed() -> None:
    with pytest.raises(UsageError, match=r"kv_rolle.*kv_role"):
        KVTransferConfig.from_dict({"kv_rolle": "kv_both"})


@pytest.mark.parametrize("document", ["{", "[1]", '"x"', '{"a":' + " " * (1 << 20) + "1}"])
def test_document_that_is_no_small_json_object_is_refused(document: str) -> None:
    with pytest.raises(UsageError) as caught:
        KVTransferConfig.from_json(document)
    assert caught.value.field == "kv_transfer_config"


def test_extra_settings_are_copied_and_found_by_name() -> None:
    extra = {"url": "redis://host"}
    config = KVTransferConfig(kv_connector_extra_config=extra)
    extra["url"] = "redis://other"
    assert config.get_from_extra_config("url", None) == "redis://host"
    assert config.get_from_extra_config("missing", 3) == 3


def test_hash_is_the_same_for_all_as_nothing_here_changes_the_computation() -> None:
    hashes = {KVTransferConfig().compute_hash(), KVTransferConfig.from_dict(FULL).compute_hash()}
    assert len(hashes) == 1
    assert len(hashes.pop()) == 64


def test_connectors_of_a_multi_connector_are_found() -> None:
    children = [{"kv_connector": "A"}, {"kv_connector": "B"}]
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    assert config.has_connector("MultiConnector")
    assert config.has_connector("B")
    assert not config.has_connector("C")
    for odd in (None, ["A"]):
        config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": odd},
        )
        assert not config.has_connector("A")
    single = KVTransferConfig(kv_connector="A", kv_role="kv_both")
    assert single.has_connector("A")
    assert not single.has_connector("B")


def test_environment_without_variables_means_no_connector() -> None:
    config = KVTransferConfig.from_env({"KVSTORE_KV_ROLE": "", "KVSTORE_KV_TRANSFER_CONFIG": ""})
    assert not config.is_kv_transfer_instance


def test_every_field_can_come_from_a_variable_of_its_own() -> None:
    environ = {
        f"KVSTORE_{name.upper()}": json.dumps(value) if isinstance(value, dict) else str(value)
        for name, value in FULL.items()
    }
    assert KVTransferConfig.from_env(environ).to_dict() == FULL


def test_variable_of_a_field_wins_over_the_document() -> None:
    environ = {"KVSTORE_KV_TRANSFER_CONFIG": json.dumps(FULL), "KVSTORE_KV_PORT": "99"}
    assert KVTransferConfig.from_env(environ).to_dict() == {**FULL, "kv_port": 99}


def test_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_ENGINE_ID", "from-env")
    assert KVTransferConfig.from_env().engine_id == "from-env"


@each(
    ("variable", "text"),
    [
        ("KVSTORE_KV_PORT", "x"),
        ("KVSTORE_KV_BUFFER_SIZE", "1GB"),
        ("KVSTORE_ENABLE_PERMUTE_LOCAL_KV", "maybe"),
        ("KVSTORE_KV_CONNECTOR_EXTRA_CONFIG", "[]"),
        ("KVSTORE_KV_TRANSFER_CONFIG", "{"),
    ],
)
def test_refusal_of_a_variable_names_the_variable(variable: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        KVTransferConfig.from_env({variable: text})
    assert caught.value.field == variable


def test_buffer_is_in_cuda_memory_only_where_there_is_a_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config_module, "CUDA_DEVICES", (tmp_path / "none",))
    assert KVTransferConfig().kv_buffer_device == "cpu"
    monkeypatch.setattr(config_module, "CUDA_DEVICES", (tmp_path / "none", tmp_path))
    assert KVTransferConfig().kv_buffer_device == "cuda"
