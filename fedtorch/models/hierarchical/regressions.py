r"""Regressions by a formula: the hierarchy, its names and its default priors are derived from a design.

Coefficients belong to the columns as fitted, standardised unless the design says otherwise. By default

.. math::
    \mu_j \sim N(0, (2.5\,s)^2), \qquad \mu_0 \sim N(m, (5\,s)^2), \qquad
    \log \tau_j \sim N(2\log s - 2, 2^2), \qquad \log \sigma^2 \sim N(2 \log s, 3^2),

with mean m and sd s of a Gaussian response minus its offsets, if the encoding has them, and m = 0, s = 1 otherwise: a
coefficient of 2.5 sds of the response, or 2.5 units of log-odds or log counts, per sd of its column is already large,
and clients differ by 0.37 s, up to a factor of e. An intercept far from the rows, because columns are not centred, has
an sd for that; without an intercept, s of the means is the response's root mean square. Thresholds of an ordered
response of C levels have normal priors about log-odds k / C, at which levels are equally likely, with the intercept's
sd for the first and sd 5 for the others' differences to it, restricted to ascending thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtorch.data import BadClients, Design
from fedtorch.data.formulas.grammar import INTERCEPT
from fedtorch.models.hierarchical import hyperpriors, missing_cells
from fedtorch.models.hierarchical.cumulative import cumulative, difference_names
from fedtorch.models.hierarchical.factor import Model
from fedtorch.models.hierarchical.generalised import logistic, poisson
from fedtorch.models.hierarchical.hierarchy import normal
from fedtorch.models.hierarchical.hyperpriors import Hyperprior
from fedtorch.models.hierarchical.linear_devices import linear
from fedtorch.models.incomplete_normal import Normal
from fedtorch.models.quadrature import QuadratureRule

_FAMILIES: dict[str, Callable[..., Model]] = {
    "gaussian": linear,
    "logistic": logistic,
    "binomial": logistic,
    "poisson": poisson,
    "cumulative": cumulative,
}
_SLOPE, _INTERCEPT = 2.5, 5.0  # sds of priors of means
_LOG_VARIANCE, _LOG_NOISE = 2.0, 3.0  # sds


def regression(
    design: Design,
    family: str = "gaussian",
    *,
    mean: float | Sequence[float] | Mapping[str, float] | None = None,
    sd: float | Sequence[float] | Mapping[str, float] | None = None,
    variance: Hyperprior | Sequence[Hyperprior] | None = None,
    noise: Hyperprior | float | None = None,
    rule: QuadratureRule | None = None,
    inner: QuadratureRule | str | None = "default",
    covariates: Normal | None = None,
) -> Model:
    """Build the model of a formula for `ft.ep(model)`: its coefficients, and which of them differ by client.

    Args:
        design: from `ft.data.from_frame(frame, client=…, formula=…).design`.
        family: of the response: "gaussian", "logistic" (0 or 1), "binomial" (successes of trials), "poisson", or
            "cumulative" (levels in order, see `cumulative`).
        mean, sd: of the normal prior of the coefficients' means: one number, one for each, or some of them by name. A
            large sd, such as 100, leaves nearly all to the rows, as in lme4; for a Gaussian response it is in the
            response's units per sd of a column, and 100 sds of the response are large. Default: see the module.
        variance: hyperprior of the logarithms of the variances between clients, one or one for each.
        noise: hyperprior of log σ², or σ² itself; of the Gaussian family only.
        rule: nodes over the variances; see `hierarchical.linear`.
        inner: nodes over coefficients; see `hierarchical.generalised`. Of the Gaussian family with
            missing cells only.
        covariates: for rows with missing cells, `from_frame(..., missing="impute")`, the normal distribution of their
            columns, `ft.run(ft.normal_em(columns=data.design), ft.InProcess(data), rounds=100).server`: cells are
            integrated out under it. See [missing values](../howto/missing.md).

    Raises:
        ValueError: another family; a binomial response without trials, or trials of another; a cumulative one without
            levels, or levels of another; names of coefficients that the design does not have. When a population is
            bound, responses that do not fit: the message names the client and the column.

    >>> import pandas, fedtorch as ft
    >>> from fedtorch.models import hierarchical
    >>> frame = pandas.DataFrame(
    ...     {"clinic": ["A"] * 3 + ["B"] * 3, "dose": [1.0, 2, 3, 2, 3, 4], "well": [0, 1, 1, 0, 0, 1]})
    >>> data = ft.data.from_frame(frame, client="clinic", formula="well ~ dose + (1 | clinic)")
    >>> model = hierarchical.regression(data.design, "logistic")
    >>> model.names
    ('mean Intercept', 'mean dose', 'log variance Intercept')
    >>> model.design.columns
    ('Intercept', 'dose')
    """
    if family not in _FAMILIES:
        raise ValueError(f"Expected a family, one of {list(_FAMILIES)}, but got {family!r}")
    _check_trials(design, family)
    levels = _levels(design, family)
    centre, scale = (0.0, 1.0) if family != "gaussian" or design.encoding.response is None else design.encoding.response
    first = [name == "Intercept" for name in design.columns]
    reach = scale if any(first) else math.hypot(centre, scale)  # of coefficients that jointly form the mean
    level = math.hypot(_INTERCEPT, *(_SLOPE * far for far in design.encoding.centres.values()))
    cuts = [math.log(k / (len(levels) - k)) for k in range(1, len(levels))]  # at which levels are equally likely
    start = -cuts[0] if cuts else centre
    middles = [start * intercept for intercept in first] + [cut - cuts[0] for cut in cuts[1:]]
    sds = [reach * (level if intercept else _SLOPE) for intercept in first] + [_INTERCEPT] * len(cuts[1:])
    names = (*design.columns, *(difference_names(levels) if levels else ()))
    hierarchy = normal(
        len(names),
        random=design.random,
        correlated=design.correlated,
        mean=_each("mean", mean, names, middles),
        sd=_each("sd", sd, names, sds),
        variance=variance or hyperpriors.log_normal(2 * math.log(scale) - 2, _LOG_VARIANCE),
        names=names,
    )
    settings: dict[str, Any] = {"rule": rule, **({"levels": levels} if levels else {})}
    if family == "gaussian":
        settings["noise"] = hyperpriors.log_normal(2 * math.log(scale), _LOG_NOISE) if noise is None else noise
    elif noise is not None:
        raise ValueError(f"Expected noise= with the Gaussian family only, but got it with {family!r}; leave it out")
    else:
        settings["inner"] = inner
    if covariates is None:
        model = _FAMILIES[family](hierarchy, **settings)
    elif levels:
        raise ValueError(
            "Expected complete rows with the family 'cumulative', but got covariates= of missing cells; complete them "
            "by ft.inference.imputed(data) and pool the fits"
        )
    else:
        model = missing_cells.regression(design, hierarchy, family, covariates, **{**settings, "inner": inner})
    return model._replace(prepare=partial(_prepare, model.prepare, design), design=design)


def _check_trials(design: Design, family: str) -> None:
    trials = design.trials or design.parsed.trials
    if (family == "binomial") != (trials is not None):
        got = f"trials by {trials!r}" if trials else "none"
        raise ValueError(
            f"Expected trials with the binomial family and no other, but got {got} with {family!r}; write "
            f"'{design.response} | trials(n) ~ …' or trials='n' for successes of n trials, and take the family "
            "'logistic' for 0 and 1"
        )


def _levels(design: Design, family: str) -> tuple[str, ...]:
    """Return the levels of an ordered response; None for others."""
    column = design.parsed.response.column
    levels = design.encoding.levels[column].names if column in design.encoding.levels else ()
    if family == "cumulative":
        if not levels:
            raise ValueError(
                f"Expected levels of {column!r} in order with the family 'cumulative', but got numbers; declare them, "
                f"from_frame(..., levels={{{column!r}: [1, 2, 3]}}), or make the column an ordered categorical"
            )
        if INTERCEPT not in design.columns:
            raise ValueError(
                "Expected a formula with an intercept with the family 'cumulative', which stands for the first "
                f"threshold, but got {design.formula!r}; leave 0 out"
            )
        return levels
    if len(levels) > 2:
        raise ValueError(
            f"Expected a response of numbers or of two levels with the family {family!r}, but got {len(levels)} levels "
            f"of {column!r}; take the family 'cumulative', or choose one of them, as a column of True and False"
        )
    return ()


def _each(argument: str, given: Any, names: Sequence[str], default: Sequence[float]) -> Tensor:
    """Return a number for each coefficient."""
    values = list(default)
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"Expected {argument}= of coefficients {list(names)}, but got {unknown}")
        values = [float(given.get(name, value)) for name, value in zip(names, values)]
    elif given is not None:
        values = torch.as_tensor(given, dtype=torch.float64).expand(len(values)).tolist()
    if argument == "sd" and not all(value > 0 for value in values):
        raise ValueError(f"Expected positive sds, but got {values}")
    return torch.tensor(values, dtype=torch.float64)


def _prepare(prepare: Callable[[Any], Any], design: Design, data: Any) -> Any:
    """Prepare a block of rows; errors name the frame's column of y."""
    try:
        return prepare(data)
    except BadClients as error:
        trials = design.trials or design.parsed.trials
        named = {"offset": design.offset, "weights": design.weights, "trials": trials}
        where = f"y is the column {design.response!r}"
        where = "".join([where, *(f", {name} are {column!r}" for name, column in named.items() if column)])
        report = None if error.told is None else f"the site has {error.told}; {where}"
        raise BadClients(torch.tensor(error.rows), f"{error}; {where}", report) from None
