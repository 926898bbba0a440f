"""The program's numbers are those of the reference: the same bits, and floating-point formulas to their rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.programs import launches, reference

from fedtorch import random
from fedtorch.random.draws import bits

KEYS = random.fold_in(random.key(-5), torch.arange(3))
SHAPES = [(), (3, 5), (0,), (1030,)]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EXACT: dict[str, Callable[..., torch.Tensor]] = {
    "bits": lambda key, shape: bits(key, torch.Size(shape).numel()),
    "coins": lambda key, shape: random.bernoulli(key, 0.3, shape),
    "integers": lambda key, shape: random.randint(key, 10**12, shape),
    "permutation": lambda key, shape: random.permutation(key, torch.Size(shape).numel()),
    **{f"uniform, {dtype}": lambda key, shape, dtype=dtype: random.uniform(key, shape, dtype) for dtype in DTYPES},
}


@pytest.mark.parametrize("draw", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("shape", SHAPES)
def test_words_and_uniform_numbers_are_the_same_bits(draw, shape, device, monkeypatch) -> None:
    many = (KEYS, KEYS[:0], KEYS[None, :, None], KEYS.repeat(2)[::2])
    for key in (KEYS[1], *many[: 4 if torch.Size(shape).numel() < 1000 else 0]):
        with reference():
            wanted = draw(key, shape)
        with launches(monkeypatch, at_least=int(wanted.numel() > 0)):
            found = draw(key.to(device), shape)
        assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("draw", [random.normal, random.exponential])
@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_and_exponential_numbers_to_the_last_bit_or_two(draw, dtype, device) -> None:
    for shape in ((7,), (1030,)) if dtype in (torch.float32, torch.float64) else ((7,),):
        with reference():
            wanted = draw(KEYS, shape, dtype)
        found = draw(KEYS.to(device), shape, dtype).cpu()
        assert found.dtype == dtype
        assert found.shape == wanted.shape
        # An angle of up to 2π is rounded to 2⁻⁵¹ and its cosine to 2⁻⁵³; radii are at most 8.6. Then the dtype's own.
        close = 8.6 * 2.0**-50 + torch.finfo(dtype).eps * wanted.double().abs() * (dtype != torch.float64)
        assert bool(((found.double() - wanted.double()).abs() <= close).all())


def test_all_quadrants_and_their_limits(device) -> None:
    with reference():
        wanted = random.normal(random.key(3), (4000,), torch.float64)
    found = random.normal(random.key(3).to(device), (4000,), torch.float64).cpu()
    assert float((found - wanted).abs().max()) < 8.6 * 2.0**-50


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_numbers_of_all_shape_parameters(dtype, device) -> None:
    a = torch.tensor([0.01, 0.3, 0.999, 1.0, 1.5, 40.0, 1e6], dtype=torch.float64).repeat(11)
    with reference():
        wanted = random.gamma(KEYS, a, (77,), dtype)
    found = random.gamma(KEYS.to(device), a.to(device), (77,), dtype).cpu()
    # The exponent log(u) / a of a boosted number is up to 3 600 units of rounding at a = 0.01.
    torch.testing.assert_close(found, wanted, rtol=3e-7 if dtype == torch.float32 else 1e-12, atol=0.0)
    empty = random.gamma(KEYS[:0].to(device), 2.0, (4,), dtype)
    assert empty.shape == (0, 4)


def test_new_keys_of_all_numbers(device) -> None:
    numbers = torch.tensor([[-1], [0], [2**40 + 3]])
    for key, data in ((KEYS, 7), (KEYS, -(2**33)), (KEYS, numbers), (KEYS[0], numbers), (KEYS[:0], 1)):
        with reference():
            wanted = random.fold_in(key, data)
        on_device = data.to(device) if isinstance(data, torch.Tensor) else data
        assert torch.equal(random.fold_in(key.to(device), on_device).cpu(), wanted)
