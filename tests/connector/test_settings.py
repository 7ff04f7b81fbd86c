"""Settings are refused with the field, the value and the limit."""

from __future__ import annotations

from typing import Any

import pytest
from each_input import each

from connector.settings import STORE_SETTINGS, ConnectorSettings
from kvstore import UsageError


def test_defaults_are_good() -> None:
    config = ConnectorSettings.from_extra({})
    assert config.lookup_timeout_s == 1.0
    assert config.save_decode == "auto"


def test_engines_that_ask_for_pages_of_their_own_wait_for_redis_no_longer_than_anybody() -> None:
    assert ConnectorSettings.from_extra({}, only=STORE_SETTINGS).lookup_timeout_s == 0.05
    limits = {"redis_timeout_s": 0.2}
    assert ConnectorSettings.from_extra({"limits": limits}).lookup_timeout_s == 0.2


def test_settings_are_taken_over() -> None:
    config = ConnectorSettings.from_extra({"url": "redis://h:1/2", "block_tokens": 64})
    assert (config.url, config.block_tokens) == ("redis://h:1/2", 64)


def test_a_bound_on_the_life_of_blocks_is_a_field_of_the_namespace_and_not_for_vram() -> None:
    assert ConnectorSettings.from_extra({}).life == {}
    assert ConnectorSettings.from_extra({"ttl_s": 60}, only=STORE_SETTINGS).life == {"ttl_s": 60}
    with pytest.raises(UsageError, match="ttl_s=60"):
        ConnectorSettings.from_extra({"ttl_s": 60, "vram": True})


def test_an_unknown_setting_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'block_token'.*known are.*block_tokens.*url"):
        ConnectorSettings.from_extra({"block_token": 64})


@each(
    ("name", "value"),
    [
        ("url", "redis"),
        ("url", 5),
        ("block_tokens", 0),
        ("block_tokens", 1 << 20),
        ("block_tokens", True),
        ("block_tokens", 64.0),
        ("lookup_timeout_s", 0),
        ("lookup_timeout_s", "0.1"),
        ("load_timeout_s", -1),
        ("save_timeout_s", 1e9),
        ("pinned_fraction", 1.5),
        ("save_decode", "yes"),
        ("layerwise", 1),
        ("verify", "sometimes"),
        ("weights_id", ""),
        ("node", 3),
        ("ttl_s", 0),
        ("ttl_s", 1.5),
        ("ttl_s", 31 * 24 * 3600),
        ("vram_size_bytes", 1 << 20),
        ("vram_size_bytes", 1e9),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}="):
        ConnectorSettings.from_extra({name: value})
