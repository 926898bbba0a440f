r"""Numbers from keys: Philox-4x32-10 words and their transformations, in one pass.

The reference is integer tensor operations, some ninety passes over memory: the same bits on any device. Programs, in
Triton for a CUDA device and by numba for the CPU, make a block of four words a lane in registers and write numbers
only; words, integers, coins and uniform numbers are the same bits, normal, exponential and gamma numbers the same
float64 formulas, equal up to the last bit or two. A gamma number's lane proposes until one is accepted, without waiting
for the host.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; Box and Muller 1958; Marsaglia and Tsang,
"A simple method for generating gamma variables", ACM TOMS 26, 2000. Bound: integer arithmetic, about a hundred
operations a block, not bandwidth; float64 logarithms for normal numbers.

Not differentiable: a draw depends on a key. Results: any floating-point dtype.

>>> import torch, fedtorch as ft
>>> from fedtorch.random import philox
>>> key, many, double = ft.random.key(7), (10_000,), torch.float64
>>> mean = lambda drawn: round(abs(float(drawn.double().mean())), 1)
>>> mean(philox.uniform(key, many, double)), mean(philox.normal(key, many, double))
(0.5, 0.0)
>>> mean(philox.exponential(key, many, double)), mean(philox.coins(key, many, threshold=2**32 // 5))
(1.0, 0.2)
>>> mean(philox.integers(key, many) / 2**63)
0.5
>>> mean(philox.gamma(key[None], torch.full((1, *many), 3.0).double(), double))
3.0
>>> children = philox.folded(key, torch.arange(3))  # a key for each of three clients
>>> philox.uniform(children, (2,), torch.float32).shape
torch.Size([3, 2])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from fedtorch.programs import philox as compiled
from fedtorch.programs.choice import plain, triton_programs
from fedtorch.programs.launch import launch, tile
from fedtorch.programs.philox import DRAW, FOLD, GAMMA

WORD = 0xFFFFFFFF

_ROUNDS = 10
_WEYL = 0x9E3779B9, 0xBB67AE85
# Small draws cost as much as a call of torch, and scalar tensors avoid wrapping numbers.
_CLEAR = torch.tensor(WORD, device="cpu")
_HALF = torch.tensor(32, device="cpu")
_FIRST, _SECOND = 0xD2511F53, 0xCD9E8D57  # factors of words 0 and 2
_MULTIPLIERS = torch.tensor(_FIRST, device="cpu"), torch.tensor(_SECOND, device="cpu")
_SHORT = 64  # ratio of keys to blocks per key
_LOWER, _UPPER, _FACTORS = numpy.uint64(WORD), numpy.uint64(32), numpy.array((_SECOND, _FIRST), numpy.uint64)
_STEPS = numpy.arange(_ROUNDS, dtype=numpy.uint64)[:, None] * numpy.array(_WEYL, numpy.uint64)  # of both key words


def philox(key: Tensor, counter: Sequence[Tensor | int]) -> tuple[Tensor, Tensor]:
    """Return Philox-4x32-10 of keys and four counter words that broadcast.

    That is words 0 and 2, and words 1 and 3, `(2, *shape)` each; the upper half of the second is not cleared.
    """
    tensors = [key, *(word for word in counter if isinstance(word, Tensor))]
    if plain(tensors):
        return _philox_numpy(key, counter)
    shape = numpy.broadcast_shapes(*(word.shape for word in tensors))
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
    # Only multiplication needs words with a cleared upper half, so that is cleared once a round.
    for round_key in round_keys.unbind():
        torch.mul(words[1], _MULTIPLIERS[1], out=spare_low[0])
        torch.mul(words[0], _MULTIPLIERS[0], out=spare_low[1])
        torch.bitwise_right_shift(spare, _HALF, out=even)
        even.bitwise_xor_(odd).bitwise_xor_(round_key).bitwise_and_(_CLEAR)
        odd, spare, low, spare_low = spare, odd, spare_low, low
    return even, odd


def _philox_numpy(key: Tensor, counter: Sequence[Tensor | int]) -> tuple[Tensor, Tensor]:
    """Return `philox` of tensors on the CPU, by NumPy, whose operations on few words cost a third of torch's."""
    words = [word.numpy().view(numpy.uint64) if isinstance(word, Tensor) else numpy.uint64(word) for word in counter]
    whole = key.numpy().view(numpy.uint64)
    shape = numpy.broadcast_shapes(whole.shape, *(word.shape for word in words))
    # the loop over keys is longer than that over their blocks
    turned = len(shape) == 2 and _SHORT * shape[1] <= shape[0]
    even = numpy.empty((2, *(reversed(shape) if turned else shape)), numpy.uint64)
    even = even.swapaxes(1, 2) if turned else even
    odd, spare, swapped = numpy.empty_like(even), numpy.empty_like(even), even[::-1]
    even[0], odd[0], even[1], odd[1] = words
    ones = (1,) * (even.ndim - 1)
    round_keys = numpy.empty((2, *ones[whole.ndim :], *whole.shape), numpy.uint64)
    round_keys[0], round_keys[1] = whole & _LOWER, whole >> _UPPER
    factors = _FACTORS.reshape(2, *ones)
    for round_key in round_keys + _STEPS.reshape(_ROUNDS, 2, *ones):
        numpy.multiply(swapped, factors, out=spare)
        numpy.right_shift(spare, _UPPER, out=even)
        even ^= odd
        even ^= round_key
        even &= _LOWER
        odd, spare = spare, odd
    return torch.from_numpy(even.view(numpy.int64)), torch.from_numpy(odd.view(numpy.int64))


