"""What intervals of expectation propagation cover where events are rare, of shared parameters and of sites.

Twelve sites of 25 rows, yes or no, one covariate and an intercept that differs between sites. Parameters are drawn anew
for each data set from the prior that the fit has: log-odds N(log-odds of the rate, 0.7²), slope N(0, 0.7²), logarithm
of the variance over sites N(−1, 0.8²). So intervals of 90 % of the posterior itself cover 90 %, whatever the rate: what
differs from it by more than the noise of so many data sets is the approximation's. At 1 % three fifths of the
sites have no event.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import fedtorch as ft
from experiments import common
from fedtorch.federation.algorithms.ep import corrected, devices, posterior, settled
from fedtorch.models import hierarchical
from fedtorch.models.device_posterior import interval
from fedtorch.models.hierarchical.generalised import logistic
from fedtorch.models.hierarchical.hyperpriors import log_normal

LEVEL, SITES, ROWS, SD, LOG_VARIANCE = 0.9, 12, 25, 0.7, (-1.0, 0.8)
RATES, POINTS, ROUNDS = (0.01, 0.05, 0.3), 512, 40
NAMES = ("intercept", "slope", "log variance")


def simulate(rate: float, seed: int) -> tuple[ft.data.FederatedData, Tensor, Tensor]:
    """Draw a data set, what is shared `(3,)`, and sites' intercepts `(K,)`."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    centre = torch.tensor([math.log(rate / (1 - rate)), 0.0, LOG_VARIANCE[0]]).double()
    shared = centre + torch.tensor([SD, SD, LOG_VARIANCE[1]]) * draw(3)
    sites = shared[0] + (shared[2] / 2).exp() * draw(SITES)
    x = draw(SITES, ROWS)
    chance = (sites[:, None] + shared[1] * x).sigmoid()
    y = (torch.rand(SITES, ROWS, generator=generator, dtype=torch.float64) < chance).double()
    return ft.data.from_tensors(list(zip(torch.stack([torch.ones_like(x), x], -1), y))), shared, sites


def coverage(rate: float, seed: int) -> dict[str, dict[str, float]]:
    """Whether intervals of a data set cover, by method: of what is shared, and the share of the sites."""
    data, shared, sites = simulate(rate, seed)
    centre = torch.tensor([math.log(rate / (1 - rate)), 0.0]).double()
    model = logistic(hierarchical.normal(2, random=[0], mean=centre, sd=SD, variance=log_normal(*LOG_VARIANCE)))
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=ROUNDS, until=settled(), progress=False)
    q, given, tail = posterior(run), corrected(run, points=POINTS), (1 - LEVEL) / 2
    width = math.sqrt(2) * torch.special.erfinv(torch.tensor(LEVEL)).double() * q.stddev
    of_shared = {
        "EP": (q.mean - width, q.mean + width),
        "corrected": (given.quantile(tail), given.quantile(1 - tail)),
    }
    of_sites = {"EP": devices(run).marginals(), "corrected": devices(run, given=given).marginals()}
    none = torch.tensor([float(data[k][1].sum()) == 0 for k in range(SITES)])
    found = {}
    for method, (low, high) in of_shared.items():
        covers = (low < shared) & (shared < high)
        below, above = (end[:, 0] for end in interval(of_sites[method], LEVEL))
        own = ((below < sites) & (sites < above)).double()
        found[method] = {f"covers {name}": float(each) for name, each in zip(NAMES, covers)}
        found[method] |= {"covers sites": float(own.mean()), "sites without events": float(none.double().mean())}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Coverage over simulated data sets."""
    parser = common.arguments(__doc__)
    parser.add_argument("--sets", type=int, default=100, help="data sets of each rate")
    options = parser.parse_args(argv)
    sets = 3 if options.smoke else options.sets
    rows = []
    for rate in RATES[:1] if options.smoke else RATES:
        runs = [coverage(rate, 1000 * options.seeds + seed) for seed in range(sets)]
        for method in runs[0]:
            rows += common.over_seeds(f"events {rate:.0%}, {method}", [run[method] for run in runs])
    common.show_rows(f"Intervals of {LEVEL:.0%}, {sets} data sets a rate", rows)
    common.finish("mixed_models.rare_events", rows, options)


if __name__ == "__main__":
    main()
