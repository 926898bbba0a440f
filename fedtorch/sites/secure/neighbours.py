r"""Numbers of neighbours for masks: the fewest that the tails of dropouts and of corrupt clients allow.

Every client shares masks and secrets with k others, on a circle in an order that nobody can choose. Of n clients γn
are corrupt and δn drop out; among k neighbours their numbers are hypergeometric. With the threshold t and at most c
corrupt neighbours of any client,

.. math:: n\, P(\text{corrupt neighbours} > c) \le 2^{-40}, \qquad n\, P(\text{neighbours that stay} < t) \le 2^{-30},

keep every client's secrets secret and every sum recoverable. k, c and t are computed, never assumed. The required t
depends on the server:

- Against an *active* server, which may send each client different messages, t ≥ ⌊(k + c)/2⌋ + 1. An honest neighbour
  reveals a share of only one of a client's two secrets, so recovering both would take 2 (t − c) ≤ k − c of them.
- Against a *curious* one, which follows the protocol, t ≥ c + 1.

*Keys chosen last.* The order is derived from the adverts, so that nobody knows it before. But a corrupt client can
choose its advert last, and by trying 2^g keys raises its chance 2^g times: from 2⁻⁴⁰ to 2^(g − 40). `secrecy=80` is
safe in this case, too, and needs few more neighbours (498 in place of 464 for 1000 clients); with `everybody=True`
nothing is drawn.

Sources: Bell, Bonawitz, Gascón, Lepoint and Raykova (2020), "Secure single-server aggregation with (poly)logarithmic
overhead", sections 3 and 4; Bonawitz et al. (2017), "Practical secure aggregation for privacy-preserving machine
learning", section 6.2, for the active server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import exp, lgamma
from typing import Literal, NamedTuple

Adversary = Literal["active", "curious"]
ADVERSARIES: tuple[Adversary, ...] = ("curious", "active")


class Neighbourhoods(NamedTuple):
    """Numbers of a client's neighbours; see `neighbourhoods`."""

    neighbours: int
    threshold: int  # neighbours that recover a client's secrets together
    colluding: int = 0  # most neighbours of a client that work with the server

    def least(self, adversary: Adversary) -> int:
        """Return the least threshold that keeps secrets from this kind of server.

        Raises:
            ValueError: there is no such adversary.

        Example:
            >>> Neighbourhoods(neighbours=8, threshold=5, colluding=1).least("active")
            5
        """
        if adversary not in ADVERSARIES:
            raise ValueError(f"Expected adversary='active' or 'curious', but got {adversary!r}")
        return (self.neighbours + self.colluding) // 2 + 1 if adversary == "active" else self.colluding + 1


@lru_cache(maxsize=256)
def neighbourhoods(
    clients: int,
    corrupt: float = 0.1,
    dropouts: float = 0.3,
    secrecy: int = 40,
    failure: int = 30,
    *,
    adversary: Adversary = "active",
    minimum: int = 3,
    everybody: bool = False,
) -> Neighbourhoods:
    """Return the least even number of neighbours, and a threshold, that satisfy both tail bounds, else all others.

    Args:
        clients: n.
        corrupt: γ, fraction of the clients that work with the server; from 1 on, their number.
        dropouts: δ, fraction that drop out; from 1 on, their number.
        secrecy: all clients' secrets are safe except with probability 2^−secrecy.
        failure: the sum is recovered except with probability 2^−failure.
        adversary: kind of server: `"active"`, or `"curious"` if it follows the protocol.
        minimum: least clients of a sum, including corrupt ones; the threshold is at least one less.
        everybody: whether all others are neighbours in any case.

    Raises:
        ValueError: fewer than three clients, arguments out of range, or bounds that fail even with all others as
            neighbours; the message gives possible dropouts and collusion for so many clients.

    Example:
        >>> neighbourhoods(100)
        Neighbourhoods(neighbours=72, threshold=42, colluding=10)
        >>> neighbourhoods(100, adversary="curious")
        Neighbourhoods(neighbours=36, threshold=11, colluding=10)
        >>> neighbourhoods(3, dropouts=0)  # nobody may drop out of a sum of three
        Neighbourhoods(neighbours=2, threshold=2, colluding=0)
        >>> neighbourhoods(6)
        Traceback (most recent call last):
        ...
        ValueError: Expected 6 clients that an active server cannot outwit, with corrupt=0.1 (1 of them) and ...
    """
    numbers = [part if part >= 1 else round(part * clients) for part in (corrupt, dropouts)]
    if clients < 3 or min(corrupt, dropouts) < 0 or any(int(number) != number for number in numbers):
        raise ValueError(
            "Expected at least 3 clients, and corrupt ones and dropouts as parts below 1 or whole numbers, but got "
            f"{clients}, {corrupt} and {dropouts}"
        )
    tails = _Tails(secrecy, failure, adversary, minimum, everybody)
    bad, gone = (min(int(number), clients - 1) for number in numbers)
    near = tails.smallest(clients, bad, gone)
    if near is None:
        raise ValueError(_refusal(tails, clients, (corrupt, bad), (dropouts, gone)))
    return near


