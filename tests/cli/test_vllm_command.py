"""What `kvstore run` makes of a vLLM command, against vLLM's own parser: every spelling of a KV
connector is seen, and what is added is what vLLM takes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from kvstore.cli.engine_command import CONNECTOR, MULTI, planned, transfer_config
from kvstore.errors import UsageError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

MODULE = "vllm.entrypoints.openai.api_server"
DOCUMENT = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
ROLE = ["--kv-transfer-config.kv_role", "kv_both"]
SPELLINGS: dict[str, list[str]] = {
    "dashes": ["--kv-transfer-config", DOCUMENT],
    "underscores": ["--kv_transfer_config", DOCUMENT],
    "mixed": ["--kv_transfer-config", DOCUMENT],
    "equals": [f"--kv-transfer-config={DOCUMENT}"],
    "underscores and equals": [f"--kv_transfer_config={DOCUMENT}"],
    "cut short": ["--kv-transfer", DOCUMENT],
    "cut shorter": [f"--kv_t={DOCUMENT}"],
    "dotted": ["--kv-transfer-config.kv_connector", "ExampleConnector", *ROLE],
    "dotted with underscores": ["--kv_transfer_config.kv_connector=ExampleConnector", *ROLE],
    "dotted, cut short": ["--kv-tr.kv_connector=ExampleConnector", "--kv-tr.kv_role", "kv_both"],
    "twice, the last counts": [
        *("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'),
        *("--kv-transfer-config", DOCUMENT),
    ],
    "dotted beats what follows": [
        *("--kv-transfer-config.kv_connector", "ExampleConnector", *ROLE),
        *("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'),
    ],
    "deep dots": [
        *("--kv-transfer-config.kv_connector", "ExampleConnector", *ROLE),
        *("--kv-transfer-config.kv_connector_extra_config.a.b", "[1, 2]"),
        "--kv-transfer-config.kv_connector_extra_config.a.b+=x,y",
        *("--kv-transfer-config.kv_connector_extra_config.bytes", "2G"),
        *("--kv-transfer-config.kv_connector_extra_config.some", "1.5k"),
    ],
    "before others": [
        "--kv-transfer-config",
        DOCUMENT,
        "--port",
        "8001",
        "--lora-modules",
        "a=/a",
        "b=/b",
    ],
}
OFFLOADS: dict[str, list[str]] = {
    "dashes": ["--kv-offloading-size", "2"],
    "underscores": ["--kv_offloading_size=2"],
    "cut short": ["--kv-offloading-s", "2"],
    "a backend": ["--kv_offloading_size", "2", "--kv-offloading-backend", "lmcache"],
    "beside a connector": ["--kv-transfer-config", DOCUMENT, "--kv-offloading-size", "2"],
}
NONE: dict[str, list[str]] = {
    "nothing": [],
    "another that begins so": ["--kv-cache-dtype", "auto", "--kv-events-config", "{}"],
    "as a value": ["--served-model-name=--kv-transfer-config", "--chat-template", "kv-transfer"],
    "said to be none": ["--kv-transfer-config", "None", "--kv-offloading-size", ""],
    "a backend alone": ["--kv-offloading-backend", "native"],
}
IN_FILES: dict[str, dict[str, Any]] = {
    "dashes": {"kv-transfer-config": json.loads(DOCUMENT)},
    "underscores, text": {"kv_transfer_config": DOCUMENT, "port": 8001, "enforce-eager": True},
    "cut short": {"kv-tr": json.loads(DOCUMENT)},
    "offloading": {"kv_offloading_size": 2},
}


def parsed(form: str, command: list[str]) -> tuple[KVTransferConfig | None, float | None]:
    """What vLLM makes of the arguments of `command`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    whole = FlexibleArgumentParser()
    if form == "serve":
        make_arg_parser(whole.add_subparsers(dest="subparser").add_parser("serve"))
        found = whole.parse_args(command[command.index("serve") :])
    else:
        found = make_arg_parser(whole).parse_args(command[command.index(MODULE) + 1 :])
    return found.kv_transfer_config, found.kv_offloading_size


def command_of(form: str, options: list[str]) -> list[str]:
    if form == "serve":
        return ["vllm", "serve", "MODEL", *options]
    return ["python", "-m", MODULE, "--model", "MODEL", *options]


def plan(command: list[str], *, merge: bool = False, config: object = None) -> list[str]:
    return planned(command, config, {}, key_prefix="kv:default", merge=merge)


def as_told(config: KVTransferConfig | None, ours: dict[str, Any]) -> bool:
    return config is not None and all(getattr(config, k) == v for k, v in ours.items())


