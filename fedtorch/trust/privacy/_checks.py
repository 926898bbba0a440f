"""Settings that are refused, in the same words everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedtorch.federation.algorithm import Algorithm
from fedtorch.trust.privacy.clipping import AdaptiveClip, Clip


def check_no_averaged_buffers(algorithm: Algorithm) -> None:
    """Raise ValueError where clients send values of buffers, which a bound on changes of parameters would cut."""
    start = algorithm.start if isinstance(algorithm.start, dict) else {}
    averaged = (
        [] if algorithm.module is None else [name for name, _ in algorithm.module.named_buffers() if name in start]
    )
    if averaged:
        raise ValueError(
            f"Expected no averaged buffers under a bound on what clients send, but got {averaged[0]!r}, whose values "
            "a bound on changes would cut; use buffers='local', or GroupNorm instead of BatchNorm"
        )


def check_noise(noise: float) -> None:
    """Raise ValueError unless noise is positive and finite."""
    if not 0 < noise < math.inf:
        raise ValueError(f"Expected positive finite noise, in units of the sensitivity, but got {noise}")


def check_delta(delta: float) -> None:
    """Raise ValueError unless δ is between 0 and 1."""
    if not 0 < delta < 1:
        raise ValueError(f"Expected delta above 0 and below 1, but got {delta}")


def check_rounds(rounds: int) -> None:
    """Raise ValueError unless there is at least one round."""
    if not (isinstance(rounds, int) and rounds >= 1):
        raise ValueError(f"Expected a whole number of rounds of at least 1, but got {rounds}")


def check_rate(sampling_rate: float) -> None:
    """Raise ValueError unless a sampling rate is above 0 and at most 1."""
    if not 0 < sampling_rate <= 1:
        raise ValueError(f"Expected a rate above 0 and at most 1, but got {sampling_rate}")


def check_clip(clip: Clip) -> None:
    """Raise ValueError unless bounds are positive and finite, and an adaptive one's settings in range."""
    if isinstance(clip, AdaptiveClip):
        if not (0 < clip.quantile < 1 and 0 < clip.share < 1 and 0 < clip.lr < math.inf):
            raise ValueError(f"Expected quantile and share between 0 and 1 and a positive lr, but got {clip}")
        bounds = [clip.start]
    else:
        bounds = list(clip.values()) if isinstance(clip, Mapping) else [clip]
    if not bounds or not all(0 < bound < math.inf for bound in bounds):
        raise ValueError(f"Expected a positive finite clip, but got {clip}")
