r"""Exact sums: the same bits for any order, blocks, and number of replacements.

A float64 number is written in fixed point, as an integer multiple of 2⁻¹⁶⁰ in ten *limbs* of base 2³², each stored as a
float64. Up to 2²⁰ such numbers add up limb by limb without any rounding, since no limb reaches 2⁵³: an ordinary
`star()` exchange, an `all_reduce` and the running sums of increments are then exact, associative and commutative.
Secure aggregation uses sums of this kind, too.

Sums about a moving centre, :math:`\sum_k w_k (x_k - c)^2`, follow from :math:`\sum w_k`, :math:`\sum w_k x_k` and
:math:`\sum w_k x_k^2` without cancellation when these are exact. `products` writes the last two as sums of float64
numbers without rounding (Dekker, "A floating-point technique for extending the available precision", Numerische
Mathematik 18, 1971, sections 4 and 5).

>>> import torch
>>> from fedtorch import exact
>>> values = torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)
>>> float(exact.value(exact.limbs(values).sum(0)))
1.0
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from fedtorch.programs import exact_sums

LIMBS = 10
LARGEST = 2.0**148  # bound on numbers
_BITS, _MASK = 32, 2**32 - 1
_SCALE = 160  # a unit of the last limb is 2^−160
_SPLIT = 2.0**27 + 1
_NOT_FINITE = "Expected sums of finite numbers below 2**148 in magnitude, but got others; rescale them"


class Whole:
    """Sums as whole multiples of 2⁻¹⁶⁰, in host memory.

    Attributes:
        like: the limbs from which they were read, `(..., LIMBS)`.

    Example:
        >>> import torch
        >>> (whole,) = read(limbs(torch.tensor([0.5, 3.0], dtype=torch.float64)))
        >>> [number / 2**160 for number in whole.numbers]
        [0.5, 3.0]
    """

    def __init__(self, like: Tensor, numbers: list[int] | None = None) -> None:
        self.like = like
        if numbers is not None:
            self.numbers = numbers

    @functools.cached_property
    def numbers(self) -> list[int]:
        """Return the numbers, flattened."""
        return _integers(self.like.reshape(-1, LIMBS).cpu())


def limbs(value: Tensor) -> Tensor:
    """Convert a number to limbs; its part below 2⁻¹⁶⁰ is truncated towards zero.

    It does not synchronise a device: the limbs of a number out of range are NaN, which populations refuse in messages.

    Args:
        value: `(...)`, float64.

    Returns:
        `(..., LIMBS)`, float64, integers of magnitude below 2³³ that have the sign of the number; NaN where it is not
        finite or not smaller than 2¹⁴⁸ in magnitude.
    """
    if exact_sums.usable((value,)):
        return exact_sums.limbs((value,))
    has_limbs = value.abs() < LARGEST
    fraction, exponent = torch.frexp(torch.where(has_limbs, value, 0.0))
    whole = (fraction.abs() * 2.0**53).to(torch.int64)
    position = exponent.to(torch.int64) + (_SCALE - 53)
    whole = whole >> (-position).clamp(0, 54)
    position = position.clamp_min(0)
    place, shift = position // _BITS, position % _BITS
    low, high = (whole & _MASK) << shift, (whole >> _BITS) << shift
    parts = torch.stack((low & _MASK, (low >> _BITS) + (high & _MASK), high >> _BITS), -1)
    index = place.unsqueeze(-1) + torch.arange(3, device=value.device)
    result = parts.new_zeros((*value.shape, LIMBS)).scatter_(-1, index, parts)
    sign = torch.where(has_limbs, torch.sign(value), torch.nan)
    return result.to(torch.float64) * sign.unsqueeze(-1)


def totals(*sums: Sequence[Tensor]) -> list[Tensor]:
    """Return each sum of terms of one shape in limbs, all by one read of the numbers."""
    terms = [term for each in sums for term in each]
    if exact_sums.usable(terms):
        return [exact_sums.limbs(each) for each in sums]
    flat = limbs(torch.cat([term.reshape(-1) for term in terms]) if terms else torch.zeros(0).double())
    parts = iter(flat.split([term.numel() for term in terms]))
    return [sum(next(parts) for _ in each).reshape(*each[0].shape, LIMBS) for each in sums]


def read(*totals: Tensor) -> list[Whole]:
    """Read the sums `totals`, `(..., LIMBS)` each, with one synchronisation of a device.

    Raises:
        ValueError: limbs are NaN or infinite; for tensors on the CPU when their sums are used.
    """
    if exact_sums.usable(totals):
        return [Whole(total) for total in totals]
    flat = [total.reshape(-1, LIMBS) for total in totals]
    numbers = iter(_integers(torch.cat(flat).cpu()))
    return [Whole(total, list(itertools.islice(numbers, len(part)))) for part, total in zip(flat, totals)]


def value(total: Tensor | Whole) -> Tensor:
    """Return the float64 number `(...)` nearest to the sum `total`, limbs `(..., LIMBS)` or a `Whole`."""
    whole = read(total)[0] if isinstance(total, Tensor) else total
    if exact_sums.usable((whole.like,)):
        return _checked(exact_sums.values(whole.like))
    return _tensor([_divide(number, 1 << _SCALE) for number in whole.numbers], whole.like)


def values(*totals: Tensor) -> list[Tensor]:
    """Return `value` of each, by one read of all of them."""
    return [value(whole) for whole in read(*totals)]


def products(weight: Tensor, value: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return w·x and w·x² as sums of float64 numbers without rounding: two and four terms, in the arguments' shape."""
    if weight.shape == value.shape and exact_sums.usable((weight, value)):
        return exact_sums.products(weight, value)
    first = _product(weight, value)
    return first, (*_product(first[0], value), *_product(first[1], value))


