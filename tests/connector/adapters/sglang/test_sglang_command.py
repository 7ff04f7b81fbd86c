"""What `kvstore run` makes of an SGLang command, against SGLang's own parser."""

from __future__ import annotations

import argparse
import json

import pytest

from kvstore.cli.engine_command import HICACHE_OPTIONS, given, planned
from kvstore.errors import UsageError

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def plan(*words: str) -> list[str]:
    command = ["sglang", "serve", "--model-path", "M", *words]
    return planned(command, None, {}, key_prefix="kv:x", merge=False)[2:]


def test_what_is_added_is_what_sglang_takes(parser: argparse.ArgumentParser) -> None:
    found = parser.parse_args(plan("--port", "1"))
    assert found.enable_hierarchical_cache
    assert (found.hicache_storage_backend, found.hicache_mem_layout) == ("dynamic", "page_first")
    extra = json.loads(found.hicache_storage_backend_extra_config)
    assert (extra["class_name"], extra["key_prefix"]) == ("KVStoreHiCache", "kv:x")


def test_each_option_of_a_storage_is_seen_and_none_that_is_another(
    parser: argparse.ArgumentParser,
) -> None:
    seen = {o for o in parser._option_string_actions if list(given([o, "x"], HICACHE_OPTIONS))}
    assert seen == set(HICACHE_OPTIONS)


@pytest.mark.parametrize(
    "words",
    [
        ["--hicache-storage-backend-e", "{}"],
        ["--hicache-storage-backend=mooncake"],
        ["--enable-lm"],
        ["--enable-unified-cache-external"],
    ],
)
def test_what_sglang_reads_as_a_store_is_refused(
    parser: argparse.ArgumentParser, words: list[str]
) -> None:
    parser.parse_args(["--model-path", "M", *words])
    with pytest.raises(UsageError, match="stor"):
        plan(*words)
