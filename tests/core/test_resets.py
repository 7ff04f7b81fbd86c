"""Which resets a node knows of, and what it makes of what others tell."""

from each_input import each

from kvstore.core.resets import EVERYTHING, RANDOM_BITS, TOLD_MAX, Resets
from kvstore.limits import RESET_NAMESPACES_MAX, RESETS_IDS_MAX


def of(*numbers: int) -> Resets:
    resets = Resets()
    for number in numbers:
        assert resets.add(number, [7])
    return resets


def full() -> Resets:
    resets = Resets()
    for number in range(100, 130):
        resets.add(number, range(RESET_NAMESPACES_MAX))
    assert resets.floor > 0
    return resets


def test_a_reset_counts_once() -> None:
    resets = of(5)
    assert not resets.add(5, [8])
    assert resets.add(6, [8])


def test_what_others_tell_and_is_not_known_is_news_the_oldest_first() -> None:
    assert of(5).news(of(9, 5, 3)) == [(3, (7,)), (9, (7,))]
    assert of(5).news(of(5)) == of(5).news(Resets()) == []


def test_what_is_told_survives_being_packed() -> None:
    resets = Resets()
    resets.add(1 << 60, [0, (1 << 32) - 1])
    resets.add(3, [9])
    assert Resets().news(Resets.unpack(resets.pack())) == Resets().news(resets)
    assert Resets.unpack(full().pack()).floor == full().floor
    assert Resets().pack() == ""


@each("text", ["x", "AAAA", "####", "A" * 4000, full().pack()[:-9], "ü"])
def test_damaged_words_are_nothing_or_nothing_wrong(text: str) -> None:
    assert all(len(ids) <= RESET_NAMESPACES_MAX for _, ids in Resets().news(Resets.unpack(text)))


def test_room_is_bounded_and_the_oldest_go_first() -> None:
    resets = full()
    assert 129 in resets
    assert 100 not in resets
    assert len(resets) * RESET_NAMESPACES_MAX <= RESETS_IDS_MAX
    assert not resets.add(100, [1]), "never taken again"
    assert len(resets.pack()) < 8 << 10


def test_who_meets_somebody_that_has_let_go_of_more_than_it_knows_drops_everything() -> None:
    (first, *_) = of(5).news(full())
    assert first == (full().floor, EVERYTHING)
    after = of(5)
    for number, ids in of(5).news(full()):
        after.add(number, ids)
    assert after.news(full()) == []


def test_a_number_is_larger_than_all_that_are_known_and_keeps_its_random_bits() -> None:
    resets = of(5 << RANDOM_BITS)
    wanted = 3 << RANDOM_BITS | 12345
    got = resets.next_number(wanted)
    assert got > 5 << RANDOM_BITS
    assert got & (1 << RANDOM_BITS) - 1 == 12345
    later = 9 << RANDOM_BITS | 1
    assert resets.next_number(later) == later


def test_resets_of_one_namespace_fill_the_room_to_the_last_and_one_more_takes_the_oldest() -> None:
    fit = RESETS_IDS_MAX // 4  # of one namespace each, as the room is counted
    resets = of(*range(10, 10 + fit))
    assert (len(resets), resets.floor) == (fit, 0)
    assert resets.add(10 + fit, [7])
    assert (len(resets), resets.floor) == (fit, 10)
    assert not resets.add(10, [7]), "the floor itself is let go too"
    assert 11 in resets


def test_the_next_number_is_the_next_millisecond_with_the_same_random_bits() -> None:
    resets = of(5 << RANDOM_BITS | 99)
    for wanted in (0, 7, 5 << RANDOM_BITS | 99, (1 << RANDOM_BITS) - 1):
        low = wanted & (1 << RANDOM_BITS) - 1
        assert resets.next_number(wanted) == 6 << RANDOM_BITS | low
    assert resets.next_number(5 << RANDOM_BITS | 100) == 5 << RANDOM_BITS | 100
    assert Resets().next_number(1) == 1
    assert full().next_number(1) == 1 << RANDOM_BITS | 1


def test_a_floor_that_is_no_news_drops_nothing() -> None:
    assert full().news(full()) == []
    known = Resets()
    known.floor = full().floor
    assert known.news(full()) == [(n, ids) for n, ids in Resets().news(full()) if n > known.floor]
    higher = Resets()
    higher.floor = 5
    assert of(5).news(higher) == []
    assert of(4).news(higher) == [(5, EVERYTHING)]
    assert of(5).news(Resets()) == []


def test_a_reset_of_as_many_namespaces_as_there_may_be_is_read_and_one_of_more_is_not() -> None:
    resets = Resets()
    resets.add(3, range(RESET_NAMESPACES_MAX))
    assert 3 in Resets.unpack(resets.pack())
    resets.add(4, range(RESET_NAMESPACES_MAX + 1))
    assert len(Resets.unpack(resets.pack())) == 0


def test_a_floor_alone_is_told() -> None:
    resets = Resets()
    resets.floor = 9
    assert Resets.unpack(resets.pack()).floor == 9


def test_namespaces_are_told_once_and_in_order() -> None:
    resets = Resets()
    resets.add(3, [9, 2, 9])
    assert Resets().news(resets) == [(3, (2, 9))]


def test_a_reset_larger_than_all_the_room_is_known_until_the_next_comes() -> None:
    resets = Resets()
    assert resets.add(3, range(RESETS_IDS_MAX + 1))
    assert (3 in resets, resets.floor) == (True, 0)
    assert resets.add(4, range(RESETS_IDS_MAX + 1))
    assert (3 in resets, 4 in resets, resets.floor) == (False, True, 3)


def test_what_is_no_base64_is_nothing_even_around_what_is() -> None:
    text = of(5).pack()
    assert len(Resets.unpack(text)) == 1
    for damaged in ("", f"!{text}", f"{text[:4]} {text[4:]}"):
        assert len(Resets.unpack(damaged)) == 0


def test_what_was_let_go_of_is_no_news() -> None:
    known, told = Resets(), of(4, 5, 6)
    known.floor = 5
    assert known.news(told) == [(6, (7,))]
    told = Resets()
    told.floor = 1
    assert Resets().news(told) == [(1, EVERYTHING)]


def test_a_number_that_no_clock_says_is_nobodys_news() -> None:
    """Who can write into the index could else say the largest there is, and no number be left for
    the next reset: that would end the node."""
    lie = of(2**64 - 1)
    lie.floor = 2**64 - 2
    honest = of(5)
    assert honest.news(Resets.unpack(lie.pack())) == []
    last = of(TOLD_MAX)
    ((number, ids),) = honest.news(last)
    honest.add(number, ids)
    honest.add(honest.next_number(9), ids)
    assert len(Resets.unpack(honest.pack())) == 3
