"""The fixed-point grid on which masked sums are exact: one word of ℤ/2⁶⁴ a number."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """Numbers that are whole multiples of 2^−bits, of at most `bound` in size.

    Sums of words are exact, also on the way around 2⁶⁴, so the sum of a cohort is that of its numbers on the grid, in
    any order, as long as clients · bound · 2^bits is below 2⁶³.
    """

    bits: int = 24
    bound: float = 2.0**20

    def check(self, clients: int) -> None:
        """Raises ValueError unless sums of so many clients fit a word."""
        if not (0 <= self.bits <= 52 and self.bound > 0):
            raise ValueError(f"Expected bits from 0 to 52 and a positive bound, but got {self}")
        if clients * (self.bound * 2.0**self.bits + 1) >= 2.0**63:
            raise ValueError(
                f"Expected sums of {clients} clients below 2⁶³, but up to {self.bound} in steps of 2^−{self.bits} they "
                "may be larger; take fewer bits or a smaller bound"
            )

    def encode(self, values: Tensor) -> Tensor:
        """Words of numbers, int64.

        Raises:
            ValueError: a number that is not finite or beyond the bound, which would wrap around in a sum.
        """
        values = values.to(torch.float64)
        if not bool((values.abs() <= self.bound).all()):
            worst = float(values.abs().max()) if bool(values.isfinite().all()) else float("nan")
            raise ValueError(
                f"Expected numbers of at most {self.bound} in size for the grid, but got {worst}; clip them, or "
                "declare a larger bound"
            )
        return (values * 2.0**self.bits).round().to(torch.int64)

    def decode(self, words: Tensor) -> Tensor:
        """Numbers of words, float64."""
        return words.to(torch.float64) * 2.0**-self.bits
