r"""Small sets of parties whose values a combination of several sums discloses.

A sum over a set of parties is a row of zeros and ones, and the results that can be computed from several sums are the
combinations of their rows. Let the rows of H span the vectors that are orthogonal to all sums. Some combination has all
its support in T if and only if the columns of H in T are linearly dependent. Parties that are in the same sums have the
same column, and are in such a support together or not at all. So this module enumerates unions T of few parties, and
reduces columns modulo the prime 2⁵²¹ − 1. No minor of a matrix of zeros and ones with at most 128 rows is as large
(Hadamard: (k + 1)^{(k+1)/2} / 2^k), so that ranks equal those over the rational numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from fedtorch.sites.secure.shamir import PRIME

Party = TypeVar("Party", bound=Hashable)
MOST = 20_000  # most unions of parties to enumerate
_ROWS = 128


class TooMany(ValueError):
    """Raised if there are too many unions of parties to enumerate."""


def refusal(earlier: Iterable[frozenset[Party]], sites: frozenset[Party], minimum: int) -> str | None:
    """Return why a sum over some parties would disclose too much together with earlier sums; None if it does not."""
    known = list(dict.fromkeys(earlier))
    if sites in known:
        return None
    try:
        few = revealed([*known, sites], minimum)
    except TooMany:
        return "There are too many combinations with earlier sums to check; only an earlier sum can be added up again"
    if few is None:
        return None
    return (
        f"A combination with earlier sums is of {len(few)} clients, fewer than {minimum}, {sorted(few, key=str)}: it "
        "would disclose too much of each"
    )


def revealed(sets: Sequence[frozenset[Party]], minimum: int, most: int = MOST) -> frozenset[Party] | None:
    """Return fewer than `minimum` parties on which alone some combination of the sums over `sets` depends, or None.

    Raises:
        TooMany: more than `most` unions of parties would have to be checked.
    """
    groups: dict[tuple[bool, ...], list[Party]] = {}
    for party in dict.fromkeys(party for each in sets for party in each):
        groups.setdefault(tuple(party in each for each in sets), []).append(party)
    if len(sets) > _ROWS:
        raise TooMany(f"Expected at most {_ROWS} sets, but got {len(sets)}")
    columns = _orthogonal(list(zip(*groups)))
    few = [(members, column) for members, column in zip(groups.values(), columns) if len(members) < minimum]
    looked = 0
    waiting: list[tuple[int, list[Party], dict[int, list[int]], int]] = [(0, [], {}, minimum)]
    while waiting:
        start, members, basis, room = (
            waiting.pop()
        )  # next group, parties, their independent columns, bound on further parties
        for place in range(start, len(few)):
            more, column = few[place]
            if len(more) >= room:
                continue
            looked += 1
            if looked > most:
                raise TooMany(f"Expected at most {most} unions of parties, but there are more")
            rest = _reduced(column, basis)
            pivot = next((i for i, value in enumerate(rest) if value), None)
            if pivot is None:
                return frozenset([*members, *more])
            scale = pow(rest[pivot], -1, PRIME)
            one = [value * scale % PRIME for value in rest]
            waiting.append((place + 1, [*members, *more], {**basis, pivot: one}, room - len(more)))
    return None


def _orthogonal(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the columns of a matrix whose rows span the orthogonal complement of `rows`."""
    left, pivots = [[int(value) for value in row] for row in rows], dict[int, list[int]]()
    width = len(left[0]) if left else 0
    for place in range(width):
        row = next((row for row in left if row[place]), None)
        if row is None:
            continue
        left = [other for other in left if other is not row]
        scale = pow(row[place], -1, PRIME)
        row = [value * scale % PRIME for value in row]
        left = [_less(other, row, place) for other in left]
        pivots = {other: _less(known, row, place) for other, known in pivots.items()} | {place: row}
    free = [place for place in range(width) if place not in pivots]
    return [
        [-pivots[place][j] % PRIME for j in free] if place in pivots else [int(j == place) for j in free]
        for place in range(width)
    ]


def _reduced(column: list[int], basis: dict[int, list[int]]) -> list[int]:
    """Return a column reduced by a basis, in order; each basis column is one at its own place."""
    for place, other in basis.items():
        column = _less(column, other, place)
    return column


def _less(row: list[int], other: list[int], place: int) -> list[int]:
    """Return a row minus a multiple of another that is one at a place, so that the row is zero there."""
    factor = row[place]
    return [(value - factor * more) % PRIME for value, more in zip(row, other)] if factor else row