def about(zeroth: Whole, first: Whole, second: Whole, centre: Whole) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ w, Σ w (x − c) and Σ w (x − c)², each rounded once.

    Args:
        zeroth: Σ w, as `read`.
        first: Σ w x.
        second: Σ w x².
        centre: c.

    Returns:
        three tensors `(...)`, float64; the third is not negative when all weights are, but for products below 2⁻¹⁶⁰,
        which `limbs` cuts off.

    Example:
        >>> import torch
        >>> w = torch.ones(2, dtype=torch.float64)
        >>> x = torch.tensor([1e12 + 1, 1e12 + 3], dtype=torch.float64)
        >>> centre = torch.tensor(1e12 + 2, dtype=torch.float64)
        >>> total = lambda *terms: sum(limbs(term).sum(0) for term in terms)
        >>> wx, wxx = products(w, x)  # x² = 10²⁴ would be rounded to a multiple of 10⁸
        >>> [float(moment) for moment in about(*read(total(w), total(*wx), total(*wxx), limbs(centre)))]
        [2.0, 0.0, 2.0]
    """
    likes = [whole.like for whole in (zeroth, first, second, centre)]
    if len({like.shape for like in likes}) == 1 and exact_sums.usable(likes):
        return _checked(exact_sums.about(likes)).unbind()  # type: ignore[return-value]
    sums: tuple[list[float], list[float], list[float]] = [], [], []
    d = 1 << _SCALE
    for w, wx, wxx, n in zip(zeroth.numbers, first.numbers, second.numbers, centre.numbers):
        sums[0].append(_divide(w, d))
        sums[1].append(_divide(d * wx - n * w, d * d))
        sums[2].append(_divide(d * d * wxx - n * (2 * d * wx - n * w), d**3))
    return tuple(_tensor(numbers, zeroth.like) for numbers in sums)  # type: ignore[return-value]


def _product(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded product and its rounding error (Dekker 1971, Mul12 after Veltkamp's splitting)."""
    product = first * second
    one, two = _split(first), _split(second)
    error = one[0] * two[0] - product
    error = error + one[0] * two[1]
    error = error + one[1] * two[0]
    return product, error + one[1] * two[1]


def _split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number as the sum of two with 26 bits each."""
    scaled = value * _SPLIT
    high = scaled - (scaled - value)
    return high, value - high


def _integers(total: Tensor) -> list[int]:
    """Convert limbs `(n, LIMBS)` to integers: after carrying, they are the words of two's complement."""
    limbs = total.numpy()
    if not numpy.isfinite(limbs).all():
        raise ValueError(_NOT_FINITE)
    digits = numpy.array(limbs.T, dtype=numpy.int64, order="C")
    carry: Any = 0
    for place in range(LIMBS):
        digits[place] += carry
        carry = digits[place] >> _BITS
        digits[place] &= _MASK
    words = numpy.stack([*(digits[0::2] | digits[1::2] << _BITS), carry], 1).astype("<i8").tobytes()
    size = 4 * LIMBS + 8
    return [int.from_bytes(words[i : i + size], "little", signed=True) for i in range(0, len(words), size)]


def _checked(total: Tensor | None) -> Tensor:
    if total is None:
        raise ValueError(_NOT_FINITE)
    return total


def _divide(numerator: int, denominator: int) -> float:
    """Return the correctly rounded quotient, by division of integers."""
    return numerator / denominator if numerator else 0.0


def _tensor(values: list[float], like: Tensor) -> Tensor:
    assert len(values) == math.prod(like.shape[:-1])
    return torch.tensor(values, dtype=torch.float64, device=like.device).reshape(like.shape[:-1])