class _Tails(NamedTuple):
    """Tail bounds for the numbers of neighbours."""

    secrecy: int
    failure: int
    adversary: Adversary
    minimum: int
    everybody: bool

    def smallest(self, clients: int, bad: int, gone: int) -> Neighbourhoods | None:
        """Return the least number of neighbours that satisfies the bounds; None if none does."""
        colluding = 0
        for neighbours in self._candidates(clients):
            if neighbours == clients - 1:
                colluding = bad
            while _at_least(clients - 1, bad, neighbours, colluding + 1) * clients > 2.0**-self.secrecy:
                colluding += 1
            threshold = max(Neighbourhoods(neighbours, 0, colluding).least(self.adversary), self.minimum - 1, 2)
            few = _at_least(clients - 1, gone, neighbours, neighbours - threshold + 1) if threshold <= neighbours else 1
            if few * clients <= 2.0**-self.failure:
                return Neighbourhoods(neighbours, threshold, colluding)
        return None

    def _candidates(self, clients: int) -> Iterator[int]:
        if not self.everybody:
            yield from range(2, clients - 1, 2)
        yield clients - 1


def _refusal(tails: _Tails, clients: int, corrupt: tuple[float, int], dropouts: tuple[float, int]) -> str:
    """Return the error message if no number satisfies the bounds, with arguments that would."""
    bearable = [number for number in range(dropouts[1]) if tails.smallest(clients, corrupt[1], number)]
    colluding = [number for number in range(corrupt[1]) if tails.smallest(clients, number, dropouts[1])]
    ways = [
        f"{name} of at most {max(some)} (`{name}={_part(max(some), clients):g}`)"
        for name, some in (("dropouts", bearable), ("corrupt", colluding))
        if some
    ]
    return (
        f"Expected {clients} clients that {_A[tails.adversary]} server cannot outwit, with corrupt={corrupt[0]} "
        f"({corrupt[1]} of them) and dropouts={dropouts[0]} ({dropouts[1]} of them), and sums of at least "
        f"{tails.minimum}, but no threshold keeps them; so many bear {' or '.join(ways) or 'neither fewer of the one'}"
        f"{'' if ways else ' nor of the other alone'}; or take more clients"
    )


_A = {"active": "an active", "curious": "a curious"}


def _part(number: int, clients: int) -> float:
    """Return a short decimal fraction of the clients that rounds to this number of them."""
    return next(part for digits in range(16) if round((part := round(number / clients, digits)) * clients) == number)


def circle(clients: list[int], neighbours: int, seed: bytes, of: Iterable[int] | None = None) -> dict[int, list[int]]:
    """Return the neighbours of some clients: the nearest on a circle in an order by the seed, or all others.

    Args:
        clients: all clients.
        neighbours: number of neighbours of each.
        seed: seed of the order.
        of: the clients whose neighbours are returned; default: all.
    """
    of = clients if of is None else of
    if neighbours >= len(clients) - 1:
        return {client: sorted(set(clients) - {client}) for client in of}
    order = sorted(clients, key=lambda client: hashlib.sha256(seed + client.to_bytes(8, "big")).digest())
    place, half, size = {client: i for i, client in enumerate(order)}, neighbours // 2, len(order)
    return {
        client: sorted(order[(place[client] + step) % size] for step in range(-half, half + 1) if step) for client in of
    }


def _at_least(population: int, marked: int, drawn: int, number: int) -> float:
    """Return P(X ≥ number) of a hypergeometric X."""
    start, top = max(number, drawn - (population - marked), 0), min(marked, drawn)
    whole = _log_ways(population, drawn)
    parts = (_log_ways(marked, i) + _log_ways(population - marked, drawn - i) for i in range(start, top + 1))
    return min(1.0, sum(exp(part - whole) for part in parts))


def _log_ways(population: int, drawn: int) -> float:
    return lgamma(population + 1) - lgamma(drawn + 1) - lgamma(population - drawn + 1)
