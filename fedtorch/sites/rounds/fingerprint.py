"""What a server and its sites compare, before they run the same algorithm."""

from __future__ import annotations

from fedtorch import checkpoint
from fedtorch.federation.algorithm import Algorithm

MESSAGES = "messages"  # in a fingerprint, how the server is kept from reading them


def fingerprint(algorithm: Algorithm) -> dict[str, str]:
    """What a server and its sites compare of an algorithm."""
    hidden = algorithm.exchange.hidden
    about = {**algorithm.settings, **({MESSAGES: hidden} if hidden else {})}
    return {name: checkpoint.describe(value) for name, value in about.items()}