def block_words(key: Tensor, block: Tensor, attempt: int, purpose: int) -> Tensor:
    """Return the four words of the counter (block, attempt, purpose) of each key, `(..., 4)`."""
    even, odd = philox(key, (block & _CLEAR, block >> _HALF, attempt, purpose))
    return torch.stack((even[0], odd[0], even[1], odd[1]), -1).bitwise_and_(_CLEAR)


def folded_singly(key: Tensor, data: Tensor | int) -> Tensor:
    """Return `folded` of few keys by Python integers, five times as fast as arrays for them."""
    if isinstance(data, int):
        shape, keys, numbers = key.shape, key.reshape(-1).tolist(), [data] * key.numel()
    else:
        both = torch.broadcast_tensors(key, data)
        shape, (keys, numbers) = both[0].shape, (part.reshape(-1).tolist() for part in both)
    made = [_folded_number(*each) for each in zip(keys, numbers)]
    return torch.tensor(made, dtype=torch.int64).reshape(shape)


def _folded_number(key: int, number: int) -> int:
    a, b, c, d = number & WORD, (number >> 32) & WORD, 0, FOLD
    low, high = key & WORD, (key >> 32) & WORD
    for _ in range(_ROUNDS):
        first, second = a * _FIRST, c * _SECOND
        a, b, c, d = (second >> 32) ^ b ^ low, second & WORD, (first >> 32) ^ d ^ high, first & WORD
        low, high = (low + _WEYL[0]) & WORD, (high + _WEYL[1]) & WORD
    return ((b ^ 2**31) << 32 | a) - 2**63  # as a signed number


BLOCK = 2**16  # words drawn at a time, so that temporaries fit a cache of a megabyte
_BOOST = WORD  # attempt whose words transform a gamma number of small shape; no element needs so many attempts
_LANES = 256  # of a program
_SINGLY = 8  # most new keys that are made one after the other


def bits(key: Tensor, count: int) -> Tensor:
    """Return 32-bit words `(*key.shape, count)` as int64; word i is word i % 4 of the block i // 4."""
    return _drawn("BITS", key, (count,), torch.int64, 1, lambda words: words)


def integers(key: Tensor, shape: Sequence[int], elements: Tensor | None = None) -> Tensor:
    """Return 63 bits of two words each, `(*key.shape, *shape)`; or these elements `(n,)` alone of a longer draw."""
    return _drawn("INTEGERS", key, shape, torch.int64, 2, _joined_words, elements=elements)


def coins(key: Tensor, shape: Sequence[int], threshold: int, elements: Tensor | None = None) -> Tensor:
    """Return whether words are less than `threshold`, `(*key.shape, *shape)`; or these elements alone."""
    return _drawn("COINS", key, shape, torch.bool, 1, lambda words: words < threshold, threshold, elements)


def uniform(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1) with as many bits as the dtype's significand holds, `(*key.shape, *shape)`."""
    digits = _digits(dtype)
    if dtype == torch.float64:
        convert = lambda words: (_joined_words(words) >> 10).to(dtype).mul_(2.0**-53)
    else:
        convert = lambda words: (words >> 32 - digits).to(dtype).mul_(2.0**-digits)
    return _drawn("UNIFORM", key, shape, dtype, _words_per(dtype), convert, digits)


def normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers `(*key.shape, *shape)`; elements 2j and 2j + 1 share a radius and an angle."""

    def convert(words: Tensor) -> Tensor:
        inside = _between(words, dtype)
        radius = inside[..., ::2].log().mul_(-2).sqrt_()
        angle = inside[..., 1::2].mul(2 * math.pi)
        return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten(-2)

    return _drawn("NORMAL", key, shape, dtype, _words_per(dtype), convert)


def exponential(key: Tensor, shape: Sequence[int], dtype: torch.dtype, elements: Tensor | None = None) -> Tensor:
    """Return exponential numbers of rate one, `(*key.shape, *shape)`; or these elements alone."""
    convert = lambda words: _between(words, dtype).log_().neg_()
    return _drawn("EXPONENTIAL", key, shape, dtype, _words_per(dtype), convert, elements=elements)


def gamma(keys: Tensor, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gamma numbers of rate one, at least the dtype's smallest normal one.

    Args:
        keys: `(Q,)`.
        a: shape parameters `(Q, n)` in float64; where one is not finite and positive, the number is NaN.
        dtype: of the numbers, `(Q, n)`.
    """
    if compiled.usable(keys, a):
        return compiled.gamma(keys, a, dtype)
    known = (a > 0) & a.isfinite()
    a, out = torch.where(known, a, 1.0), keys.new_empty(a.shape, dtype=dtype)
    smallest, (queries, count) = torch.finfo(dtype).tiny, a.shape
    programs = triton_programs("fedtorch.programs.triton.philox", (keys, a), (torch.int64,))
    if programs:
        rows, columns = tile(count, _LANES)
        across = -(-count // columns)
        arguments = (out, keys.contiguous(), a.contiguous(), queries, count, smallest, across)
        launch(programs.gamma, across * -(-queries // rows), *arguments, ROWS=rows, COLUMNS=columns, warps=8)
        return out.masked_fill_(~known, torch.nan)
    step = max(BLOCK // max(queries, 1) // 4, 1)
    for start in range(0, count, step):
        stop = min(start + step, count)
        element = torch.arange(start, stop, device=keys.device)
        out[:, start:stop] = _marsaglia_tsang(keys[:, None], element, a[:, start:stop]).clamp_min_(smallest)
    return out.masked_fill_(~known, torch.nan)


def folded(key: Tensor, data: Tensor | int) -> Tensor:
    """Make new keys of keys and int64 numbers that broadcast."""
    tensors = (key,) if isinstance(data, int) else (key, data)
    if math.prod(part.numel() for part in tensors) <= _SINGLY and plain(tensors):
        return folded_singly(key, data)
    if compiled.usable(*tensors):
        return compiled.fold(key, data)
    programs = triton_programs("fedtorch.programs.triton.philox", tensors, (torch.int64,))
    if not programs:
        even, odd = philox(key, (data & WORD, (data >> 32) & WORD, 0, FOLD))
        return odd[0].bitwise_left_shift(32).bitwise_or_(even[0])
    number = torch.full_like(key, data) if isinstance(data, int) else data
    keys, numbers = (part.contiguous() for part in torch.broadcast_tensors(key, number))
    out = torch.empty_like(keys)
    launch(programs.fold, -(-out.numel() // _LANES), out, keys, numbers, out.numel(), FOLD, BLOCK=_LANES)
    return out


def _words(key: Tensor, start: int, count: int) -> Tensor:
    """Return words `start` to `start + count` of each key, `(*key.shape, count)`; `start` is a multiple of four."""
    blocks = torch.arange(start // 4, start // 4 + -(-count // 4), device=key.device, dtype=torch.int64)
    return block_words(key.unsqueeze(-1), blocks, 0, DRAW).flatten(-2)[..., :count]


def _words_at(key: Tensor, elements: Tensor, words: int) -> Tensor:
    """Return the one or two words of each of these elements `(n,)` of a draw, `(*key.shape, n * words)`."""
    each = 4 // words  # elements of a block
    blocks = block_words(key.unsqueeze(-1), elements // each, 0, DRAW)
    place = (elements % each * words).unsqueeze(-1) + torch.arange(words, device=elements.device)
    return blocks.gather(-1, place.expand(*blocks.shape[:-1], words)).flatten(-2)


def _fill(
    key: Tensor, shape: Sequence[int], dtype: torch.dtype, words: int, convert: Callable[[Tensor], Tensor]
) -> Tensor:
    """Draw `(*key.shape, *shape)` in blocks; `convert` turns `words` words per element into elements."""
    check_key(key)
    count = math.prod(shape)
    step = max(BLOCK // max(key.numel(), 1) // 8, 1) * 8
    if count * words <= step:
        return convert(_words(key, 0, count * words)).to(dtype).reshape((*key.shape, *shape))
    out = key.new_empty((*key.shape, count), dtype=dtype)
    for start in range(0, count * words, step):
        stop = min(start + step, count * words)
        out[..., start // words : stop // words] = convert(_words(key, start, stop - start))
    return out.reshape((*key.shape, *shape))


def check_key(key: Tensor) -> None:
    """Raise TypeError unless `key` is an int64 tensor.

    >>> check_key(7)
    Traceback (most recent call last):
    TypeError: Expected a key, an int64 tensor made by random.key and fold_in, but got int
    """
    if not isinstance(key, Tensor) or key.dtype != torch.int64:
        got = key.dtype if isinstance(key, Tensor) else type(key).__name__
        raise TypeError(f"Expected a key, an int64 tensor made by random.key and fold_in, but got {got}")


def _joined_words(words: Tensor) -> Tensor:
    """Return 63 bits of each pair of words, `(..., 2n)` -> `(..., n)`."""
    return words[..., ::2].bitwise_left_shift(31).bitwise_or_(words[..., 1::2] >> 1)


def _between(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uniform float64 strictly between 0 and 1: of 52 bits of two words for float64, else of one word."""
    if dtype == torch.float64:
        return (_joined_words(words) >> 11).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


def _words_per(dtype: torch.dtype) -> int:
    """Return how many words a number of this dtype takes."""
    return 2 if dtype == torch.float64 else 1


def _digits(dtype: torch.dtype) -> int:
    """Return the bits of a floating-point dtype's significand."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


def _drawn(
    form: str,
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    words: int,
    convert: Callable[[Tensor], Tensor],
    argument: int = 0,
    elements: Tensor | None = None,
) -> Tensor:
    """Draw `(*key.shape, *shape)` by the program of this form, or by `convert` of `words` words per element.

    The argument is the threshold of coins, or the digits of uniform numbers. Elements are numbers below 2⁶³.
    """
    check_key(key)
    if elements is not None:
        parts = elements.split(max(BLOCK // max(key.numel(), 1) // 8, 1))
        return torch.cat([convert(_words_at(key, part, words)).to(dtype) for part in parts], -1)
    if compiled.usable(key):
        return compiled.draw(form, key, shape, dtype, argument)
    count, queries = math.prod(shape), key.numel()
    programs: Any = triton_programs("fedtorch.programs.triton.philox", (key,), (torch.int64,))
    if not programs:
        even = count + count % 2  # numbers that are made in pairs
        return _fill(key, (even,), dtype, words, convert)[..., :count].reshape((*key.shape, *shape))
    out = key.new_empty((*key.shape, *shape), dtype=dtype)
    rows, columns = tile(-(-count * words // 4), _LANES)
    across = -(-count * words // (4 * columns))
    constants = {
        "FORM": getattr(programs, form).value,
        "WIDE": words == 2,
        "DIGITS": argument if form == "UNIFORM" else 0,
        "ROWS": rows,
        "COLUMNS": columns,
    }
    arguments = (out, key.contiguous(), queries, count, argument, across)
    launch(programs.draw, across * -(-queries // rows), *arguments, **constants)
    return out


def _marsaglia_tsang(keys: Tensor, element: Tensor, a: Tensor) -> Tensor:
    """Return gamma numbers `(Q, n)` of keys `(Q, 1)`, elements `(n,)` and shape parameters `(Q, n)`."""
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
        words = block_words(keys[row, 0], element[column], _BOOST, GAMMA)
        value[row, column] *= (_between(words, torch.float64)[..., 0].log() / a[row, column]).exp()
    return value


def _propose(keys: Tensor, element: Tensor, attempt: int, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return (numbers, whether they are accepted) of one attempt; a ≥ 1."""
    words = block_words(keys, element, attempt, GAMMA)
    radius = _between(words[..., :2].contiguous(), torch.float64)[..., 0].log().mul_(-2).sqrt_()
    angle = words[..., 2].to(torch.float64).mul_(2 * math.pi * 2.0**-32)
    x = radius * angle.cos()
    d = a - 1 / 3
    root = x.div((9 * d).sqrt()).add_(1)
    v = root * root * root
    bound = x.square().div_(2).add_(d * (1 - v + v.clamp_min(torch.finfo(torch.float64).tiny).log()))
    coin = words[..., 3].to(torch.float64).add_(0.5).mul_(2.0**-32).log_()
    return d * v, (v > 0) & (coin < bound)
