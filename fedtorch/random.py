"""Randomness as an argument: every draw is a pure function of a key.

A *key* is an `int64` scalar tensor and stacked keys are `(K,)` or any shape, so that one call draws for all
clients. Keys of rounds, clients and purposes come from one seed by `fold_in`. Below is the counter-based
generator Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in integer
tensor operations: the same bits on any device, stacked or one by one, and torch's global generator is neither
read nor moved.

Element i of a draw depends on (key, i) only: drawing more leaves the first elements as they are, so padding a
client's data or stacking it with others changes nothing.

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
from collections.abc import Callable, Sequence

import numpy
import torch
from torch import Tensor

__all__ = [
    "bernoulli",
    "beta",
    "bits",
    "choice",
    "exponential",
    "fold_in",
    "gamma",
    "inverse_gamma",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "uniform",
]

_ROUNDS = 10
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_BLOCK = 2**17  # words drawn at a time, which bounds the memory of the temporaries
_DRAW, _FOLD, _GAMMA = 0, 1, 2  # the last counter word, which keeps draws, new keys and proposals apart
_BOOST = _WORD  # the attempt whose words raise a gamma number of small shape; no element needs so many attempts

# Small draws cost what calling torch costs, and scalar tensors spare it the wrapping of numbers.
_CLEAR = torch.tensor(_WORD, device="cpu")
_HALF = torch.tensor(32, device="cpu")
_MULTIPLIERS = torch.tensor(0xD2511F53, device="cpu"), torch.tensor(0xCD9E8D57, device="cpu")


def _philox(key: Tensor, counter: Sequence[Tensor | int]) -> tuple[Tensor, Tensor]:
    """Philox-4x32-10 on keys and four counter words that broadcast.

    Returns:
        words 0 and 2, and words 1 and 3, `(2, *shape)` each; the upper half of the second is not cleared.
    """
    shape = numpy.broadcast_shapes(key.shape, *(word.shape for word in counter if isinstance(word, Tensor)))
    even, odd, spare = key.new_empty((3, 2, *shape)).unbind()
    words, low, spare_low = even.unbind(), odd.unbind(), spare.unbind()
    for target, word in zip((words[0], low[0], words[1], low[1]), counter):
        if isinstance(word, Tensor):
            target.copy_(word)
        else:
            target.fill_(word)
    padded = key.reshape((1,) * (len(shape) - key.ndim) + key.shape)
    rounds = torch.arange(_ROUNDS, device=key.device, dtype=torch.int64).reshape(-1, *(1,) * len(shape))
    round_keys = torch.stack((padded + rounds * _WEYL[0], (padded >> _HALF) + rounds * _WEYL[1]), 1)
    # Only multiplication needs words without their upper half, so that is cleared once a round.
    for round_key in round_keys.unbind():
        torch.mul(words[1], _MULTIPLIERS[1], out=spare_low[0])
        torch.mul(words[0], _MULTIPLIERS[0], out=spare_low[1])
        torch.bitwise_right_shift(spare, _HALF, out=even)
        even.bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(_CLEAR)
        odd, spare, low, spare_low = spare, odd, spare_low, low
    return even, odd


def _words(key: Tensor, start: int, count: int) -> Tensor:
    """Words `start` to `start + count` of each key, `(*key.shape, count)`; `start` is a multiple of four."""
    blocks = torch.arange(start // 4, start // 4 + -(-count // 4), device=key.device, dtype=torch.int64)
    even, odd = _philox(key.unsqueeze(-1), (blocks & _CLEAR, blocks >> _HALF, 0, _DRAW))
    words = torch.stack((even[0], odd[0], even[1], odd[1]), -1).bitwise_and_(_CLEAR)
    return words.flatten(-2)[..., :count]


def _fill(
    key: Tensor, shape: Sequence[int], dtype: torch.dtype, words: int, convert: Callable[[Tensor], Tensor]
) -> Tensor:
    """Draws `(*key.shape, *shape)` in blocks; `convert` turns `words` words an element into elements."""
    _check_key(key)
    count = math.prod(shape)
    step = max(_BLOCK // max(key.numel(), 1) // 8, 1) * 8
    if count * words <= step:
        return convert(_words(key, 0, count * words)).to(dtype).reshape((*key.shape, *shape))
    out = key.new_empty((*key.shape, count), dtype=dtype)
    for start in range(0, count * words, step):
        stop = min(start + step, count * words)
        out[..., start // words : stop // words] = convert(_words(key, start, stop - start))
    return out.reshape((*key.shape, *shape))


def _check_key(key: Tensor) -> None:
    if not isinstance(key, Tensor) or key.dtype != torch.int64:
        got = key.dtype if isinstance(key, Tensor) else type(key).__name__
        raise TypeError(f"Expected a key, an int64 tensor made by random.key and fold_in, but got {got}")


def _check_real(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"Expected a floating-point dtype, but got {dtype}")


def _integers(words: Tensor) -> Tensor:
    """63 bits of each pair of words, `(..., 2n)` -> `(..., n)`."""
    return words[..., ::2].bitwise_left_shift(31).bitwise_or_(words[..., 1::2] >> 1)


def _inside(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform float64 strictly between 0 and 1: of 52 bits of two words for float64, else of one word."""
    if dtype == torch.float64:
        return (_integers(words) >> 11).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


