"""Clients to leave out after disputes about shares: liars, and at most one honest client for each liar.

In a dispute one client says that it cannot open the shares that another has sent. One of the two lies, and nobody else
can tell which. An honest client is in at most as many disputes as it has corrupt neighbours, so a client in more
disputes certainly lies. From each remaining dispute, one after the other, both are left out: together with every honest
client goes a corrupt one that has not been left out before.

>>> settled({(1, 2)}, colluding=1)  # one of them lies
(set(), {1, 2})
>>> settled({(1, 2), (1, 3), (4, 1)}, colluding=1)  # client 1 has three disputes, and at most one corrupt neighbour
({1}, {1})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def settled(disputes: Iterable[tuple[int, int]], colluding: int) -> tuple[set[int], set[int]]:
    """Return (certain liars, all clients to leave out) from disputes between pairs of clients.

    Args:
        disputes: the pairs, in either order.
        colluding: most corrupt neighbours of a client; at least one is assumed possible.
    """
    pairs = sorted({(min(pair), max(pair)) for pair in disputes})
    counts = Counter(client for pair in pairs for client in pair)
    liars = {client for client, count in counts.items() if count > max(colluding, 1)}
    out = set(liars)
    for pair in pairs:
        if out.isdisjoint(pair):
            out.update(pair)
    return liars, out
