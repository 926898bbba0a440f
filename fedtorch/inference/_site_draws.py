"""Draws of the coefficients of all sites together, each of one draw of what they share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedtorch import random
from fedtorch.federation.algorithms import ep
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.algorithms.ep.estimates import spread_nodes
from fedtorch.federation.runs.run import Run
from fedtorch.inference._rows import Source, by_client, source
from fedtorch.inference._sites import drawn_coefficients, rows_at_hand
from fedtorch.models.gaussian import Moments
from fedtorch.models.hierarchical.families import Family

_SEED = 0


class SiteDraws(NamedTuple):
    """Hold draws, in the units of the rows."""

    theta: Tensor  # (K, S, d)
    family: Family | None
    phi: Tensor | None = None  # (S, p) of what is shared, of a run of `ft.ep`


def site_draws(
    run: Run, draws: int, given: Corrected | None = None, tolerance: float = 0.01, *, even: bool = False
) -> SiteDraws:
    """Return draws of the coefficients of a run's sites.

    Args:
        run: of `ft.ep` with a hierarchical model of known family, or of `ft.gibbs` with a sampler that recorded sites.
        draws: at least so many; of a sampler at most.
        given, tolerance: as of `ranef`.
        even: whether what is shared is spread evenly over q(φ), for means; it is drawn otherwise.
    """
    if run.algorithm.settings.get("algorithm") == "gibbs":
        total, _ = drawn_coefficients(run)
        every = max(1, -(-total.shape[0] * total.shape[1] // draws))
        theta = total[:, ::every].flatten(0, 1).transpose(0, 1)
        return SiteDraws(theta, run.algorithm.settings["local"].family)
    data, drawn = rows_at_hand(run), source(run, draws, given, tolerance, _SEED)
    if even and given is None:
        q = ep.posterior(run, tolerance=torch.inf)
        nodes, _ = spread_nodes(Moments(q.mean, q.covariance_matrix), draws)
        drawn = Source(drawn.model, drawn.family, nodes, random.key(_SEED))
    theta = by_client(run, [data], [drawn], lambda every: every[0].theta)
    return SiteDraws(theta, drawn.family, drawn.phi)