def _words_per(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.float64 else 1


def key(seed: int) -> Tensor:
    """The key of a seed, shape `()`; its 64 bits are Philox's two key words.

    Raises:
        ValueError: the seed is not a 64-bit signed integer.
    """
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"Expected a seed between -2**63 and 2**63 - 1, but got {seed}")
    return torch.tensor(seed, dtype=torch.int64)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key from a key and a number such as a round, a client's identity or a purpose.

    New keys and draws use disjoint counters, so folding into a key that is also drawn from is safe.

    Args:
        key: `(...)`.
        data: an integer or an integer tensor that broadcasts with `key`; folding in all steps at once with
            `fold_in(keys[:, None], torch.arange(steps))` costs little more than folding in one.

    Returns:
        keys in the broadcast shape, one for each (key, data).
    """
    _check_key(key)
    if isinstance(data, Tensor):
        if data.dtype.is_floating_point or data.dtype.is_complex:
            raise TypeError(f"Expected an integer to fold in, but got a tensor of {data.dtype}")
        data = data.to(key.device, torch.int64)
    even, odd = _philox(key, (data & _WORD, (data >> 32) & _WORD, 0, _FOLD))
    return odd[0].bitwise_left_shift(32).bitwise_or_(even[0])


def split(key: Tensor, count: int) -> tuple[Tensor, ...]:
    """`count` new keys of each key, for as many purposes: `fold_in(key, 0)`, `fold_in(key, 1)`, … in one call.

    Returns:
        `count` tensors of the shape of `key`.
    """
    return fold_in(key.unsqueeze(-1), torch.arange(count, device=key.device)).unbind(-1)


def bits(key: Tensor, count: int) -> Tensor:
    """Random 32-bit words; word i depends on (key, i) only.

    Returns:
        `(*key.shape, count)`, int64 from 0 to 2³² − 1.
    """
    return _fill(key, (count,), torch.int64, 1, lambda words: words)


def uniform(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1), with as many random bits as the dtype's significand holds.

    float32 takes 24 bits of one word and float64 takes 53 bits of two, so the two draw different numbers.

    Returns:
        `(*key.shape, *shape)`.
    """
    _check_real(dtype)
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    if dtype == torch.float64:
        convert = lambda words: (_integers(words) >> 10).to(dtype).mul_(2.0**-53)
    else:
        convert = lambda words: (words >> 32 - digits).to(dtype).mul_(2.0**-digits)
    return _fill(key, shape, dtype, _words_per(dtype), convert)


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers by the Box–Muller transform, always finite.

    Elements 2j and 2j + 1 share a radius and an angle. The transform is computed in float64, so that numbers
    of lower precision are the same on any device but for a rare last bit. Nothing is further out than 6.8
    standard deviations, in float64 than 8.6.

    Returns:
        `(*key.shape, *shape)`.
    """
    _check_real(dtype)

    def convert(words: Tensor) -> Tensor:
        inside = _inside(words, dtype)
        radius = inside[..., ::2].log().mul_(-2).sqrt_()
        angle = inside[..., 1::2].mul(2 * math.pi)
        return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten(-2)

    count = math.prod(shape)
    pairs = _fill(key, (count + count % 2,), dtype, _words_per(dtype), convert)
    return pairs[..., :count].reshape((*key.shape, *shape))


def exponential(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Exponential numbers of rate one by inversion, finite and greater than zero (float16: or zero).

    Returns:
        `(*key.shape, *shape)`.
    """
    _check_real(dtype)
    return _fill(key, shape, dtype, _words_per(dtype), lambda words: _inside(words, dtype).log_().neg_())


