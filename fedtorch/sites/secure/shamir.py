"""Shamir's secret sharing of 32 bytes in the field of 2⁵²¹ − 1 elements.

Source: Shamir (1979), "How to share a secret".

>>> import secrets
>>> from fedtorch.sites.secure import shamir
>>> secret = secrets.token_bytes(32)
>>> shares = shamir.split(secret, threshold=2, holders=[1, 2, 3], random=secrets.token_bytes(72))
>>> shamir.combine({holder: shares[holder] for holder in (1, 3)}) == secret
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PRIME = 2**521 - 1
WIDTH = 66  # bytes of a share
SECRET = 32  # bytes of a secret


def split(secret: bytes, threshold: int, holders: Sequence[int], random: bytes) -> dict[int, int]:
    """Return shares by holder: any `threshold` of them give the secret, and fewer disclose nothing.

    Args:
        secret: 32 bytes.
        threshold: from 1 to the number of holders.
        holders: distinct positive numbers.
        random: `(threshold − 1) · 72` secret random bytes; each coefficient is 576 bits modulo the prime, within 2⁻⁵⁵
            of uniform.
    """
    if len(secret) != SECRET or not 1 <= threshold <= len(holders) or min(holders) < 1:
        raise ValueError(f"Expected 32 bytes and a threshold from 1 to {len(holders)} positive holders")
    parts = [random[72 * i : 72 * (i + 1)] for i in range(threshold - 1)]
    coefficients = [int.from_bytes(part, "big") % PRIME for part in parts] + [int.from_bytes(secret, "big")]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in coefficients:
            value = (value * holder + coefficient) % PRIME
        shares[holder] = value
    return shares


def combine(shares: Mapping[int, int]) -> bytes:
    """Return the secret from shares by holder, at least as many as the threshold.

    Raises:
        ValueError: the result is not a secret, so that some shares are wrong or belong to different secrets.
    """
    total = 0
    for one, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != one:
                above, below = above * other % PRIME, below * (other - one) % PRIME
        total = (total + share * above * pow(below, -1, PRIME)) % PRIME
    if total >= 2 ** (8 * SECRET):
        raise ValueError("Expected shares of one secret, but they give none")
    return total.to_bytes(SECRET, "big")
