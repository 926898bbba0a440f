"""Settle who is left out where clients dispute shares: the liar, and at most one honest client for each.

Of two in a dispute, one who says that it cannot open the other's shares and the other who has sent them, one lies, and
nobody else can tell which. An honest client is in no more disputes than it has corrupt neighbours, so whoever is in
more lies for sure. Of each dispute that then is left both are out, one dispute after the other: with every honest
client goes a corrupt one that has not gone before.

>>> settled({(1, 2)}, colluding=1)  # one of them
(set(), {1, 2})
>>> settled({(1, 2), (1, 3), (4, 1)}, colluding=1)  # who is at odds with three, where at most one lies
({1}, {1})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def settled(disputes: Iterable[tuple[int, int]], colluding: int) -> tuple[set[int], set[int]]:
    """Return (who lies for sure, all that are left out) of disputes between pairs of clients.

    Args:
        disputes: the pairs, in either order.
        colluding: corrupt neighbours of a client, at most; one is taken to be possible anyway.
    """
    pairs = sorted({(min(pair), max(pair)) for pair in disputes})
    counts = Counter(client for pair in pairs for client in pair)
    liars = {client for client, count in counts.items() if count > max(colluding, 1)}
    out = set(liars)
    for pair in pairs:
        if out.isdisjoint(pair):
            out.update(pair)
    return liars, out
