"""Philox-4x32-10 in integer operations of torch and NumPy: the same words on any device, without any program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from fedtorch.programs.choice import plain
from fedtorch.programs.philox import FOLD

WORD = 0xFFFFFFFF

_ROUNDS = 10
_WEYL = 0x9E3779B9, 0xBB67AE85
# Small draws cost what calling torch costs, and scalar tensors spare it the wrapping of numbers.
_CLEAR = torch.tensor(WORD, device="cpu")
_HALF = torch.tensor(32, device="cpu")
_FIRST, _SECOND = 0xD2511F53, 0xCD9E8D57  # factors of words 0 and 2
_MULTIPLIERS = torch.tensor(_FIRST, device="cpu"), torch.tensor(_SECOND, device="cpu")
_SHORT = 64  # times as many keys as blocks of each
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
    # Only multiplication needs words without their upper half, so that is cleared once a round.
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
    turned = len(shape) == 2 and _SHORT * shape[1] <= shape[0]  # longer loops over keys than over their blocks
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
    """Return `folded` of few keys by Python's own integers, which for them take a fifth of what arrays do."""
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
