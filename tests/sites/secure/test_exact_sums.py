"""Numbers of several words that carry, and the exact sums of Gibbs samplers under masks."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

import fedtorch as ft
from fedtorch import exact
from fedtorch.federation.exchanges.exchange import Mean, Sum
from fedtorch.models.gibbs import sparse
from fedtorch.sites.secure import ExactSums, ring
from fedtorch.sites.secure.masked import masked
from fedtorch.sites.secure.messages import Aborted
from fedtorch.sites.secure.neighbours import Neighbourhoods
from fedtorch.sites.secure.simulation import secure_sum
from fedtorch.trust import privacy

WORD = 2**64


def words(numbers: list[int], width: int) -> Tensor:
    parts = [(number >> 64 * i) % WORD for number in numbers for i in range(width)]
    return torch.tensor([part - WORD if part >= WORD // 2 else part for part in parts], dtype=torch.int64)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_words_add_and_turn_as_whole_numbers_do(width: int) -> None:
    """Of numbers that carry through words of ones and zeros, against Python's."""
    generator, size = random.Random(width), WORD**width
    special = [0, 1, size - 1, size // 2, WORD - 1, size - WORD]
    pairs = [(a % size, b % size) for a in special for b in special]
    pairs += [(generator.randrange(size), generator.randrange(size)) for _ in range(500)]
    one, other = (words([pair[i] for pair in pairs], width) for i in (0, 1))
    assert torch.equal(ring.add(one.clone(), other, width), words([(a + b) % size for a, b in pairs], width))
    assert torch.equal(ring.negate(one.clone(), width), words([-a % size for a, _ in pairs], width))


def test_limbs_become_words_and_come_back() -> None:
    values = torch.tensor([0.0, 1.0, -1.0, math.pi, -1e-40, 2.0**139, -(2.0**139), 2.0**-160], dtype=torch.float64)
    grid = ExactSums()
    encoded = grid.encode(exact.limbs(values).reshape(1, -1))
    assert encoded.shape == (1, 5 * 8)
    assert torch.equal(exact.value(grid.decode(encoded[0]).reshape(8, -1)), exact.value(exact.limbs(values)))
    unlike = exact.limbs(values) - exact.limbs(values.flip(0))  # limbs of both signs, as changes have
    again = exact.value(grid.decode(grid.encode(unlike.reshape(1, -1))[0]).reshape(8, -1))
    assert torch.equal(again, exact.value(unlike))


def test_exact_sums_are_the_same_to_the_bit_under_masks() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 5, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(-20, 15, 7)
    limbs = exact.limbs(values).reshape(7, -1)
    found = secure_sum(
        limbs, ExactSums(), gone={2: 4, 5: 6}, graph=Neighbourhoods(6, 4), entropy=privacy.from_seed(0)
    )  # fmt: skip
    stay = [0, 1, 3, 4, 5, 6]
    assert found.survivors == stay
    plain = exact.value(limbs[stay].reshape(6, 5, -1).sum(0))
    assert torch.equal(exact.value(found.total.reshape(5, -1)), plain)
    assert found.masked.shape == (6, 25)


def test_a_carried_sum_does_not_say_how_often_limbs_carry() -> None:
    """Two cohorts of one sum, whose limbs side by side differ."""
    one, other = (torch.tensor(each, dtype=torch.float64) for each in ([2.0**31, 2.0**31, 0.0], [2.0**32, 0.0, 0.0]))
    sums = [exact.limbs(each).sum(0) for each in (one, other)]
    assert not torch.equal(*sums)
    grid = ExactSums()
    made = [secure_sum(exact.limbs(each), grid, graph=Neighbourhoods(2, 2)).total for each in (one, other)]
    assert torch.equal(*made)


def test_low_bits_are_of_who_alone_has_such_small_numbers_and_are_cut_if_asked() -> None:
    """What the docstring warns of: one number of 1e-30 beside others of the order of one can be read off the sum."""
    values = torch.tensor([0.75, -1.25, 3.0, math.pi * 1e-30], dtype=torch.float64)
    limbs, graph = exact.limbs(values), Neighbourhoods(3, 2)
    for bits, told in ((160, float(values[3])), (64, 0.0)):
        total = secure_sum(limbs, ExactSums(bits), graph=graph).total.reshape(1, -1)
        whole = sum(int(limb) << 32 * place for place, limb in enumerate(total[0].tolist()))
        rest = whole % 2 ** (160 - 50)  # below the last bit of the others
        assert rest / 2**160 == pytest.approx(told, rel=1e-12)


@pytest.mark.parametrize("bits", [159, 129, 128, 127, 1, 0])
def test_numbers_are_cut_to_whole_multiples_of_the_last_bit(bits: int) -> None:
    last = 2.0**-bits
    values = torch.tensor([last, 1.5 * last, -last, -1.5 * last], dtype=torch.float64)
    grid = ExactSums(bits)
    cut = exact.value(grid.decode(grid.encode(exact.limbs(values).reshape(1, -1))[0]).reshape(4, -1))
    assert (cut / last).tolist() == [1.0, 1.0, -1.0, -2.0]  # down, as whole numbers of two's complement are


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.full((3, 10), 0.5), "in the limbs"),
        (torch.zeros(3, 7), "in the limbs"),
        (torch.full((3, 10), math.nan), "in the limbs"),
        (exact.limbs(torch.full((3,), 2.0**141, dtype=torch.float64)), r"below 2\*\*140"),
        (exact.limbs(torch.full((3,), -(2.0**141), dtype=torch.float64)), r"below 2\*\*140"),
    ],
)
def test_what_is_no_exact_sum_is_refused(values: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        secure_sum(values.double(), ExactSums(), graph=Neighbourhoods(2, 2))


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="bits from 0 to 160"):
        ExactSums(161).check(3)
    with pytest.raises(ValueError, match="fewer than 524288"):
        ExactSums().check(2**19)


def test_gibbs_under_masks_is_gibbs_to_the_bit_with_silent_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(12, 3, generator=generator, dtype=torch.float64) for _ in range(6)]
    data = ft.data.from_tensors([(x[:, :2], x[:, 2]) for x in rows])
    plain = ft.gibbs(sparse.regression(), sparse.hierarchy(), sweeps=2, chains=2)
    inside = [ft.InProcess(data), ft.InProcess(data, carry=masked(ExactSums(), minimum=3, dropouts=0))]
    runs = [ft.run(plain, each, torch.zeros(2), rounds=4, cohort=4) for each in inside]
    theta, other = (run.server.variables.theta for run in runs)
    assert torch.equal(theta, other)
    few = ft.Run(plain, inside[1], torch.zeros(2), cohort=2)
    with pytest.raises(Aborted, match="at least 3"):  # the sum of two sites' changes
        few.step()


def test_what_is_not_in_limbs_does_not_travel_as_exact_sums() -> None:
    exchange = masked(ExactSums(), dropouts=0).carried(ft.fedavg(ft.least_squares(torch.nn.Linear(2, 1)))).exchange
    for message in (Mean({"a": torch.ones(4)}, torch.ones(4)), Sum(torch.rand(4, 10))):
        with pytest.raises(ValueError, match="in the limbs"):
            exchange.finish(exchange.gather(message, slice(0, 4)))
