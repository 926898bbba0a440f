"""lme4's examples with `cbpp`: new infections in 15 herds over four periods, by maximum marginal likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

import fedtorch as ft
from experiments import common
from experiments.mixed_models.common import frame, information, maximum, model_of, printed
from experiments.mixed_models.oracles import nested
from fedtorch.models.hierarchical import generalised


def fitted(points: int | None, observations: bool = False) -> dict[str, float]:
    """Herds' incidence: fixed effects, sd over herds and likelihood."""
    table = frame("lme4", "cbpp").assign(period=lambda each: each.period.astype(str))
    formula = "incidence | trials(size) ~ period + (1 | herd)"
    data = ft.data.from_frame(table, client="herd", formula=formula, standardise=False)
    if observations:
        data = data.map(lambda each: (torch.cat([each[0], _indicators(each[0])], 1), *each[1:]))
        model = generalised.logistic(nested(4, 4), inner=None)
    else:
        model = model_of(data, "binomial", points)
    fit = maximum(model, data)
    parts = zip(torch.tensor(table.incidence.to_numpy()).double(), torch.tensor(table["size"].to_numpy()).double())
    saturated = sum(_binomial(y, n) for y, n in parts)
    names = ("Intercept", "period2", "period3", "period4")
    values = {name: float(value) for name, value in zip(names, fit.fixed)}
    values |= {f"{name}, error": float(value) for name, value in zip(names, fit.errors)}
    values |= {"sd of herd": float(fit.sds[0]), "log likelihood": fit.log_likelihood}
    values |= {"-2 log L": -2 * fit.log_likelihood} | information(fit, 6 if observations else 5, len(table))
    if observations:
        values["sd of observation"] = float(fit.sds[-1])
    return values | {"-2 log L, above the saturated": 2 * (float(saturated) - fit.log_likelihood)}


def _binomial(y: Tensor, n: Tensor) -> Tensor:
    """The log likelihood of y of n at the share y / n."""
    return torch.distributions.Binomial(n, y / n, validate_args=False).log_prob(y)


def _indicators(x: Tensor) -> Tensor:
    """Columns that are 1 in a row's period, of which a herd has one row each."""
    return torch.cat([1 - x[:, 1:].sum(1, keepdim=True), x[:, 1:]], 1)


def rows() -> list[common.Row]:
    """The examples with `cbpp`."""
    names = ("Intercept", "period2", "period3", "period4")
    laplace = fitted(None)
    nine = fitted(9)
    found = printed(
        "cbpp, Laplace",
        laplace,
        dict(zip(names, ("-1.3983", "-0.9919", "-1.1282", "-1.5797")))
        | {"sd of herd": "0.6421", "-2 log L": "184.0531", "log likelihood": "-92.0266", "AIC": "194.0531"}
        | {"BIC": "204.1799"},
    )
    for name, figures in {
        "glmmML": ("-1.39853234657711", "-0.992336901732793", "-1.12867036466201", "-1.58030977686564"),
        "glmmADMB": ("-1.39853810064827", "-0.99233330126975", "-1.12867317840779", "-1.58031150854503"),
    }.items():
        found += printed("cbpp, Laplace, lme4's tests", {f"{key}, {name}": laplace[key] for key in names},
                        {f"{key}, {name}": f"{float(value):.5f}" for key, value in zip(names, figures)})  # fmt: skip
    found += printed(
        "cbpp, nine nodes",
        nine,
        dict(zip(names, ("-1.3992", "-0.9914", "-1.1278", "-1.5795")))
        | {"sd of herd": "0.6475", "-2 log L, above the saturated": "100.0100"},
    )
    twenty_five = fitted(25)
    found += printed("cbpp, 25 nodes", twenty_five, {"-2 log L, above the saturated": "100.01003"})
    both = fitted(None, observations=True)
    return found + printed(
        "cbpp, herds and observations, Laplace",
        both,
        dict(zip(names, ("-1.500", "-1.226", "-1.329", "-1.866")))
        | {"sd of herd": "0.1840", "sd of observation": "0.8911", "-2 log L": "174.6383"},
    )
