"""Exact sums against fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from support.programs import reference
from torch import Tensor

from fedtorch import exact
from fedtorch.programs import choice


@pytest.fixture(autouse=True, params=["on", "off"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By the programs, where numba is there, and by operations of torch."""
    monkeypatch.setenv(choice.VARIABLE, request.param)
    return request.param


def numbers(count: int, low: float, high: float, seed: int = 0) -> Tensor:
    """Numbers of both signs whose magnitudes are spread over 2^low to 2^high."""
    generator = torch.Generator().manual_seed(seed)
    exponent = low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)
    return torch.randn(count, generator=generator, dtype=torch.float64) * 2**exponent


def fraction(values: Tensor) -> Fraction:
    return sum((Fraction(v) for v in values.flatten().tolist()), Fraction(0))


@pytest.mark.parametrize(("low", "high"), [(-100, 140), (-5, 5), (100, 145), (-105, -90)])
def test_sums_are_exact_and_do_not_depend_on_the_order(low: float, high: float) -> None:
    values = numbers(500, low, high)
    values = torch.cat([values, -values[:400], torch.zeros(2, dtype=torch.float64)])
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    found = exact.limbs(values).sum(0)
    assert torch.equal(found, exact.limbs(values[order]).sum(0))
    assert float(exact.value(found)) == float(fraction(values))


def test_single_numbers_come_back() -> None:
    values = torch.cat([numbers(300, -100, 147), torch.tensor([0.0, -0.0, 1.0, 2.0**-160, 2.0**147])])
    values = values[values.abs() < exact.LARGEST]
    assert torch.equal(exact.value(exact.limbs(values)), values)
    assert bool((exact.limbs(values).abs() < 2**33).all())
    assert float(exact.value(exact.limbs(torch.tensor(2.0**-161, dtype=torch.float64)))) == 0


def test_moments_about_a_centre_do_not_cancel() -> None:
    """Weights of 1e20 and deviations of 1e-10 about a centre of 0.7, where float64 sums would have no digit left."""
    generator = torch.Generator().manual_seed(2)
    weight = 1e20 * torch.rand(50, generator=generator, dtype=torch.float64)
    x = 0.7 + 1e-10 * torch.randn(50, generator=generator, dtype=torch.float64)
    centre = torch.tensor([0.7], dtype=torch.float64)
    first, second = exact.products(weight, x)
    total = [sum(exact.limbs(term).sum(0) for term in terms) for terms in ((weight,), first, second)]
    found = exact.about(*exact.read(*(t[None] for t in total), exact.limbs(centre)))
    c = Fraction(0.7)
    pairs = [(Fraction(w), Fraction(v)) for w, v in zip(weight.tolist(), x.tolist())]
    for power, sums in enumerate(found):
        assert float(sums) == float(sum(w * (v - c) ** power for w, v in pairs))
    naive = (weight * x**2).sum() - 2 * 0.7 * (weight * x).sum() + 0.49 * weight.sum()
    assert abs(float(naive) / float(found[2]) - 1) > 1e-3


def test_products_are_exact() -> None:
    weight, x = numbers(200, -30, 60).abs(), numbers(200, -40, 10, seed=3)
    first, second = exact.products(weight, x)
    for i, (w, v) in enumerate(zip(weight.tolist(), x.tolist())):
        assert fraction(torch.stack([term[i] for term in first])) == Fraction(w) * Fraction(v)
        assert fraction(torch.stack([term[i] for term in second])) == Fraction(w) * Fraction(v) ** 2


def test_no_numbers_and_bad_numbers() -> None:
    assert exact.limbs(torch.zeros(0, 3, dtype=torch.float64)).shape == (0, 3, exact.LIMBS)
    assert exact.value(torch.zeros(0, exact.LIMBS, dtype=torch.float64)).shape == (0,)
    for bad in (2.0**148, float("inf"), float("nan")):
        with_bad = exact.limbs(torch.tensor([1.0, bad], dtype=torch.float64))
        assert with_bad.isnan().any(1).tolist() == [False, True]
        with pytest.raises(ValueError, match=r"Expected sums of finite numbers below 2\*\*148"):
            exact.value(with_bad)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4, 5)])
def test_the_program_gives_the_bits_of_the_reference(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    count = torch.Size(shape).numel()
    each = [numbers(count, -170, 60, seed).reshape(shape) for seed in range(4)]
    if count > 2:
        each[0].view(-1)[:3] = torch.tensor([0.0, -(2.0**-160), 2.0**-161])
    strided = each[1].mT.contiguous().mT if len(shape) > 1 else each[1]

    def found() -> list[Tensor]:
        (total, other), first = exact.totals(each[:3], [strided]), exact.products(each[0], strided)
        moments = [*exact.totals([each[0].abs()], *exact.products(each[0].abs(), strided)), exact.limbs(each[3])]
        many = [2**20 * part for part in moments[:3]]  # of as many clients
        about = exact.about(*exact.read(*many, moments[3]))
        sums = total - 3 * other, *exact.values(total - 3 * other, total)
        return [total, other, *sums, *(term for terms in first for term in terms), *moments, *about]

    monkeypatch.setenv(choice.VARIABLE, "on")
    by_program = found()
    with reference():
        for one, two in zip(by_program, found()):
            assert one.shape == two.shape
            assert torch.equal(one, two)


def test_columns_of_a_matrix() -> None:
    """Numbers that do not lie next to each other."""
    matrix = numbers(12, -5, 5).reshape(4, 3)
    column = matrix[:, 1]
    assert torch.equal(exact.limbs(column), exact.limbs(column.clone()))
    assert torch.equal(exact.value(exact.limbs(matrix)[:, 1]), column)
    for one, other in zip(exact.products(column, column), exact.products(column.clone(), column.clone())):
        assert torch.equal(torch.stack(one), torch.stack(other))


def test_bad_numbers_about_a_centre() -> None:
    one, bad = (exact.limbs(torch.tensor([value], dtype=torch.float64)) for value in (1.0, torch.nan))
    for place in range(4):
        with pytest.raises(ValueError, match="Expected sums of finite numbers"):
            exact.about(*exact.read(*(bad if place == at else one for at in range(4))))
