"""Numbers of clients' names, from which random draws derive, independent of the other clients and their order.

A name that is a whole number below 2⁶³, written without leading zeros, is its own number, so clients without names,
whose names are `"0"`, `"1"`, …, have their positions as numbers. Any other name has the upper 63 of the 64 bits of the
BLAKE2b digest of its UTF-8 text. The numbers are folded into a round's key, one for each client.

>>> numbers(("0", "1", "2")), numbers(("7", "3"))
(tensor([0, 1, 2]), tensor([7, 3]))
>>> numbers(("Turku", "007")).tolist()
[1316233579901560164, 2636083598628110558]
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

_DIGITS = 19  # of the largest number below 2**63


@functools.lru_cache(maxsize=8)
def numbers(names: tuple[str, ...]) -> Tensor:
    """Return the number of each name, `(K,)` int64 of at least zero; cached, so do not write to it.

    Raises:
        ValueError: two names have the same number; the message names both.
    """
    if names[-1:] == (str(len(names) - 1),) and all(map(str.__eq__, names, map(str, range(len(names))))):
        return torch.arange(len(names))
    numbers = [_number(name) for name in names]
    if len(set(numbers)) < len(numbers):
        first, second = _alike(names, numbers)
        raise ValueError(
            f"Expected clients whose draws differ, but {first!r} and {second!r} have the same number, "
            f"{_number(first)}; rename one of them"
        )
    return torch.tensor(numbers, dtype=torch.int64)


def _number(name: str) -> int:
    whole = name.isascii() and name.isdigit() and len(name) <= _DIGITS and str(int(name)) == name
    if whole and int(name) < 2**63:
        return int(name)
    text = name.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _alike(names: tuple[str, ...], numbers: list[int]) -> tuple[str, str]:
    """Return the first two names that have the same number."""
    known: dict[int, str] = {}
    for name, number in zip(names, numbers):
        if number in known:
            return known[number], name
        known[number] = name
    raise AssertionError("all differ")
