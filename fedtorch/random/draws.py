"""Randomness as an argument: every draw is a pure function of a key.

A *key* is an `int64` scalar tensor and stacked keys are `(K,)` or any shape, so that one call draws for all
clients. Keys of rounds, clients and purposes come from one seed by `fold_in`. The bits are those of the
counter-based generator in `fedtorch.random.philox`: the same on any device, stacked or one by one, and torch's global
generator is neither read nor moved.

Element i of a draw depends on (key, i) only: a longer draw has the same first elements, so padding a client's data or
stacking it with others changes nothing.

>>> import torch
>>> from fedtorch import random
>>> clients = random.fold_in(random.key(0), torch.arange(3))
>>> random.uniform(clients, (2,)).shape
torch.Size([3, 2])
>>> bool((random.uniform(clients, (9,))[:, :2] == random.uniform(clients, (2,))).all())
True
>>> random.permutation(clients[0], 6, count=torch.tensor(3))[3:]
tensor([3, 4, 5])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedtorch.random import philox
from fedtorch.random.philox import check_key

_MANY, _FEW = 2**14, 32  # above the first number, at most the 32nd part is drawn one after the other


def _check_real(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"Expected a floating-point dtype, but got {dtype}")


def key(seed: int | Sequence[int]) -> Tensor:
    """Return the key of a seed, `()`, or one for each of several, `(B,)`; its 64 bits are Philox's two key words.

    Raises:
        ValueError: a seed that is not a 64-bit signed integer, or none.

    >>> key(3).shape, key([0, 1]).shape, key(range(3)).shape
    (torch.Size([]), torch.Size([2]), torch.Size([3]))
    """
    seeds = seed if isinstance(seed, Sequence) else [seed]
    if not seeds or not all(-(2**63) <= one < 2**63 for one in seeds):
        raise ValueError(f"Expected a seed between -2**63 and 2**63 - 1, or several, but got {seed}")
    return torch.tensor(seed, dtype=torch.int64)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Make a new key of a key and a number such as a round, a client's identity or a purpose.

    New keys and draws use disjoint counters, so folding into a key that is also drawn from is safe.

    Args:
        key: `(...)`.
        data: an integer or an integer tensor that broadcasts with `key`; folding in all steps at once with
            `fold_in(keys[:, None], torch.arange(steps))` costs little more than folding in one.

    Returns:
        keys in the broadcast shape, one for each (key, data).
    """
    check_key(key)
    if isinstance(data, Tensor):
        if data.dtype.is_floating_point or data.dtype.is_complex:
            raise TypeError(f"Expected an integer to fold in, but got a tensor of {data.dtype}")
        data = data.to(key.device, torch.int64)
    return philox.folded(key, data)


def split(key: Tensor, count: int) -> tuple[Tensor, ...]:
    """Make `count` new keys of each key: `fold_in(key, 0)`, `fold_in(key, 1)`, … in one call.

    Returns:
        `count` tensors of the shape of `key`.

    Example:
        >>> rows, noise = split(key(0), 2)
        >>> bool(noise == fold_in(key(0), 1))
        True
    """
    return fold_in(key.unsqueeze(-1), torch.arange(count, device=key.device)).unbind(-1)


def bits(key: Tensor, count: int) -> Tensor:
    """Draw random 32-bit words; word i depends on (key, i) only.

    Returns:
        `(*key.shape, count)`, int64 from 0 to 2³² − 1.

    Example:
        >>> words = bits(fold_in(key(0), torch.arange(3)), 4)
        >>> words.shape, bool((words >> 32 == 0).all())
        (torch.Size([3, 4]), True)
    """
    return philox.bits(key, count)


