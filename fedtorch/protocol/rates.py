"""Limit how often somebody may do something: token buckets, of each address and of all together, in bounded memory.

>>> bucket = Bucket(Rate(2, per_second=0.5))
>>> [bucket.take(1, now=seconds) for seconds in (0.0, 0.0, 0.0, 2.0)]
[0.0, 0.0, 2.0, 0.0]
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote

_MOST = 4096  # addresses that are remembered


class Rate(NamedTuple):
    """So many at once, and so many a second after that."""

    burst: float
    per_second: float


class Bucket:
    """Keep count of a rate, full at first.

    Args:
        rate: of it.

    Attributes:
        level: how many are left, at the time `at`.
        at: seconds by any clock; one that goes back gives nothing.
    """

    def __init__(self, rate: Rate) -> None:
        self.rate, self.level, self.at = rate, rate.burst, 0.0

    def take(self, count: float, now: float) -> float:
        """Take so many and return 0; or take none, and return the seconds after which there are so many."""
        self.fill(now)
        if count > self.level:
            return (count - self.level) / self.rate.per_second
        self.level -= count
        return 0.0

    def fill(self, now: float) -> None:
        """Give what the time since the last call is worth."""
        gained = max(now - self.at, 0.0) * self.rate.per_second
        self.level, self.at = min(self.level + gained, self.rate.burst), now


class Gate:
    """Attempts from addresses, of which some are refused.

    What one address has too much is not counted among all, so that it does not shut out the others. The addresses that
    came last are remembered; whoever is forgotten begins anew, within the rate of all.

    Args:
        each: the rate of one address; of IPv6 the first 64 bits, which are one customer's.
        all: of all together.
        clock: seconds.
    """

    def __init__(self, each: Rate, all: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._each, self._all, self._clock = each, Bucket(all), clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._lock = threading.Lock()

    def enter(self, peer: str) -> None:
        """Count an attempt.

        Args:
            peer: address and port, as gRPC writes it.

        Raises:
            ConnectionRefusedError: there have been too many; says when to try again.
        """
        address = address_of(peer)
        with self._lock:
            now, bucket = self._clock(), self._buckets.pop(address, None) or Bucket(self._each)
            self._buckets[address] = bucket
            while len(self._buckets) > _MOST:
                self._buckets.popitem(last=False)
            wait = bucket.take(1, now) or self._all.take(1, now)
        if wait:
            raise ConnectionRefusedError(f"Expected fewer attempts to connect; try again in {max(wait, 0.1):.1f} s")


def address_of(peer: str) -> str:
    """Return the address of what gRPC calls a peer, without its port; of IPv6 its network of 64 bits."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else rest
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return peer[:200]
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else str(address)
