"""Rate limits: token buckets for each address and for all addresses together, in bounded memory.

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

_MOST = 4096  # most addresses with a bucket of their own


class Rate(NamedTuple):
    """A rate limit: burst size, and tokens a second."""

    burst: float
    per_second: float


class Bucket:
    """A token bucket, full at first.

    Args:
        rate: its rate limit.

    Attributes:
        level: tokens left at time `at`.
        at: seconds of any clock; a clock that goes back adds no tokens.
    """

    def __init__(self, rate: Rate) -> None:
        self.rate, self.level, self.at = rate, rate.burst, 0.0

    def take(self, count: float, now: float) -> float:
        """Take `count` tokens and return 0; or take none and return the seconds until there are enough."""
        self.fill(now)
        if count > self.level:
            return (count - self.level) / self.rate.per_second
        self.level -= count
        return 0.0

    def fill(self, now: float) -> None:
        """Add the tokens of the time since the last call."""
        gained = max(now - self.at, 0.0) * self.rate.per_second
        self.level, self.at = min(self.level + gained, self.rate.burst), now


class Gate:
    """A gate that admits or refuses attempts by their address.

    Refused attempts of one address do not count against the total, so that it does not shut out others. Only the most
    recent addresses have a bucket; a forgotten address starts anew, within the total rate.

    Args:
        each: rate limit of one address; IPv6 counts by networks of 64 bits, one customer each.
        all: rate limit of all addresses together.
        clock: returns seconds.
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
            ConnectionRefusedError: too many attempts; the message gives the time to wait.
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
    """Return the address of a gRPC peer without its port; for IPv6 its network of 64 bits."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else rest
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return peer[:200]
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else str(address)