def uniform(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw uniform numbers in [0, 1), with as many random bits as the dtype's significand holds.

    float32 takes 24 bits of one word and float64 takes 53 bits of two, so the two draw different numbers.

    Returns:
        `(*key.shape, *shape)`.
    """
    _check_real(dtype)
    return philox.uniform(key, shape, dtype)


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard normal numbers by the Box–Muller transform, always finite.

    Elements 2j and 2j + 1 share a radius and an angle. The transform is computed in float64, so that numbers
    of lower precision are the same on any device but for a rare last bit. Nothing is further out than 6.8
    standard deviations, in float64 than 8.6.

    Returns:
        `(*key.shape, *shape)`.
    """
    _check_real(dtype)
    return philox.normal(key, shape, dtype)


def exponential(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw exponential numbers of rate one by inversion, finite and greater than zero (float16: or zero).

    Returns:
        `(*key.shape, *shape)`.
    """
    _check_real(dtype)
    return philox.exponential(key, shape, dtype)


def gamma(
    key: Tensor, concentration: float | Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    r"""Draw gamma numbers with shape parameter a and rate one, density x^{a−1} e^{−x} / Γ(a).

    With d = a − 1/3 and c = 1/√(9d), a standard normal x and a uniform u are accepted when

    .. math:: v = (1 + c x)^3 > 0, \qquad \log u < x^2 / 2 + d - d v + d \log v,

    and d v is the number (Marsaglia and Tsang, "A simple method for generating gamma variables", ACM TOMS 26, 2000,
    section 5); below a = 1 it is that of a + 1 times u^{1/a} (section 6). The r-th attempt of element i reads the
    Philox block of counter (i, r) whatever happens to the others, so element i depends on (key, i, its own a) only.
    At least 95 % of first attempts are accepted; the others are made anew for the refused elements alone. The
    computation is in float64, from 52 bits of radius and 32 of angle and of the coin.

    Args:
        key: `(...)`.
        concentration: a > 0, a number or a tensor that broadcasts to the result.
        shape: of one key's numbers.
        dtype: floating point.

    Returns:
        `(*key.shape, *shape)`, finite and greater than zero: what is below the dtype's smallest normal number, which
        happens for a < 0.1 only, is raised to it. NaN where a tensor is not finite and positive.

    Raises:
        ValueError: a number that is not finite and positive; tensors are not asked, which might be on a device.

    Example:
        >>> draws = gamma(key(0), torch.tensor([[0.5], [4.0]]), (2, 10_000), torch.float64)
        >>> draws.mean(1).round(decimals=1), draws.var(1).round(decimals=1)  # both are a
        (tensor([0.5000, 4.0000], dtype=torch.float64), tensor([0.5000, 4.0000], dtype=torch.float64))
    """
    check_key(key)
    _check_real(dtype)
    full = (*key.shape, *shape)
    if isinstance(concentration, Tensor):
        a = concentration.to(key.device, torch.float64)
    elif 0 < concentration < math.inf:
        a = torch.tensor(concentration, dtype=torch.float64, device=key.device)
    else:
        raise ValueError(f"Expected finite concentrations above 0, but got {concentration}")
    try:
        a = a.expand(full)
    except RuntimeError:
        raise ValueError(f"Expected a concentration that broadcasts to {full}, but got {tuple(a.shape)}") from None
    return philox.gamma(key.reshape(-1), a.reshape(key.numel(), math.prod(shape)), dtype).reshape(full)


def inverse_gamma(
    key: Tensor, concentration: float | Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw inverse gamma numbers of shape parameter a and scale one: 1 / `gamma(...)`, at most the largest finite.

    Args and errors as for `gamma`; IG(a, b) has density proportional to x^{−a−1} e^{−b/x} and is b times this.

    Example:
        >>> round(float(inverse_gamma(key(0), 5.0, (10_000,)).mean()), 2)  # 1 / (a − 1)
        0.25
    """
    draws = gamma(key, concentration, shape, torch.float64).reciprocal_()
    return draws.clamp_max_(torch.finfo(dtype).max).to(dtype)


def beta(
    key: Tensor, a: float | Tensor, b: float | Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw beta numbers X / (X + Y), of gamma numbers X and Y of shape parameters a and b from two keys of `key`.

    Args:
        key: `(...)`.
        a: finite and positive, a number or a tensor that broadcasts to the result.
        b: likewise.
        shape: of one key's numbers.
        dtype: floating point.

    Returns:
        `(*key.shape, *shape)`, between 0 and 1.

    Example:
        >>> round(float(beta(key(0), 1.0, 3.0, (10_000,)).mean()), 2)  # a / (a + b)
        0.25
    """
    one, other = split(key, 2)
    first, second = gamma(one, a, shape, torch.float64), gamma(other, b, shape, torch.float64)
    return (first / (first + second)).to(dtype)


def bernoulli(key: Tensor, probability: float | Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draw booleans with a given probability of True, to a resolution of 2⁻³².

    Args:
        key: `(...)`.
        probability: a number, or a tensor that broadcasts to the result.
        shape: of one key's coins.

    Returns:
        `(*key.shape, *shape)`, bool; coin i is whether word i is less than 2³² times its probability.

    Raises:
        ValueError: a number outside [0, 1]; tensors are not checked.

    Example:
        >>> clients = fold_in(key(0), torch.arange(10_000))
        >>> round(float(bernoulli(clients, 0.2).float().mean()), 1)  # who takes part
        0.2
        >>> bernoulli(key(0), torch.tensor([0.0, 1.0]), (2,))
        tensor([False,  True])
    """
    if isinstance(probability, Tensor):
        words = bits(key, math.prod(shape)).reshape((*key.shape, *shape))
        return words < probability.to(torch.float64).mul(2.0**32).expand(words.shape)
    if not 0 <= probability <= 1:
        raise ValueError(f"Expected a probability between 0 and 1, but got {probability}")
    return philox.coins(key, shape, math.ceil(probability * 2**32))


def randint(key: Tensor, high: int | Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Draw integers from 0 to `high − 1`: 63 random bits modulo `high`, probabilities off by less than 2⁻⁶³ each.

    Args:
        key: `(...)`.
        high: a number, or an int64 tensor `(*key.shape)`; where it is zero, so is the result.
        shape: of one key's integers.

    Returns:
        `(*key.shape, *shape)`, int64.

    Example:
        >>> clients = fold_in(key(0), torch.arange(3))
        >>> randint(clients, torch.tensor([2, 100, 0]), (4,))  # with replacement, of clients with 2, 100 and 0 rows
        tensor([[ 0,  0,  1,  1],
                [ 7, 66, 44, 71],
                [ 0,  0,  0,  0]])
    """
    if isinstance(high, Tensor):
        modulus: int | Tensor = high.expand(key.shape).unsqueeze(-1).clamp_min(1)
    elif high < 1:
        raise ValueError(f"Expected a positive bound, but got high = {high}")
    else:
        modulus = high
    numbers = philox.integers(key, (math.prod(shape),)).remainder_(modulus)
    return numbers.reshape((*key.shape, *shape))


def permutation(key: Tensor, size: int, count: Tensor | None = None) -> Tensor:
    """Draw a permutation of the first `count` integers, followed by the others in order.

    Each integer draws 63 bits and these are sorted, so the first `count` entries do not depend on `size`.

    Args:
        key: `(...)`.
        size: number of integers.
        count: `(*key.shape)`, how many of them to permute; default: all.

    Returns:
        `(*key.shape, size)`, int64.
    """
    scores = philox.integers(key, (size,))
    if count is not None:
        rest = torch.arange(size, device=key.device) >= count.expand(key.shape).unsqueeze(-1)
        scores = scores.masked_fill_(rest, 2**63 - 1)
    return scores.argsort(dim=-1, stable=True)


def choice(key: Tensor, population: int, count: int) -> Tensor:
    """Draw distinct integers from 0 to `population − 1`, every subset with equal probability.

    For a few of very many they are drawn one after the other, and repetitions are dropped; otherwise all are permuted.

    Returns:
        `(*key.shape, count)`, int64 in ascending order.

    Raises:
        ValueError: `count` is negative or greater than `population`.

    Example:
        >>> rounds = fold_in(key(0), torch.arange(3))
        >>> choice(rounds, 5, 2)  # two of five clients in each of three rounds
        tensor([[2, 3],
                [0, 3],
                [2, 3]])
    """
    if not 0 <= count <= population:
        raise ValueError(f"Expected a count between 0 and the population of {population}, but got {count}")
    if population >= _MANY and 0 < _FEW * count <= population:
        drawn = randint(key, population, (2 * count + 64,))
        value, place = drawn.sort(dim=-1, stable=True)
        place[..., 1:].masked_fill_(value[..., 1:] == value[..., :-1], drawn.shape[-1])  # a repetition
        last = place.sort(dim=-1).values[..., count - 1 : count]
        if bool((last < drawn.shape[-1]).all()):
            return value[place <= last].reshape(*key.shape, count)
    return permutation(key, population)[..., :count].sort(dim=-1).values