both = pytest.mark.parametrize("form", ["serve", "module"])


@both
@pytest.mark.parametrize("options", NONE.values(), ids=NONE)
def test_where_vllm_has_no_connector_it_gets_ours(form: str, options: list[str]) -> None:
    command = command_of(form, options)
    assert parsed(form, command) == (None, None)
    config, size = parsed(form, plan(command))
    assert as_told(config, transfer_config({}))
    assert size is None


@both
@pytest.mark.parametrize("options", SPELLINGS.values(), ids=SPELLINGS)
def test_a_connector_however_spelt_is_refused_by_name_and_merged_when_asked(
    form: str, options: list[str]
) -> None:
    command = command_of(form, options)
    theirs, _ = parsed(form, command)
    assert theirs is not None
    assert theirs.kv_connector == "ExampleConnector"
    spelt = options[0].partition("=")[0].partition(".")[0]
    with pytest.raises(UsageError, match=f"{spelt}.*--merge"):
        plan(command)
    config, _ = parsed(form, plan(command, merge=True))
    check_both(config, theirs)


def test_what_is_added_stands_before_two_dashes() -> None:
    command = ["vllm", "serve", "--port", "8001", "--", "MODEL"]
    config, _ = parsed("serve", plan(command))
    assert as_told(config, transfer_config({}))


def check_both(config: KVTransferConfig | None, theirs: KVTransferConfig) -> None:
    """Both are there, and `theirs` is what vLLM made of it when it was alone."""
    from vllm.config import KVTransferConfig

    assert config is not None
    assert (config.kv_connector, config.kv_role) == (MULTI, "kv_both")
    assert config.kv_load_failure_policy == "recompute"
    ours, other = config.kv_connector_extra_config["connectors"]
    assert ours == {"kv_connector": CONNECTOR, "kv_role": "kv_both"}
    made = KVTransferConfig(**other, engine_id=config.engine_id)  # as MultiConnector makes it
    for field in fields(KVTransferConfig):
        if field.name not in ("engine_id", "kv_load_failure_policy"):
            assert getattr(made, field.name) == getattr(theirs, field.name), field.name


@both
@pytest.mark.parametrize("options", OFFLOADS.values(), ids=OFFLOADS)
def test_offloading_is_refused_by_name_and_merged_as_the_connector_that_vllm_makes_of_it(
    form: str, options: list[str]
) -> None:
    command = command_of(form, options)
    assert parsed(form, command)[1] == 2
    with pytest.raises(UsageError, match=r"--kv.offloading.s"):
        plan(command)
    config, size = parsed(form, plan(command, merge=True))
    assert size is None, "else vLLM puts its own in the place of both"
    assert config is not None
    ours, other = config.kv_connector_extra_config["connectors"]
    assert ours["kv_connector"] == CONNECTOR
    expected = made_by_vllm(*parsed(form, command), "lmcache" in options)
    assert other["kv_connector"] == expected.kv_connector
    assert other.get("kv_connector_extra_config", {}) == expected.kv_connector_extra_config


def made_by_vllm(
    config: KVTransferConfig | None, size: float | None, lmcache: bool
) -> KVTransferConfig:
    from types import SimpleNamespace

    from vllm.config import VllmConfig

    backend = "lmcache" if lmcache else "native"
    cache = SimpleNamespace(kv_offloading_size=size, kv_offloading_backend=backend)
    whole = SimpleNamespace(cache_config=cache, kv_transfer_config=config)
    VllmConfig._post_init_kv_transfer_config(whole)
    made: KVTransferConfig = whole.kv_transfer_config
    return made


@both
@pytest.mark.parametrize("config", IN_FILES.values(), ids=IN_FILES)
def test_a_connector_in_a_config_file_is_refused_by_name_and_merged_when_asked(
    form: str, config: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(yaml.safe_dump(config))
    command = command_of(form, ["--config", str(file), "--seed", "1"])
    theirs, size = parsed(form, command)
    assert theirs is not None or size == 2
    with pytest.raises(UsageError, match=r"--kv.* in .*vllm\.yaml"):
        plan(command, config=config)
    merged, size = parsed(form, plan(command, config=config, merge=True))
    assert size is None
    check_both(merged, theirs or made_by_vllm(None, 2, lmcache=False))


def test_no_option_of_vllm_is_taken_for_one_of_ours_that_is_cut_short() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvstore.cli.engine_command import BACKEND, OFFLOAD, TRANSFER, given

    known = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    ours = (TRANSFER, OFFLOAD, BACKEND)
    assert set(ours) <= known.keys()
    assert {o for o in known if list(given([o, "x"], ours))} == set(ours)
