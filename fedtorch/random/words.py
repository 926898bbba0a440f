"""The counter-based generator Philox-4x32-10 in integer tensor operations: the same bits on any device.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. `fedtorch.random` makes numbers of the
words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy
import torch
from torch import Tensor

_ROUNDS = 10
_WEYL = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
BLOCK = 2**17  # words drawn at a time, which bounds the memory of the temporaries
_DRAW = 0  # the last counter word, which keeps draws apart from new keys and proposals

# Small draws cost what calling torch costs, and scalar tensors spare it the wrapping of numbers.
_CLEAR = torch.tensor(WORD, device="cpu")
_HALF = torch.tensor(32, device="cpu")
_MULTIPLIERS = torch.tensor(0xD2511F53, device="cpu"), torch.tensor(0xCD9E8D57, device="cpu")


def philox(key: Tensor, counter: Sequence[Tensor | int]) -> tuple[Tensor, Tensor]:
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


def block_words(key: Tensor, block: Tensor, attempt: int, purpose: int) -> Tensor:
    """The four words of the counter (block, attempt, purpose) of each key, `(..., 4)`."""
    even, odd = philox(key, (block & _CLEAR, block >> _HALF, attempt, purpose))
    return torch.stack((even[0], odd[0], even[1], odd[1]), -1).bitwise_and_(_CLEAR)


def _words(key: Tensor, start: int, count: int) -> Tensor:
    """Words `start` to `start + count` of each key, `(*key.shape, count)`; `start` is a multiple of four."""
    blocks = torch.arange(start // 4, start // 4 + -(-count // 4), device=key.device, dtype=torch.int64)
    return block_words(key.unsqueeze(-1), blocks, 0, _DRAW).flatten(-2)[..., :count]


def fill(
    key: Tensor, shape: Sequence[int], dtype: torch.dtype, words: int, convert: Callable[[Tensor], Tensor]
) -> Tensor:
    """Draws `(*key.shape, *shape)` in blocks; `convert` turns `words` words an element into elements."""
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
    """Raises a TypeError unless `key` is an int64 tensor."""
    if not isinstance(key, Tensor) or key.dtype != torch.int64:
        got = key.dtype if isinstance(key, Tensor) else type(key).__name__
        raise TypeError(f"Expected a key, an int64 tensor made by random.key and fold_in, but got {got}")


def integers(words: Tensor) -> Tensor:
    """63 bits of each pair of words, `(..., 2n)` -> `(..., n)`."""
    return words[..., ::2].bitwise_left_shift(31).bitwise_or_(words[..., 1::2] >> 1)


def between(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform float64 strictly between 0 and 1: of 52 bits of two words for float64, else of one word."""
    if dtype == torch.float64:
        return (integers(words) >> 11).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


def words_per(dtype: torch.dtype) -> int:
    """How many words a number of this dtype takes."""
    return 2 if dtype == torch.float64 else 1
