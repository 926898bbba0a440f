"""The fixed-point grids on which masked sums are exact: a number is one word of ℤ/2⁶⁴, or five with carries.

`encode` refuses numbers beyond the bound. If others can see a refusal, it discloses something about the number. So
`total` accepts numbers of any size: words are integers modulo the ring's size, and the total is correct if it lies
within the ring, even if summands do not. The reader of the sum checks this by `within`.

>>> import torch
>>> from fedtorch.sites.secure.grid import Grid
>>> grid = Grid(bits=8)
>>> grid.decode(grid.encode(torch.tensor([0.5])) + grid.encode(torch.tensor([-0.25])))
tensor([0.2500], dtype=torch.float64)
"""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.exact import LIMBS
from fedtorch.sites.secure import ring
from fedtorch.tree import Tree

_HALF, _MASK = 32, 2**32 - 1
_PLACES = 160  # fractional bits in the limbs of `fedtorch.exact`
_ROOM = 20  # bits of a 320-bit number that are reserved for sums
_WORD, _DOUBLE = 64, 53  # bits of a word, and of a float64 without its exponent
_SIGNIFICANT = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.complex64: 24}  # bits; others have 53
_DEPTH = 33  # noise covers bits below 2⁻³³ of the largest number sent, which float64 sums of 2²⁰ times that lack


class Grid(NamedTuple):
    """Multiples of 2^−bits with a magnitude of at most `bound`.

    Sums of words are exact modulo 2⁶⁴, so the sum of a cohort is that of its numbers on the grid, in any order, if
    clients · bound · 2^bits is below 2⁶³.
    """

    bits: int = 24
    bound: float = 2.0**20

    @property
    def width(self) -> int:
        """Return words of a number in the ring."""
        return 1

    def check(self, clients: int) -> None:
        """Raise ValueError unless sums of `clients` clients fit a word."""
        if not (0 <= self.bits <= 52 and self.bound > 0):
            raise ValueError(f"Expected bits from 0 to 52 and a positive bound, but got {self}")
        if clients * (self.bound * 2.0**self.bits + 1) >= 2.0**63:
            raise ValueError(
                f"Expected sums of {clients} clients below 2⁶³, but numbers up to {self.bound} in steps of "
                f"2^−{self.bits} may have larger ones; take fewer bits or a smaller bound"
            )

    def encode(self, values: Tensor) -> Tensor:
        """Return words of numbers, int64.

        Raises:
            ValueError: a number is not finite, or is beyond the bound and would wrap around in a sum.
        """
        values = values.to(torch.float64)
        if not bool((values.abs() <= self.bound).all()):
            worst = float(values.abs().max()) if bool(values.isfinite().all()) else float("nan")
            raise ValueError(
                f"Expected numbers of at most {self.bound} in size for the grid, but got {worst}; clip them, or "
                "declare a larger bound"
            )
        return (values * 2.0**self.bits).round().to(torch.int64)

    def has(self, values: Tensor) -> bool:
        """Return whether all numbers are finite, so that `total` accepts them."""
        return bool(values.isfinite().all())

    def total(self, values: Tensor, draws: Tensor, largest: float, digits: Tensor | int = _DOUBLE) -> Tensor:
        """Return words of the sum of finite numbers of any size `(K, D)`, modulo 2⁶⁴, `(D,)` int64.

        A float64 beyond 2^(53 − bits), or a float32 beyond 2^(24 − bits), lacks the last digits of its word. The number
        of missing digits would disclose its size. So they are replaced by random digits, and so are at least all digits
        below 2⁻³³ of the largest number that was sent: none up to 2⁸ with 24 bits.

        Args:
            values: numbers of K clients.
            draws: `(D,)` int64, all 64 bits random.
            largest: largest magnitude of the numbers that the reader of the sum has sent for this computation.
            digits: significant binary digits of the numbers, see `digits_of`, `(D,)`.
        """
        fraction, exponent = torch.frexp(values.to(torch.float64))
        places = exponent.to(torch.int64) + (self.bits - _DOUBLE)  # place of the last digit; it is rounded away below 0
        whole = (fraction * 2.0**_DOUBLE).to(torch.int64) << places.clamp(0, _WORD - 1)
        near = (torch.where(places < 0, values, 0.0) * 2.0**self.bits).round().to(torch.int64)
        words = torch.where(places >= _WORD, 0, torch.where(places < 0, near, whole)).sum(0)
        sent = math.frexp(largest)[1] + self.bits - _DEPTH if largest else 0
        ends = torch.where(fraction == 0, 0, places + (_DOUBLE - digits))  # place after the last significant digit
        chance = torch.cat([ends, torch.full_like(draws[None], sent)]).amax(0).clamp(0, _WORD)
        return words + torch.where(chance > 0, draws >> (_WORD - chance).clamp_max(_WORD - 1), 0)

    def within(self, sums: Tensor, clients: int) -> bool:
        """Return whether decoded sums of `clients` clients are possible for numbers within the bound."""
        return bool((sums.abs() <= clients * self.bound).all())

    def decode(self, words: Tensor) -> Tensor:
        """Return the numbers of words, float64."""
        return words.to(torch.float64) * 2.0**-self.bits


