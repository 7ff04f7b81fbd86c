"""Which engine a request goes to: by prefix, then by load, then by turn."""

from __future__ import annotations

import pytest

from connector.router.routing import (
    DOWN_S,
    ENGINES_MAX,
    ROUTER_LOAD_GAP_MAX,
    Engine,
    EngineFleet,
    Role,
    held_at,
    needs_prefill,
)
from kvstore import UsageError
from kvstore.spi import Holder, HolderRun

NOW = 100.0


def engine(name: str, role: Role = Role.DECODE, at: str = "") -> Engine:
    return Engine(f"http://{name}", role, at)


def test_the_longest_prefix_decides() -> None:
    a, b = engine("a", at="node-a"), engine("b", at="node-b")
    fleet = EngineFleet([a, b])
    assert fleet.take(Role.DECODE, {"node-a": 1, "node-b": 3}, NOW) is b
    assert fleet.take(Role.DECODE, {"node-a": 4, "node-b": 3}, NOW) is a


def test_without_a_prefix_the_least_loaded_and_then_the_next_in_turn() -> None:
    engines = [engine(name) for name in "abc"]
    fleet = EngineFleet(engines)
    assert [fleet.take(Role.DECODE, {}, NOW) for _ in range(4)] == [*engines, engines[0]]
    for one in engines[:2]:
        one.in_flight = 1
    assert fleet.take(Role.DECODE, {}, NOW) is engines[2]


def test_looking_for_an_engine_is_nobodys_turn() -> None:
    a, b = engine("a"), engine("b")
    fleet = EngineFleet([a, b])
    fleet.choose(Role.DECODE, {}, NOW)
    assert fleet.take(Role.DECODE, {}, NOW) is a
    fleet.choose(Role.DECODE, {}, NOW)
    assert fleet.take(Role.DECODE, {}, NOW) is b


def test_a_prefix_is_not_worth_a_queue() -> None:
    a, b = engine("a", at="node-a"), engine("b")
    fleet = EngineFleet([a, b])
    a.in_flight = ROUTER_LOAD_GAP_MAX
    assert fleet.choose(Role.DECODE, {"node-a": 9}, NOW) is a
    a.in_flight += 1
    assert fleet.choose(Role.DECODE, {"node-a": 9}, NOW) is b


def test_an_engine_that_failed_is_passed_over_until_it_is_time_or_answers() -> None:
    a, b = engine("a"), engine("b")
    fleet = EngineFleet([a, b])
    a.failed(NOW)
    assert fleet.choose(Role.DECODE, {}, NOW) is b
    assert fleet.choose(Role.DECODE, {}, NOW + DOWN_S) is a
    a.failed(NOW)
    a.answered()
    assert fleet.choose(Role.DECODE, {}, NOW) is a


def test_an_engine_whose_blocks_do_not_come_is_passed_over_although_it_answers() -> None:
    a, b = engine("a", Role.PREFILL), engine("b", Role.PREFILL)
    fleet = EngineFleet([a, b])
    a.unsaved(NOW)
    a.answered()
    assert fleet.choose(Role.PREFILL, {}, NOW) is b
    assert fleet.choose(Role.PREFILL, {}, NOW + DOWN_S) is a


def test_when_all_are_down_one_is_tried_and_nobody_twice() -> None:
    a, b = engine("a"), engine("b")
    fleet = EngineFleet([a, b])
    for one in (a, b):
        one.failed(NOW)
    assert fleet.choose(Role.DECODE, {}, NOW, [a]) is b
    assert fleet.choose(Role.DECODE, {}, NOW, [a, b]) is None


def test_a_prefill_engine_that_is_down_is_not_tried() -> None:
    """Decode engines compute what is missing; waiting for a connection would cost more."""
    fleet = EngineFleet([engine("a", Role.PREFILL)])
    fleet.engines[0].failed(NOW)
    assert fleet.choose(Role.PREFILL, {}, NOW) is None
    assert fleet.choose(Role.PREFILL, {}, NOW + DOWN_S) is fleet.engines[0]


def test_each_role_has_its_own_engines() -> None:
    fleet = EngineFleet([engine("a", Role.PREFILL)])
    assert fleet.choose(Role.DECODE, {}, NOW) is None


def test_engines_that_stay_keep_their_counts_when_others_come_and_go() -> None:
    fixed, one = engine("fixed"), engine("one")
    fleet = EngineFleet([fixed])
    fleet.replace([one])
    one.in_flight = 3
    fleet.replace([engine("one"), engine("two")])
    assert [e.url for e in fleet.engines] == ["http://fixed", "http://one", "http://two"]
    assert fleet.engines[1] is one
    fleet.replace([])
    assert fleet.engines == [fixed]


def test_engines_are_bounded() -> None:
    many = [engine(str(i)) for i in range(ENGINES_MAX + 1)]
    with pytest.raises(UsageError, match=f"at most {ENGINES_MAX}"):
        EngineFleet(many)
    fleet = EngineFleet()
    fleet.replace(many)
    assert len(fleet.engines) == ENGINES_MAX


def test_blocks_are_counted_by_node_and_by_host() -> None:
    a, b, x = Holder("node-a", "h"), Holder("node-b", "h"), Holder("x", "x")
    run = [HolderRun(a, 2), HolderRun(b, 1), HolderRun(x, 1), HolderRun(a, 3)]
    assert held_at(run) == {"node-a": 5, "node-b": 1, "h": 6, "x": 1}


@pytest.mark.parametrize(
    ("tokens", "block_tokens", "found", "needed"),
    [
        (63, 64, 0, False),
        (64, 64, 0, True),
        (130, 64, 1, True),
        (130, 64, 2, False),
        (None, 64, 0, True),
        (130, None, 0, True),
    ],
)
def test_prefill_is_for_full_blocks_that_nobody_holds(
    tokens: int | None, block_tokens: int | None, found: int, needed: bool
) -> None:
    assert needs_prefill(tokens, block_tokens, found) is needed


@pytest.mark.parametrize("text", ["", "host:8000", "ftp://host", "@node"])
def test_an_engine_that_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        Engine.parse(Role.PREFILL, text)
    assert refused.value.field == "prefill"


def test_an_engine_may_say_where_it_is() -> None:
    found = Engine.parse(Role.DECODE, "http://host:8000/@node-a")
    assert (found.url, found.at) == ("http://host:8000", "node-a")


def test_an_engine_that_is_named_twice_is_one_engine() -> None:
    """Its address is given, and a name that is looked up leads there too; so do two names."""
    a, b = engine("a"), engine("b")
    fleet = EngineFleet([a, engine("a")])
    fleet.replace([engine("a"), b, engine("b"), engine("a", Role.PREFILL)])
    assert fleet.engines[:2] == [a, b]
    assert [(e.url, e.role) for e in fleet.engines[2:]] == [("http://a", Role.PREFILL)]
