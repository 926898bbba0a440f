r"""Predictive accuracy of fitted models for rows or sites that were left out, and comparison of models.

A row left out is still predicted with the other rows of its site: for rows, `loo` and `waic` estimate
log p(y_ki | all other rows), which is conditional on the site. A site left out is predicted as a new one,
log p(y_k | other sites). For a run of expectation propagation this is log ∫ f_k(φ) cavity_k(φ) dφ, which needs no
draws, because a site's cavity is the posterior given the other sites.

Of rows, the server receives sums only: of log densities, of their squares, of the squares of their differences between
models, and the numbers of rows with a Pareto k above 0.5 and above 0.7.

Source: Vehtari, Gelman and Gabry (2017), "Practical Bayesian model evaluation using leave-one-out cross-validation and
WAIC", Statistics and Computing 27.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.populations.population import row_counts
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.holders import Form, Holder, Kind, ask
from fedtorch.federation.runs.posterior_draws import Drawn, sent_draws, summed
from fedtorch.federation.runs.run import Run
from fedtorch.inference._pareto import left_out, widely_applicable
from fedtorch.inference.pooling import refuse_pooled

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["compare", "loo", "waic"]

_METHODS = {"loo": left_out, "waic": widely_applicable}
_DOUBTS = {"loo": (0.5, 0.7), "waic": (0.4, 0.4)}


class Accuracy(NamedTuple):
    """Expected log predictive density of the rows or sites left out."""

    elpd: float
    se: float  # its standard error, √(n · variance), with n - 1 as in R's loo; NaN of a single row or site
    parameters: float  # the effective number of parameters; NaN of sites
    left_out: int  # number of rows, or sites
    unit: str  # "row" or "site"
    method: str  # "loo", "waic", or "cavity"
    doubtful: int  # rows of a Pareto k above 0.5; of WAIC, of a variance above 0.4
    bad: int  # rows of a Pareto k above 0.7, whose densities cannot be trusted

    def __str__(self) -> str:
        text = f"elpd of {self.left_out:,} {self.unit}s left out ({self.method}): {self.elpd:.1f} (se {self.se:.1f})"
        if self.unit == "site":
            return text
        text += f", effective parameters {self.parameters:.1f}; "
        if self.method == "waic":
            return text + f"{self.doubtful:,} rows of a variance above 0.4, which call for loo"
        return text + f"Pareto k above 0.5 of {self.doubtful:,} rows, above 0.7 of {self.bad:,}"


def loo(
    run: Run,
    *,
    out: str = "row",
    draws: int = 1000,
    given: Corrected | None = None,
    tolerance: float = 0.01,
    seed: int = 0,
) -> Accuracy:
    """Compute the accuracy for rows left out, by smoothed importance sampling, or for sites left out, by cavities.

    Args:
        run: of `ft.ep` with a hierarchical model, on rows at hand or on sites whose policies have
            `after_fit=("densities",)`; or of `ft.gibbs` with a regression and a sampler that recorded sites, for rows.
        out: "row", predicted with the other rows of its site, or "site", predicted as a new one.
        draws: of the posterior, at every client; for rows.
        given: the result of `corrected`, in place of q(φ); for rows.
        tolerance: as in `ep.posterior`, with its warnings and errors.
        seed: of the draws.

    Raises:
        TypeError: a run of another algorithm or model.
        RuntimeError: sites whose policies do not allow densities.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.ep import settled
        >>> from fedtorch.models import hierarchical
        >>> x, z = torch.ones(8, 1).double(), ft.random.normal(ft.random.key(0), (5, 8), torch.float64)
        >>> data = ft.data.from_tensors([(x, k + z[k]) for k in range(5)])
        >>> model = hierarchical.linear(hierarchical.normal(1, sd=5.0), noise=1.0)
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled())
        >>> print(loo(run))
        elpd of 40 rows left out (loo): -5... (se ...), effective parameters ...; Pareto k above 0.5 of 0 rows, ...
        >>> print(loo(run, out="site"))
        elpd of 5 sites left out (cavity): -6... (se ...)
    """
    refuse_pooled(run, "loo")
    _check(out=out)
    if out == "site":
        evidence = posterior_of(run.algorithm).evidence(run, tolerance=tolerance)
        return _of_sites(evidence, len(run.population.names))
    return _of_rows(_sums({"": run}, "loo", draws, {"": given}, tolerance, seed), 0, "loo")


def waic(
    run: Run, *, draws: int = 1000, given: Corrected | None = None, tolerance: float = 0.01, seed: int = 0
) -> Accuracy:
    """Compute the widely applicable information criterion, in the units of `loo` (not times −2).

    It costs less than `loo`. Where rows are influential it is less accurate, and its diagnostic shows that less
    reliably. Arguments are those of `loo`.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.ep import settled
        >>> from fedtorch.models import hierarchical
        >>> x, z = torch.ones(8, 1).double(), ft.random.normal(ft.random.key(0), (5, 8), torch.float64)
        >>> data = ft.data.from_tensors([(x, k + z[k]) for k in range(5)])
        >>> model = hierarchical.linear(hierarchical.normal(1, sd=5.0), noise=1.0)
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled())
        >>> abs(waic(run).elpd - ft.inference.loo(run).elpd) < 0.5
        True
    """
    refuse_pooled(run, "waic")
    return _of_rows(_sums({"": run}, "waic", draws, {"": given}, tolerance, seed), 0, "waic")


def compare(
    runs: Mapping[str, Run],
    *,
    out: str = "row",
    draws: int = 1000,
    given: Mapping[str, Corrected] | None = None,
    tolerance: float = 0.01,
    seed: int = 0,
) -> pd.DataFrame:
    """Return a table of models, the best first, with the difference of each from the best and its standard error.

    All models are evaluated together, row by row at the clients, so that differences are paired by row. Do not rely on
    a difference below 4, or below two standard errors.

    Sites whose policies have `after_fit=("densities",)` compute the rows of each model anew, by the formulas agreed on
    before, and send sums of differences. They must still take part in the last run of `runs`.

    Args:
        runs: fitted to the same responses, by name; their covariates may differ.
        out: as in `loo`, like the other arguments.
        given: results of `corrected`, by name.

    Raises:
        ValueError: runs of other clients, rows or responses; or out="site" for rows that are at sites, which hold the
            cavities of one run at a time.
        RuntimeError: sites whose policies do not allow densities, or that are in another run.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.federation.algorithms.ep import settled
        >>> from fedtorch.models import hierarchical
        >>> x, z = torch.ones(8, 1).double(), ft.random.normal(ft.random.key(0), (5, 8), torch.float64)
        >>> data = ft.data.from_tensors([(x, k + z[k]) for k in range(5)])
        >>> def fitted(random):
        ...     model = hierarchical.linear(hierarchical.normal(1, random=random, sd=5.0), noise=1.0)
        ...     return ft.run(ft.ep(model), ft.InProcess(data), rounds=50, until=settled())
        >>> table = compare({"one level": fitted([]), "a level for each site": fitted([0])})
        >>> table.index.tolist(), table["difference"].round().tolist()
        (['a level for each site', 'one level'], [0.0, -32.0])
    """
    import pandas as pd

    _check(out=out)
    names = list(runs)
    if out == "site":
        every = [posterior_of(run.algorithm).evidence(run, each=True, tolerance=tolerance) for run in runs.values()]
        values = torch.stack(every)
        _same_clients(runs)
        each = [_of_sites({"elpd": row.sum(), "squares": row.square().sum()}, len(row)) for row in values]
        apart = values[None] - values[:, None]
        differences, squares = apart.sum(-1), apart.square().sum(-1)
    else:
        sums = _sums(runs, "loo", draws, given or {}, tolerance, seed)
        each = [_of_rows(sums, i, "loo") for i in range(len(names))]
        differences, squares = sums["elpd"][None] - sums["elpd"][:, None], sums["squares"][1:, 1:]
    best = int(differences[0].argmax())
    rows = []
    for i, one in enumerate(each):
        difference = float(differences[best, i])
        error = _error(difference, float(squares[i, best]), one.left_out)
        rows.append([one.elpd, one.se, difference, error, one.parameters, one.bad])
    columns = ["elpd", "se", "difference", "se of difference", "effective parameters", "Pareto k above 0.7"]
    return pd.DataFrame(rows, names, columns).sort_values("difference", ascending=False)


def _check(*, out: str) -> None:
    if out not in ("row", "site"):
        raise ValueError(f"Expected out= 'row' or 'site', but got {out!r}")


def _sums(
    runs: Mapping[str, Run],
    method: str,
    draws: int,
    given: Mapping[str, Corrected | None],
    tolerance: float,
    seed: int,
) -> dict[str, Tensor]:
    """Return the sums over all rows that the clients of the last run compute from the draws of all runs."""
    _same_clients(runs)
    sources = [
        posterior_of(run.algorithm).draws(run, draws, given.get(name), tolerance, seed) for name, run in runs.items()
    ]
    *before, (run, last) = zip(runs.values(), sources)
    sums: dict[str, Tensor] = ask(run, DENSITIES, last.sent, drawn=last, beside=before, method=method)
    if int(sums["different"]):
        raise ValueError(
            "Expected runs of the same responses, but got rows whose responses differ; densities of other responses, "
            "such as log y, cannot be compared"
        )
    return sums


def _pointwise(every: list[Drawn], part: slice, method: str) -> dict[str, Tensor]:
    """Return the quantities of some rows that are summed, `(K, n, ...)` each, from draws of each model."""
    rows = [_METHODS[method](one.log_density(part), one.efficiency) for one in every]
    elpd = torch.stack([torch.zeros_like(rows[0].elpd), *(row.elpd for row in rows)], -1)
    doubt, (low, high) = torch.stack([row.doubt for row in rows], -1), _DOUBTS[method]
    y = torch.stack([one.rows.y[:, part] for one in every])
    return {
        "elpd": elpd[..., 1:],
        "squares": (elpd[..., :, None] - elpd[..., None, :]).square(),
        "parameters": torch.stack([row.lppd - row.elpd for row in rows], -1),
        "doubtful": (doubt > low).double(),
        "bad": (doubt > high).double(),
        "different": (y != y[0]).any(0).double(),
        "rows": torch.ones_like(y[0]),
    }


def _of_rows(sums: Mapping[str, Tensor], i: int, method: str) -> Accuracy:
    elpd, rows = float(sums["elpd"][i]), int(sums["rows"])
    error = _error(elpd, float(sums["squares"][0, i + 1]), rows)
    doubtful, bad = int(sums["doubtful"][i]), int(sums["bad"][i])
    return Accuracy(elpd, error, float(sums["parameters"][i]), rows, "row", method, doubtful, bad)


def _of_sites(sums: Mapping[str, Tensor], sites: int) -> Accuracy:
    elpd = float(sums["elpd"])
    return Accuracy(elpd, _error(elpd, float(sums["squares"]), sites), math.nan, sites, "site", "cavity", 0, 0)


def _error(total: float, squares: float, count: int) -> float:
    """Return the standard error of a sum of independent terms, from their sum and that of squares, with n - 1."""
    return (count * max(squares - total * total / count, 0.0) / (count - 1)) ** 0.5 if count > 1 else math.nan


def _same_clients(runs: Mapping[str, Run]) -> None:
    (first, one), *others = [(name, run.population) for name, run in runs.items()]
    for name, population in others:
        if tuple(population.names) != tuple(one.names) or not row_counts(population).equal(row_counts(one)):
            raise ValueError(
                f"Expected runs of the same clients with the same rows, but got {one!r} of {first!r} and "
                f"{population!r} of {name!r}; fit both to the rows that have all columns"
            )


# -- what holders of rows compute ------------------------------------------------------------------------------------


def _densities(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a holder's sums over its rows; of the responses only whether any differ between runs."""
    pairs, method = [*holder.beside, (holder, sent)], str(about["method"])
    sources, data = [sent_draws(one, of_one).at for one, of_one in pairs], [one.data for one, _ in pairs]
    sums = summed(holder, data, sources, lambda every, part: _pointwise(every, part, method))
    return {**sums, "different": (sums["different"] > 0).to(sums["different"])}


def _sums_of(form: Form) -> dict[str, Tensor]:
    """Return empty tensors of the shapes of the sums from `_pointwise`."""
    size = 1 + len(form.about.get("beside", ()))
    shapes = {name: [size] for name in ("elpd", "parameters", "doubtful", "bad")}
    shapes |= {"squares": [size + 1, size + 1], "different": [], "rows": []}
    return {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}


DENSITIES = Kind("densities", "densities", _densities, _sums_of, ("phi", "key"), ("method", "beside"))
