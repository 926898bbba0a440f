r"""Average marginal effects: by how much the mean response changes with a variable, averaged over rows.

.. math:: \frac1n \sum_{ki} \frac{\partial}{\partial v} E[y_{ki} \mid \theta_k]

of a number v, and the difference from its first level of a factor, or of a column of zeros and ones. At every draw of
the coefficients of all sites it is a number, so that it has a posterior.

Source: Williams (2012), "Using the margins command to estimate and interpret adjusted predictions and marginal
effects", Stata Journal 12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtorch.data.formulas.cells import Cells, as_frame
from fedtorch.data.formulas.design import Design
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.runs.run import Run
from fedtorch.inference._site_draws import SiteDraws, site_draws
from fedtorch.inference._sites import rows_at_hand
from fedtorch.inference._table_rows import Rows, TableRows, formula_or_names, table_rows
from fedtorch.models.estimates import Estimates
from fedtorch.tables.result_frame import ResultFrame

_DRAWS = 512
_STEP = 1e-4  # of a derivative, in sds of the variable
_NUMBERS = 2**22  # of one array over rows and draws


class _Change(NamedTuple):
    """Hold two values of all rows between which a variable changes."""

    name: str
    low: Tensor  # (N, d)
    high: Tensor
    step: float  # between them


def marginal_effects(
    run: Run,
    frame: Any = None,
    variables: Sequence[str] | None = None,
    level: float = 0.95,
    *,
    given: Corrected | None = None,
    tolerance: float = 0.01,
) -> ResultFrame:
    """Return average marginal effects on the scale of the response, with intervals.

    They are averaged over rows of the run's sites, with the coefficients of each site: of a logistic model changes of
    probabilities, of a Poisson model changes of the expected count, of a linear one sums of coefficients.

    Args:
        run: as for `predict`, with its rows at hand.
        frame: rows to average over, of the run's sites. With the run's formula effects are those of its variables,
            splines and interactions included, and a frame has to be given; without one, those of the columns of x, and
            rows are by default the run's own.
        variables: whose effects, by default all of them.
        level: of the intervals.
        given, tolerance: as those of `ranef`.

    Raises:
        ValueError: a variable that is not there, or rows of other sites.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models.hierarchical import generalised, normal
        >>> x = torch.cat([torch.ones(300, 1), ft.random.normal(ft.random.key(0), (300, 1), torch.float64)], 1)
        >>> y = (ft.random.uniform(ft.random.key(1), (300,), torch.float64) < x[:, 1].sigmoid()).double()
        >>> data = ft.data.from_tensors([(x[:150], y[:150]), (x[150:], y[150:])])
        >>> model = generalised.logistic(normal(2, random=[], names=["Intercept", "dose"]))
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=20)
        >>> print(ft.inference.marginal_effects(run).to_markdown())
        | coefficient | estimate | sd | 95 % interval | n |
        | :-- | --: | --: | --: | --: |
        | dose | 0.185 | 0.022 | 0.140 to 0.224 | 300 |
    """
    read = table_rows(run, rows_at_hand(run) if frame is None else frame, None)
    names, design = formula_or_names(run)
    if design is not None and frame is None:
        raise ValueError(
            f"Expected the frame whose rows to average over, but got none: effects of {design.formula!r} are those of "
            "its variables, which columns of x do not tell; pass the frame that the data were made of"
        )
    made = _of_columns(names, read.rows) if design is None else _of_variables(design, as_frame(frame))
    changes = [each for each in made if variables is None or each.name.partition(":")[0] in variables]
    known = {each.name.partition(":")[0] for each in changes}
    missing = [name for name in variables or () if name not in known]
    if missing or not changes:
        raise ValueError(f"Expected variables that rows vary in, such as {list(names)}, but got {missing or 'none'}")
    drawn = site_draws(run, _DRAWS, given, tolerance, even=True)
    values = torch.stack([_effect(run, drawn, read, change) for change in changes], 1)
    n = (len(read.sites),) * len(changes)
    return Estimates(tuple(each.name for each in changes), values, coefficients=len(changes), n=n).table(level)


def _effect(run: Run, drawn: SiteDraws, read: TableRows, change: _Change) -> Tensor:
    """Return the average change of the mean response at each draw, `(S,)`."""
    if drawn.family is None:
        raise TypeError("Expected a model of known family, but got one without; see ft.inference.predict")
    owners = np.array(read.sites, dtype=object)
    strangers = sorted(set(read.sites) - set(run.population.names))
    if strangers:
        raise ValueError(f"Expected rows of the run's sites, but got some of {strangers[:5]}; leave them out")
    total = torch.zeros(drawn.theta.shape[1], dtype=torch.float64)
    for number, name in enumerate(run.population.names):
        mine, theta = torch.from_numpy(np.flatnonzero(owners == name)), drawn.theta[number]
        for part in mine.split(max(1, _NUMBERS // len(theta))):
            offset = 0.0 if read.rows.offset is None else read.rows.offset[part, None].to(theta)
            means = [drawn.family.mean(_widened(x[part], theta) @ theta.mT + offset) for x in (change.high, change.low)]
            total += (means[0] - means[1]).sum(0)
    return total / (change.step * len(owners))


def _widened(x: Tensor, theta: Tensor) -> Tensor:
    """Return x with a column of ones in front, where sites have an intercept of their own."""
    return x if x.shape[1] == theta.shape[1] else torch.cat([torch.ones_like(x[:, :1]), x], 1)


def _of_columns(names: Sequence[str], rows: Rows) -> Iterator[_Change]:
    """Yield changes of the columns of x, but for constant ones."""
    for j, name in enumerate(names):
        column = rows.x[:, j]
        values = column.unique()
        if len(values) < 2:
            continue
        binary = values.tolist() == [0.0, 1.0]
        step = _STEP * float(column.std())
        edges = (torch.zeros_like(column), torch.ones_like(column)) if binary else (column - step, column + step)
        low, high = (rows.x.index_copy(1, torch.tensor([j]), edge[:, None]) for edge in edges)
        yield _Change(name, low, high, 1.0 if binary else 2 * step)


def _of_variables(design: Design, frame: Any) -> Iterator[_Change]:
    """Yield changes of the variables of a formula: of a factor from its first level to each other."""
    responses = (design.response, design.parsed.response.column)
    for name in design.parsed.columns:
        if name in responses or name not in {variable.quantity.column for variable in design.parsed.variables}:
            continue
        encode = lambda values, name=name: design.rows_of(Cells(frame.assign(**{name: values}), design.group), False)[0]
        if name in design.encoding.levels:
            first, *others = design.encoding.levels[name].names
            low = encode(first)
            yield from (_Change(f"{name}: {level} - {first}", low, encode(level), 1.0) for level in others)
        elif frame[name].isin([0, 1]).all():
            yield _Change(name, encode(0.0), encode(1.0), 1.0)
        else:
            step = _STEP * (float(frame[name].std(ddof=0)) or max(1.0, abs(float(frame[name].iloc[0]))))
            yield _Change(name, encode(frame[name] - step), encode(frame[name] + step), 2 * step)
