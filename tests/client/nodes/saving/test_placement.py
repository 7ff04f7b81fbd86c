"""Where blocks go: by their run, by what nodes are large, and past those that are full."""

import os
from collections import Counter
from random import Random

from kvstore.client.nodes.saving.placement import (
    RAMP_LEAST,
    RAMP_S,
    Candidate,
    Home,
    homes_of,
    two_choices,
)

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


def test_a_value_of_just_that_size_fits_and_a_larger_one_goes_somewhere() -> None:
    nodes = [*homes(90), Home(2, 100 * MIB, 90 * MIB, 64 * MIB)]
    assert set(homes_of([(bytes([i]) * 32, 8 * MIB) for i in range(12)], {}, nodes)) == {1, 2}
    assert set(homes_of([(key, 100 * MIB) for key in keys(9)], {}, nodes)) <= {1, 2}


def test_another_version_of_this_code_sends_a_tag_to_the_same_node() -> None:
    nodes = [Home(10 + i, (i + 1) * MIB, MIB, MIB) for i in range(4)]
    blocks = [(bytes([i]) * 32, 1) for i in range(12)]
    assert homes_of(blocks, {}, nodes) == [11, 12, 12, 13, 11, 11, 10, 10, 13, 11, 12, 12]


def test_most_keys_keep_their_node_when_another_comes() -> None:
    blocks = [(key, 1) for key in keys(2000)]
    before, after = homes_of(blocks, {}, homes(90, 90)), homes_of(blocks, {}, homes(90, 90, 90))
    moved = sum(a != b for a, b in zip(before, after, strict=True))
    assert moved == sum(b == 3 for b in after)
    assert 0.28 < moved / 2000 < 0.39


# --- on other hosts ---------------------------------------------------------


def share_of(chosen: int, candidates: list[Candidate], draws: int = 4000) -> float:
    rng = Random(1)
    taken = Counter(two_choices(candidates, rng).node_id for _ in range(draws))
    return taken[chosen] / draws


def candidate(node_id: int, free: float, up_s: float = 3600.0, capacity: int = 1000) -> Candidate:
    return Candidate(node_id, capacity, int(capacity * free), up_s)


def test_an_empty_node_among_full_ones_gets_at_most_twice_its_share() -> None:
    nodes = [candidate(1, 1.0), *(candidate(i, 0.0) for i in range(2, 11))]
    assert 0.15 < share_of(1, nodes) <= 0.22


def test_full_nodes_share_by_their_size() -> None:
    nodes = [candidate(1, 0.0, capacity=1000), candidate(2, 0.0, capacity=3000)]
    assert 0.22 < share_of(1, nodes) < 0.28


def test_a_node_that_has_just_started_gets_a_part_of_its_share_and_then_more() -> None:
    def of(up_s: float) -> float:
        return share_of(1, [candidate(1, 1.0, up_s), *(candidate(i, 0.1) for i in range(2, 11))])

    assert of(0.0) < 0.2 * RAMP_LEAST * 2
    assert of(0.0) < of(RAMP_S / 2) < of(RAMP_S)
    assert abs(of(RAMP_S) - of(3600.0)) < 0.02


def test_of_two_the_emptier_one_takes_three_quarters() -> None:
    assert 0.70 < share_of(1, [candidate(1, 0.6), candidate(2, 0.5)]) < 0.80


def test_a_single_node_takes_all() -> None:
    assert share_of(1, [candidate(1, 0.0, up_s=0.0)], 10) == 1.0


def test_a_hundred_writers_do_not_run_to_the_node_that_comes_back_empty() -> None:
    """Ten nodes; each second every writer saves 10 units, and believes what nodes said up to
    5 s ago less what it sent itself since, as writer.py does."""
    nodes, writers, capacity, look_s = 10, 100, 20_000, 5
    rng = Random(7)
    free = [0] * nodes
    free[0], back_at = capacity, 0
    seen: list[tuple[list[int], int, dict[int, int]]] = [([], -look_s, {})] * writers
    to_it = []
    for second in range(back_at, 60):
        taken = 0
        for writer in range(writers):
            words, looked_at, sent = seen[writer]
            if second - looked_at >= look_s or not words:
                words, looked_at, sent = list(free), second - rng.randrange(look_s), {}
                seen[writer] = (words, looked_at, sent)
            for _ in range(10):
                there = [
                    Candidate(
                        i,
                        capacity,
                        max(words[i] - sent.get(i, 0), 0),
                        second - back_at if i == 0 else 3600,
                    )
                    for i in range(nodes)
                ]
                chosen = two_choices(there, rng).node_id
                sent[chosen] = sent.get(chosen, 0) + 1
                free[chosen] = max(free[chosen] - 1, 0)
                taken += chosen == 0
        to_it.append(taken / (writers * 10))
    assert max(to_it) < 0.25, "never more than about twice its share of a tenth"
    assert max(to_it[:3]) < 0.06, "and less right after its start"
    assert sum(to_it[-30:]) / 30 > 0.1, "but more than others while it has room"