class ExactSums(NamedTuple):
    """The exact sums of `fedtorch.exact`, as in `ft.gibbs`, with each number in one ring of 320 bits with carries.

    Limbs summed separately would disclose more than the sum, namely how often they carry. Here a number is one integer
    multiple of 2⁻¹⁶⁰, and the result is only the sum's 320 bits.

    *Low bits.* A float64 has 53 significant bits, at any scale. Bits of the sum below the last bit of all but one
    client's numbers are that client's own and can be read off. If the others' numbers are of order one, and its number
    is below 2⁻⁵³ of theirs, this is the whole number. So masks hide which client it was, and that its number was so
    small, no better than the sum does. With fewer `bits` all numbers are first truncated to multiples of 2^−bits, so
    that all have the same last bit; sums are then exact sums of truncated numbers, and differ from the plain ones.

    Example:
        >>> import torch
        >>> from fedtorch import exact
        >>> from fedtorch.sites.secure import ring
        >>> grid, values = ExactSums(), torch.tensor([[1e16], [1.0], [-1e16]], dtype=torch.float64)  # of three clients
        >>> one, two, three = grid.encode(exact.limbs(values).flatten(1))
        >>> total = ring.add(ring.add(one, two, grid.width), three, grid.width)
        >>> exact.value(grid.decode(total))
        tensor(1., dtype=torch.float64)
    """

    bits: int = _PLACES  # fractional bits after truncation

    @property
    def width(self) -> int:
        """Return words of a number in the ring."""
        return LIMBS // 2

    def check(self, clients: int) -> None:
        """Raise ValueError unless sums of `clients` clients fit."""
        if not 0 <= self.bits <= _PLACES:
            raise ValueError(f"Expected bits from 0 to {_PLACES}, but got {self.bits}")
        if clients >= 2 ** (_ROOM - 1):
            raise ValueError(f"Expected fewer than {2 ** (_ROOM - 1)} clients of an exact sum, but got {clients}")

    def encode(self, values: Tensor) -> Tensor:
        """Return words `(..., 5 n)` of n numbers in limbs `(..., 10 n)`, int64.

        Raises:
            ValueError: numbers that are not in limbs, or a number of 2¹⁴⁰ or more.
        """
        if not self.has(values):
            raise ValueError("Expected numbers in the limbs of fedtorch.exact, but got others; use a secure.Grid")
        words, top = self._words(values)
        if not bool((top.abs() < 2 ** (_HALF - _ROOM)).all()):
            raise ValueError("Expected numbers below 2**140 in magnitude for exact sums, but got larger; rescale them")
        return words

    def _words(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return (words modulo 2³²⁰, the highest limbs) of numbers in limbs."""
        limbs = values.to(torch.int64).unflatten(-1, (-1, LIMBS))
        digits, carry = torch.empty_like(limbs), torch.zeros_like(limbs[..., 0])
        for place in range(LIMBS):
            carry = carry + limbs[..., place]
            digits[..., place] = carry & _MASK
            cut = (_PLACES - self.bits) - _HALF * place  # bits of this limb that are truncated
            if cut > 0:
                digits[..., place] &= ~((1 << min(cut, _HALF)) - 1)
            top, carry = carry, carry >> _HALF
        return (digits[..., ::2] | (digits[..., 1::2] << _HALF)).flatten(-2), top

    def has(self, values: Tensor) -> bool:
        """Return whether numbers are in limbs, and so finite."""
        return values.shape[-1] % LIMBS == 0 and bool(((values.round() == values) & (values.abs() <= 2.0**53)).all())

    def total(self, values: Tensor, draws: Tensor, largest: float, digits: Tensor | int = _DOUBLE) -> Tensor:
        """Return words of the exact sum of numbers in limbs `(K, 10 n)`, modulo 2³²⁰, `(5 n,)`."""
        words, _ = self._words(values)
        return reduce(lambda one, other: ring.add(one, other, self.width), words, torch.zeros_like(draws))

    def within(self, sums: Tensor, clients: int) -> bool:
        """Return whether decoded sums of `clients` clients are possible for numbers below 2¹⁴⁰."""
        return bool((sums.unflatten(0, (-1, LIMBS))[:, -1].abs() <= clients * 2 ** (_HALF - _ROOM)).all())

    def decode(self, words: Tensor) -> Tensor:
        """Return limbs `(10 n,)` of words `(5 n,)`, float64; only the last limb of a number may be negative."""
        limbs = torch.stack([words & _MASK, (words >> _HALF) & _MASK], -1).flatten().unflatten(0, (-1, LIMBS))
        top = limbs[:, -1]
        limbs[:, -1] = torch.where(top >= 2 ** (_HALF - 1), top - 2**_HALF, top)
        return limbs.flatten().to(torch.float64)


def digits_of(messages: Tree) -> Tensor:
    """Return the significant binary digits of numbers `(D,)`, by the dtypes of their leaves `(K, ...)`.

    >>> digits_of({"bias": torch.zeros(4, 1), "weight": torch.zeros(4, 2, dtype=torch.float64)})
    tensor([24, 53, 53])
    """
    sizes = [(leaf.shape[1:].numel() * (1 + leaf.is_complex()), leaf.dtype) for leaf in tree.leaves(messages)]
    return torch.cat([torch.full((size,), _SIGNIFICANT.get(dtype, _DOUBLE)) for size, dtype in sizes])


def largest_of(sent: Tree) -> float:
    """Return the largest magnitude of the server's numbers, ignoring NaN."""
    leaves = [leaf for leaf in tree.leaves(tree.as_real(sent)) if leaf.is_floating_point() and leaf.numel()]
    return max((float(leaf.nan_to_num(0.0).abs().max()) for leaf in leaves), default=0.0)
