"""Comparison of the server's algorithm with each site's, before a run begins."""

from __future__ import annotations

from typing import Any

from fedtorch import checkpoint
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.exchanges.carry import Carry, agreed, check_need, plain
from fedtorch.sites.rounds.configuration import SiteConfiguration
from fedtorch.sites.rounds.frames import Frame
from fedtorch.sites.rounds.policy import Refusal


def fingerprint(algorithm: Algorithm, carry: Carry = plain()) -> dict[str, str]:  # noqa: B008
    """Return descriptions of an algorithm's settings and transport, by name, which server and sites compare."""
    return {name: checkpoint.describe(value) for name, value in {**algorithm.settings, **agreed(carry)}.items()}


def built(configuration: SiteConfiguration, begin: Frame) -> tuple[Algorithm, Carry]:
    """Return (the requested algorithm, its transport) as the site builds them, if they are the server's.

    Raises:
        Refusal: the site does not offer the algorithm, or would run something else under that name.
        PayloadError: the frame is malformed.
    """
    name, settings = begin.text("algorithm"), begin.names("settings")
    if name not in configuration.algorithms:
        raise Refusal(f"the site offers the algorithms {sorted(configuration.algorithms)}, but not {name!r}")
    try:
        algorithm = configuration.algorithms[name](**_by_design(configuration), **settings)
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(f"the site does not run {name!r} with settings {settings}: {type(error).__name__}") from error
    carry = configuration.policy.carry_of(name)
    mine, theirs = fingerprint(algorithm, carry), begin.names("fingerprint")
    for setting in {**mine, **theirs}:
        if mine.get(setting) != theirs.get(setting):
            raise Refusal(f"under {name!r} the site runs {setting} {mine.get(setting)}, not {theirs.get(setting)}")
    try:
        check_need(algorithm, carry, f"the site's policy with carry={carry!r}")
        carry.carried(algorithm)
    except ValueError as error:
        raise Refusal(str(error)) from None
    return algorithm, carry


def _by_design(configuration: SiteConfiguration) -> dict[str, Any]:
    """Return the arguments of algorithms from a site's frame: the design on which sites have agreed."""
    if configuration.frame is None:
        return {}
    if configuration.data.design is None:
        raise Refusal("the site has a frame, and sites have not agreed on a design yet; begin with sites.agree(...)")
    return {"design": configuration.data.design}
