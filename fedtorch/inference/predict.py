"""Predictions of rows, with intervals of the mean response and of a new response, at the run's sites and new ones."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.posterior import Coefficients, posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.inference._responses import LevelsPredicted, Predicted, level_probabilities, predicted
from fedtorch.inference._table_rows import Rows, columns_of, read_rows
from fedtorch.inference.pooling import refuse_pooled
from fedtorch.tables.result_frame import ResultFrame


def predict(
    run: Run | Coefficients,
    rows: Any,
    interval: float = 0.9,
    *,
    site: str | int | None = None,
    given: Corrected | None = None,
    tolerance: float = 0.01,
) -> ResultFrame:
    """Return a prediction for each row, with intervals of the mean response and of a new response.

    For an ordered response the table has a line for the probability of each level.

    A row of a site of the run is predicted with that site's coefficients. Any other row is predicted as one of a new
    site, whose coefficients vary as those of all sites do. Columns are `site`; `known`, whether the site is one of the
    run; `estimate` and `sd` of the mean response (for binary responses a probability) and its interval `low`, `high`;
    and `new_low`, `new_high`, the interval of a new response (a number of successes where rows have trials). Sites of
    other organisations can be predicted if their policies have `after_fit=("effects",)`.

    Args:
        run: of `ft.ep` with a hierarchical model; of `ft.maximum_likelihood`, with intervals given the estimated
            variances; of `ft.gibbs` with a regression and a sampler that recorded sites; of `ft.matrix_normal`, for its
            own sites only; or sites, as `adapted` returns them.
        rows: a frame with the columns of the run's formula, or with a column named after each coefficient;
            `FederatedData` whose clients are named after the sites; or x `(n, d)`.
        interval: probability of the intervals.
        site: the column of a frame with each row's site, by default that of the formula; or the name of the site of all
            rows. Without either, rows are those of a new site.
        given, tolerance: as in `ranef`.

    Raises:
        TypeError: an algorithm that has no such posterior, or a likelihood of your own without a family.
        ValueError: rows of other columns.
        RuntimeError: sites whose policies do not allow effects.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models import hierarchical
        >>> x = torch.ones(20, 1, dtype=torch.float64)
        >>> data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0, 2.0)], names=list("ABCD"))
        >>> model = hierarchical.linear(hierarchical.normal(1, names=["level"]), noise=0.1)
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=30)
        >>> print(ft.inference.predict(run, x[:1], site="C").to_markdown())
        |  | site | known | estimate | sd | 90 % interval | 90 % interval of a new response |
        | :-- | --: | --: | --: | --: | --: | --: |
        | 0 | C | True | 2.992 | 0.071 | 2.876 to 3.108 | 2.459 to 3.525 |
        >>> print(ft.inference.predict(run, x[:1]).to_markdown())  # of a site that is not known
        |  | site | known | estimate | sd | 90 % interval | 90 % interval of a new response |
        | :-- | --: | --: | --: | --: | --: | --: |
        | 0 | new | False | 1.6 | 1.2 | -0.5 to 3.4 | -0.5 to 3.5 |
    """
    if not (isinstance(interval, (int, float)) and 0 < interval < 1):
        raise ValueError(f"Expected an interval of a probability between 0 and 1, such as 0.9, but got {interval!r}")
    refuse_pooled(run, "predict")
    names = run.sites if isinstance(run, Coefficients) else tuple(run.population.names)
    read = read_rows(columns_of(run), rows, site)
    _check_trials(run, read)
    unknown = [label for label in dict.fromkeys(read.sites) if label not in names]
    groups = dict.fromkeys(read.sites)
    if isinstance(run, Coefficients):
        if unknown:
            raise ValueError(f"Expected rows of the sites {list(names)}, but got {unknown}; name one of them by site=")
        sources = dict.fromkeys(groups, run)
    else:
        posterior = posterior_of(run.algorithm)
        known = posterior.coefficients(run, given, tolerance) if len(unknown) < len(groups) else None
        other = posterior.newcomers(run, given, tolerance) if unknown else None
        sources = {label: other if label in unknown else known for label in groups}  # type: ignore[misc]
    ordered = next((source.ordered for source in sources.values()), None)
    respond = predicted if ordered is None else level_probabilities
    predictions: list[Predicted | LevelsPredicted] = []
    places: list[np.ndarray] = []
    for label, source in sources.items():
        mine = np.flatnonzero(np.array(read.sites, dtype=object) == label)
        places.append(mine)
        predictions.append(
            respond(source, 0 if label in unknown else names.index(label), read.take(torch.from_numpy(mine)), interval)
        )
    order = np.argsort(np.concatenate(places)) if places else np.zeros(0, dtype=np.int64)
    levels = () if ordered is None else ordered.levels
    each = max(1, len(levels))  # lines of a row
    index = np.repeat(np.arange(len(read.sites)), each)
    columns: dict[str, Any] = {"site": [read.sites[i] for i in index.tolist()]}
    columns["known"] = [label not in unknown for label in columns["site"]]
    columns |= {"level": list(levels) * len(read.sites)} if levels else {}
    for i, field in enumerate((Predicted if ordered is None else LevelsPredicted)._fields):
        parts = [part[i] for part in predictions]
        columns[field] = torch.cat(parts)[torch.from_numpy(order)].flatten().tolist() if predictions else []
    return ResultFrame.of(columns, read.index[index], level=interval)


def _check_trials(run: Run | Coefficients, read: Rows) -> None:
    """Warn if rows lack the column of their numbers of trials."""
    design = columns_of(run).design
    trials = None if design is None else design.trials or design.parsed.trials
    if trials is not None and read.trials is None:
        warnings.warn(
            f"Expected numbers of trials in column {trials!r}, but the rows have no such column and count as one trial "
            "each; add the column to predict numbers of successes",
            stacklevel=3,
        )
