r"""Who masks with whom: as few neighbours as the tails of dropouts and of corrupt clients allow.

Every client shares masks and secrets with k others, on a circle in an order that nobody could choose. Of n clients γn
are corrupt and δn drop out; among k neighbours their numbers are hypergeometric. With the threshold t,

.. math:: n\, P(\text{corrupt neighbours} \ge t) \le 2^{-40}, \qquad n\, P(\text{neighbours that stay} < t) \le 2^{-30},

keep every client's secrets secret and every sum recoverable. k and t are computed, never assumed.

Source: Bell, Bonawitz, Gascón, Lepoint and Raykova (2020), "Secure single-server aggregation with (poly)logarithmic
overhead", sections 3 and 4.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import comb, log2
from typing import NamedTuple


class Neighbourhoods(NamedTuple):
    """How many neighbours a client has, and how many of them recover its secrets; see `neighbourhoods`."""

    neighbours: int
    threshold: int


@lru_cache(maxsize=256)
def neighbourhoods(
    clients: int, corrupt: float = 0.1, dropouts: float = 0.3, secrecy: int = 40, failure: int = 30
) -> Neighbourhoods:
    """The least even number of neighbours, and a threshold, that keep both tails; all others where none does.

    Args:
        clients: n.
        corrupt: γ, the part of the clients that work with the server.
        dropouts: δ, the part that drop out.
        secrecy: a client's secrets are safe but with probability 2^−secrecy, for all clients together.
        failure: the sum is recovered but with probability 2^−failure.

    Raises:
        ValueError: fewer than three clients, parts out of range, or tails that even all others cannot keep.

    Example:
        >>> neighbourhoods(100)
        Neighbourhoods(neighbours=36, threshold=11)
        >>> neighbourhoods(1000).neighbours
        100
    """
    if clients < 3 or not (0 <= corrupt < 1 and 0 <= dropouts < 1):
        raise ValueError(f"Expected at least 3 clients and parts below 1, but got {clients}, {corrupt} and {dropouts}")
    bad, gone = round(corrupt * clients), round(dropouts * clients)
    for neighbours in [*range(2, clients - 1, 2), clients - 1]:
        for threshold in range(2, neighbours + 1):
            if _at_least(clients - 1, bad, neighbours, threshold) * clients <= 2.0**-secrecy:
                if _at_least(clients - 1, gone, neighbours, neighbours - threshold + 1) * clients <= 2.0**-failure:
                    return Neighbourhoods(neighbours, threshold)
                break
    raise ValueError(
        f"Expected dropouts and corrupt clients that neighbours can outnumber, but {dropouts} and {corrupt} of "
        f"{clients} leave no threshold for 2^−{secrecy} and 2^−{failure}; take more clients"
    )


def around(clients: int) -> Neighbourhoods:
    """`neighbourhoods`; where so few clients cannot bear its dropouts, all others, of whom everybody has to stay.

    >>> around(100) == neighbourhoods(100), around(3) == Neighbourhoods(neighbours=2, threshold=2)
    (True, True)
    """
    try:
        return neighbourhoods(clients)
    except ValueError:
        return neighbourhoods(clients, dropouts=0.0)


def circle(clients: list[int], neighbours: int, seed: bytes) -> dict[int, list[int]]:
    """Every client's neighbours: the nearest on a circle in an order made of the seed, or all others.

    >>> near = circle([1, 2, 3, 4, 5], neighbours=2, seed=b"of all adverts")
    >>> all(client in near[other] for client in near for other in near[client])
    True
    >>> circle([1, 2, 3], neighbours=2, seed=b"")
    {1: [2, 3], 2: [1, 3], 3: [1, 2]}
    """
    order = sorted(clients, key=lambda client: hashlib.sha256(seed + client.to_bytes(8, "big")).digest())
    if neighbours >= len(clients) - 1:
        return {client: sorted(set(clients) - {client}) for client in clients}
    half, size = neighbours // 2, len(order)
    return {
        client: sorted(order[(place + step) % size] for step in range(-half, half + 1) if step)
        for place, client in enumerate(order)
    }


def _at_least(population: int, marked: int, drawn: int, number: int) -> float:
    """P(X ≥ number) of a hypergeometric X."""
    top = min(marked, drawn)
    ways = sum(comb(marked, i) * comb(population - marked, drawn - i) for i in range(number, top + 1))
    return 2.0 ** (log2(ways) - log2(comb(population, drawn))) if ways else 0.0
