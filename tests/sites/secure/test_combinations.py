"""What can be worked out of several sums of the same values: exactly, against all small combinations of them."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest

from fedtorch.sites.secure._combinations import MOST, TooMany, refusal, revealed

SMALL = np.array(list(itertools.product(range(-3, 4), repeat=4)))  # minors of three rows are at most 2, of four 3


def fewest(sets: list[frozenset[int]], parties: int) -> int:
    """Of how many parties at least is a combination that is of some."""
    rows = np.zeros((4, parties), dtype=int)
    for row, each in zip(rows, sets):
        row[list(each)] = 1
    counts = (SMALL @ rows != 0).sum(1)
    return int(counts[counts > 0].min())


@pytest.mark.parametrize("minimum", [1, 2, 3, 4, 5])
def test_exactly_those_families_are_refused_of_which_a_combination_is_of_too_few(minimum: int) -> None:
    dice, both = random.Random(minimum), set()
    for _ in range(150):
        parties, count = dice.randint(4, 12), dice.randint(1, 4)
        sets = [frozenset(dice.sample(range(parties), dice.randint(1, parties))) for _ in range(count)]
        few, wanted = revealed(sets, minimum), fewest(sets, parties)
        both.add(few is None)
        assert (few is None) == (wanted >= minimum)
        if few is not None:
            assert wanted <= len(few) < minimum
            one = [sum(1 << i for i, each in enumerate(sets) if party in each) for party in few]
            assert all(party in few for each in sets for party in each  # who is in the same sets is told with them
                       if sum(1 << i for i, other in enumerate(sets) if party in other) in one)  # fmt: skip
    assert both == ({True} if minimum == 1 else {True, False})


def test_three_sums_tell_what_no_two_of_them_do() -> None:
    first, second, all_of_them = frozenset("abc"), frozenset("def"), frozenset("abcdefg")
    for pair in itertools.combinations([first, second, all_of_them], 2):
        assert revealed(pair, 3) is None
        assert len(pair[0] ^ pair[1]) >= 3
    assert revealed([first, second, all_of_them], 3) == {"g"}
    assert "of 1 clients, fewer than 3, ['g']" in str(refusal([first, second], all_of_them, 3))
    assert refusal([first, second], all_of_them | {"h", "i"}, 3) is None


def test_coefficients_need_not_be_of_one() -> None:
    """S₁ + S₂ + S₃ − 2 S₄ is of one party."""
    a, b, c = (frozenset(range(4 * i, 4 * i + 4)) for i in range(3))
    sets = [a | b, b | c, a | c | {99}, frozenset([*a, *b, *c])]
    assert revealed(sets, 2) == {99}
    assert revealed(sets[:3], 2) is None


def test_large_families_take_no_time_or_are_refused() -> None:
    """Two hundred parties: all in one group are none to look at; single ones beyond what can be gone through."""
    everybody, began = frozenset(range(200)), time.process_time()
    assert refusal([everybody], everybody - {1, 2, 3}, 3) is None
    assert "of 2 clients" in str(refusal([everybody], everybody - {1, 2}, 3))
    nested = [frozenset(range(4 * i)) for i in range(1, 50)]
    assert refusal(nested, everybody, 3) is None
    apart = [frozenset(party for party in everybody if party >> i & 1) for i in range(8)]
    with pytest.raises(TooMany):
        revealed([everybody, *apart], 4)
    assert "only an earlier sum can be added up again" in str(refusal(apart, everybody, 4))
    assert refusal(apart, apart[3], 4) is None
    assert "only an earlier sum" in str(refusal([everybody - {i} for i in range(150)], everybody, 1))
    assert time.process_time() - began < 10
    assert MOST == 20_000
