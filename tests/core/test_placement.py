"""Where blocks go: by their run, by what nodes are large, and past those that are full."""

import os
from collections import Counter

from kvstore.core.placement import Home, homes_of

MIB = 1 << 20


def homes(*free_mib: int, capacity_mib: int = 100) -> list[Home]:
    return [
        Home(node_id, capacity_mib * MIB, free * MIB, 8 * MIB)
        for node_id, free in enumerate(free_mib, 1)
    ]


def keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def test_each_node_takes_the_share_of_keys_that_is_its_share_of_bytes() -> None:
    nodes = [Home(1, 100 * MIB, 100 * MIB, MIB), Home(2, 300 * MIB, 300 * MIB, MIB)]
    chosen = Counter(homes_of([(key, 1) for key in keys(4000)], {}, nodes))
    assert 0.22 < chosen[1] / 4000 < 0.28


def test_all_writers_agree_in_whatever_order_they_know_the_nodes() -> None:
    blocks = [(key, 1) for key in keys(100)]
    there = homes(50, 50, 50)
    assert homes_of(blocks, {}, there) == homes_of(blocks, {}, there[::-1])


def test_the_blocks_of_a_run_go_to_one_node() -> None:
    tag = os.urandom(8)
    blocks = [(tag + os.urandom(24), MIB) for _ in range(40)]
    assert len(set(homes_of(blocks, {}, homes(90, 90, 90)))) == 1


def test_what_does_not_fit_goes_where_there_is_room() -> None:
    tag = os.urandom(8)
    blocks = [(tag + os.urandom(24), MIB) for _ in range(60)]
    assert sorted(Counter(homes_of(blocks, {}, homes(30, 30))).values()) == [30, 30]


def test_a_full_host_evicts_by_key_again() -> None:
    blocks = [(key, MIB) for key in keys(300)]
    full, roomy = homes_of(blocks, {}, homes(0, 0)), homes_of(blocks, {}, homes(300, 300))
    assert full == roomy


def test_a_block_that_is_there_already_goes_to_its_holder() -> None:
    blocks = [(key, MIB) for key in keys(20)]
    assert set(homes_of(blocks, dict.fromkeys([k for k, _ in blocks], 2), homes(90, 0))) == {2}
    gone = dict.fromkeys([k for k, _ in blocks], 9)
    assert set(homes_of(blocks, gone, homes(90, 0))) == {1}


def test_a_value_too_large_for_a_node_goes_to_one_that_takes_it() -> None:
    nodes = [*homes(90), Home(2, 100 * MIB, 0, 64 * MIB)]
    assert set(homes_of([(key, 20 * MIB) for key in keys(20)], {}, nodes)) == {2}


def test_most_keys_keep_their_node_when_another_comes() -> None:
    blocks = [(key, 1) for key in keys(2000)]
    before, after = homes_of(blocks, {}, homes(90, 90)), homes_of(blocks, {}, homes(90, 90, 90))
    moved = sum(a != b for a, b in zip(before, after, strict=True))
    assert moved == sum(b == 3 for b in after)
    assert 0.28 < moved / 2000 < 0.39
