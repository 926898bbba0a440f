"""Compare the algorithms of a server and its sites, before they run the same."""

from __future__ import annotations

from fedtorch import checkpoint
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import Carry, agreed, plain


def fingerprint(algorithm: Algorithm, carry: Carry = plain()) -> dict[str, str]:  # noqa: B008
    """Return what a server and its sites compare of an algorithm and of how its messages are carried."""
    return {name: checkpoint.describe(value) for name, value in {**algorithm.settings, **agreed(carry)}.items()}