def gamma(
    key: Tensor, concentration: float | Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    r"""Gamma numbers of a given shape parameter a and rate one, density x^{a−1} e^{−x} / Γ(a).

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
        happens for a < 0.1 only, is raised to it.

    Raises:
        ValueError: a concentration that is not finite and positive.
    """
    _check_key(key)
    _check_real(dtype)
    full = (*key.shape, *shape)
    a = torch.as_tensor(concentration, dtype=torch.float64, device=key.device)
    if not bool(((a > 0) & a.isfinite()).all()):
        raise ValueError(f"Expected finite concentrations above 0, but got {concentration}")
    try:
        a = a.expand(full)
    except RuntimeError:
        raise ValueError(f"Expected a concentration that broadcasts to {full}, but got {tuple(a.shape)}") from None
    count = math.prod(shape)
    keys, a = key.reshape(-1, 1), a.reshape(key.numel(), count)
    out = key.new_empty((key.numel(), count), dtype=dtype)
    step = max(_BLOCK // max(key.numel(), 1) // 4, 1)
    for start in range(0, count, step):
        stop = min(start + step, count)
        element = torch.arange(start, stop, device=key.device)
        out[:, start:stop] = _marsaglia_tsang(keys, element, a[:, start:stop]).clamp_min_(torch.finfo(dtype).tiny)
    return out.reshape(full)


def _marsaglia_tsang(keys: Tensor, element: Tensor, a: Tensor) -> Tensor:
    """Gamma numbers `(Q, n)` of keys `(Q, 1)`, elements `(n,)` and shape parameters `(Q, n)`."""
    small = a < 1
    raised = torch.where(small, a + 1, a)
    value, accepted = _propose(keys, element, 0, raised)
    attempt = 1
    while not bool(accepted.all()):
        row, column = (~accepted).nonzero(as_tuple=True)
        again, fine = _propose(keys[row, 0], element[column], attempt, raised[row, column])
        value[row, column], accepted[row, column] = again, fine
        attempt += 1
    if bool(small.any()):
        row, column = small.nonzero(as_tuple=True)
        words = _blocks(keys[row, 0], element[column], _BOOST)
        value[row, column] *= (_inside(words, torch.float64)[..., 0].log() / a[row, column]).exp()
    return value


def _propose(keys: Tensor, element: Tensor, attempt: int, a: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers, whether they are accepted) of one attempt; a ≥ 1."""
    words = _blocks(keys, element, attempt)
    radius = _inside(words[..., :2].contiguous(), torch.float64)[..., 0].log().mul_(-2).sqrt_()
    angle = words[..., 2].to(torch.float64).mul_(2 * math.pi * 2.0**-32)
    x = radius * angle.cos()
    d = a - 1 / 3
    root = x.div((9 * d).sqrt()).add_(1)
    v = root * root * root
    bound = x.square().div_(2).add_(d * (1 - v + v.clamp_min(torch.finfo(torch.float64).tiny).log()))
    coin = words[..., 3].to(torch.float64).add_(0.5).mul_(2.0**-32).log_()
    return d * v, (v > 0) & (coin < bound)


def _blocks(keys: Tensor, element: Tensor, attempt: int) -> Tensor:
    """The four words of counter (element, attempt) for proposals, `(..., 4)`."""
    even, odd = _philox(keys, (element & _CLEAR, element >> _HALF, attempt, _GAMMA))
    return torch.stack((even[0], odd[0], even[1], odd[1]), -1).bitwise_and_(_CLEAR)


def inverse_gamma(
    key: Tensor, concentration: float | Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Inverse gamma numbers of a given shape parameter a and scale one: 1 / `gamma(...)`, at most the largest finite.

    Args and errors as for `gamma`; IG(a, b) has density proportional to x^{−a−1} e^{−b/x} and is b times this.
    """
    draws = gamma(key, concentration, shape, torch.float64).reciprocal_()
    return draws.clamp_max_(torch.finfo(dtype).max).to(dtype)


def beta(
    key: Tensor, a: float | Tensor, b: float | Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Beta numbers X / (X + Y), X and Y gamma numbers of shape parameters a and b from two keys made of `key`.

    Args:
        key: `(...)`.
        a: finite and positive, a number or a tensor that broadcasts to the result.
        b: likewise.
        shape: of one key's numbers.
        dtype: floating point.

    Returns:
        `(*key.shape, *shape)`, between 0 and 1.
    """
    one, other = split(key, 2)
    first, second = gamma(one, a, shape, torch.float64), gamma(other, b, shape, torch.float64)
    return (first / (first + second)).to(dtype)


def bernoulli(key: Tensor, probability: float | Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Coins that show true with a given probability, to a resolution of 2⁻³².

    Args:
        key: `(...)`.
        probability: a number, or a tensor that broadcasts to the result.
        shape: of one key's coins.

    Returns:
        `(*key.shape, *shape)`, bool; coin i is whether word i is less than 2³² times its probability.

    Raises:
        ValueError: a number outside [0, 1]; tensors are not checked.
    """
    if isinstance(probability, Tensor):
        words = bits(key, math.prod(shape)).reshape((*key.shape, *shape))
        return words < probability.to(torch.float64).mul(2.0**32).expand(words.shape)
    if not 0 <= probability <= 1:
        raise ValueError(f"Expected a probability between 0 and 1, but got {probability}")
    threshold = math.ceil(probability * 2**32)
    return _fill(key, shape, torch.bool, 1, lambda words: words < threshold)


def randint(key: Tensor, high: int | Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Integers from 0 to `high − 1`: 63 random bits modulo `high`, probabilities off by less than 2⁻⁶³ each.

    Args:
        key: `(...)`.
        high: a number, or an int64 tensor `(*key.shape)`; where it is zero, so is the result.
        shape: of one key's integers.

    Returns:
        `(*key.shape, *shape)`, int64.
    """
    if isinstance(high, Tensor):
        modulus: int | Tensor = high.expand(key.shape).unsqueeze(-1).clamp_min(1)
    elif high < 1:
        raise ValueError(f"Expected a positive bound, but got high = {high}")
    else:
        modulus = high
    return _fill(key, shape, torch.int64, 2, lambda words: _integers(words).remainder_(modulus))


def permutation(key: Tensor, size: int, count: Tensor | None = None) -> Tensor:
    """A random permutation of the first `count` integers, followed by the others in order.

    Each integer draws 63 bits and these are sorted, so the first `count` entries do not depend on `size`.

    Args:
        key: `(...)`.
        size: how many integers there are.
        count: `(*key.shape)`, how many of them to permute; all by default.

    Returns:
        `(*key.shape, size)`, int64.
    """
    scores = _fill(key, (size,), torch.int64, 2, _integers)
    if count is not None:
        rest = torch.arange(size, device=key.device) >= count.expand(key.shape).unsqueeze(-1)
        scores = scores.masked_fill_(rest, 2**63 - 1)
    return scores.argsort(dim=-1, stable=True)


def choice(key: Tensor, population: int, count: int) -> Tensor:
    """Distinct integers from 0 to `population − 1`, every subset equally likely.

    Returns:
        `(*key.shape, count)`, int64 in ascending order.

    Raises:
        ValueError: `count` is negative or greater than `population`.
    """
    if not 0 <= count <= population:
        raise ValueError(f"Expected a count between 0 and the population of {population}, but got {count}")
    return permutation(key, population)[..., :count].sort(dim=-1).values
