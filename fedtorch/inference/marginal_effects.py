r"""Average marginal effects: by how much the mean response changes with a variable, averaged over rows.

.. math:: \frac1n \sum_{ki} \frac{\partial}{\partial v} E[y_{ki} \mid \theta_k]

for a numeric variable v; for a factor, or a column of zeros and ones, the difference from the first level. It is a
function of the coefficients of all sites, so that their draws give its posterior.

Source: Williams (2012), "Using the margins command to estimate and interpret adjusted predictions and marginal
effects", Stata Journal 12.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedtorch.data.formulas.cells import Cells, as_frame
from fedtorch.data.formulas.design import Design
from fedtorch.federation.algorithms.ep.correction import Corrected
from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.holders import Form, Holder, Kind, Unanswerable, ask, rows_at_hand
from fedtorch.federation.runs.posterior_draws import by_client, sent_draws, site_draws
from fedtorch.federation.runs.run import Run
from fedtorch.inference._table_rows import NEW, Columns, Rows, columns_of, read_rows
from fedtorch.inference.pooling import refuse_pooled
from fedtorch.models.estimates import Estimates
from fedtorch.models.hierarchical.families import CUMULATIVE, Family
from fedtorch.tables.result_frame import ResultFrame

_DRAWS = 512
_SEED = 0
_STEP = 1e-4  # of a derivative, in sds of the variable
_NUMBERS = 2**22  # the most elements of an array over rows and draws
_KINDS = ("number", "binary", "factor")


class _Change(NamedTuple):
    """The rows with a variable at its lower and at its upper value."""

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

    They are averages over rows of the run's sites, with the coefficients of each site. For a logistic model they are
    changes of probabilities, for a Poisson model of the expected count, and for a linear model sums of coefficients.

    Args:
        run: as for `predict`; or on sites whose policies have `after_fit=("margins",)`, which average over their own
            rows, each with its clients' coefficients.
        frame: rows of the run's sites to average over, where rows are at hand. A run with a formula needs a frame, and
            effects are those of the formula's variables, through their splines and interactions. Without a formula
            effects are those of the columns of x, and rows are by default the run's own.
        variables: names of the variables, by default all.
        level: of the intervals.
        given, tolerance: as in `ranef`.

    Raises:
        ValueError: a name that is no variable of the rows, or rows of other sites.
        RuntimeError: sites whose policies do not allow marginal effects.

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
    refuse_pooled(run, "marginal_effects")
    source = posterior_of(run.algorithm).draws(run, _DRAWS, given, tolerance, _SEED, even=True)
    names, design, _ = columns_of(run)
    elsewhere = hasattr(run.clients, "ask")
    if elsewhere and frame is not None:
        raise ValueError("Expected no frame, because sites average over their own rows, but got one; leave it out")
    if design is not None and frame is None and not elsewhere:
        raise ValueError(
            f"Expected a frame of rows to average over, but got none: effects of {design.formula!r} are those of its "
            "variables, which columns of x do not contain; pass the frame that the data were made from"
        )
    every = names if design is None else _variables(design)
    table = None if elsewhere else _table(Columns(names, design, NEW), rows_at_hand(run) if frame is None else frame)
    seen = ask(run, VARIABLES, ones=True) if table is None else table.seen(ones=False)
    kinds = {name: kind for name, kind in _kinds(every, design, seen).items() if variables is None or name in variables}
    missing = [name for name in variables or () if name not in kinds]
    if missing or not kinds:
        raise ValueError(f"Expected variables that rows vary in, such as {list(names)}, but got {missing or 'none'}")
    numbers = {str(every.index(name)): kind for name, kind in kinds.items()}
    if table is None:
        sums = ask(run, EFFECTS, source.sent, kinds=numbers)
    else:
        sums = table.effects(source.family, site_draws(run, source), run.population.names, numbers)
    labels = [label for name, kind in kinds.items() for label in _labels(name, kind, design)]
    values, n = sums["total"] / sums["rows"], (int(sums["rows"]),) * len(labels)
    return Estimates(tuple(labels), values, coefficients=len(labels), n=n).table(level)


class _Table(NamedTuple):
    """Rows to average over, and the design that makes x of them."""

    columns: Columns
    read: Rows
    frame: pd.DataFrame | None  # of a formula's variables

    @property
    def variables(self) -> list[np.ndarray | None]:
        """Return the values of each variable, None for factors."""
        design = self.columns.design
        if design is None or self.frame is None:
            return list(self.read.x.mT.numpy())
        levels = design.encoding.levels
        return [None if name in levels else self.frame[name].to_numpy(np.float64) for name in _variables(design)]

    def seen(self, ones: bool, minimum: int = 1) -> dict[str, Tensor]:
        """Return for each variable whether it has values besides 0 and 1, and whether it varies.

        Each needs at least `minimum` rows: with a value besides 0 and 1, or with another value than the most frequent
        one. If `ones`, a column also counts as varying where `minimum` rows are not 1.
        """
        other, varies = [], []
        for values in self.variables:
            known = np.zeros(minimum) if values is None else values
            _, counts = np.unique(known, return_counts=True)
            other.append(int((~np.isin(known, (0, 1))).sum()) >= minimum)
            varied = len(known) - counts.max(initial=0) >= minimum or (ones and int((known != 1).sum()) >= minimum)
            varies.append(values is None or varied)
        return {"other": torch.tensor(other).double(), "varies": torch.tensor(varies).double()}

    def effects(
        self, family: Family, theta: Tensor, sites: Sequence[str], kinds: Mapping[str, str]
    ) -> dict[str, Tensor]:
        """Return sums over rows of the changes of the mean response at each draw, `(S, effects)`, and the row count.

        Args:
            family: of the response.
            theta: draws of the sites' coefficients, `(K, S, d)`.
            sites: names of the sites.
            kinds: of the variables, by number.
        """
        if family is CUMULATIVE:
            raise TypeError(
                "Expected a response that has a mean, but got one of ordered levels; coefficients are log-odds of all "
                "levels above, and ft.inference.predict(run, rows) has the probability of each level"
            )
        strangers = sorted(set(self.read.sites) - set(sites))
        if strangers:
            raise ValueError(f"Expected rows of the run's sites, but got some of {strangers[:5]}; leave them out")
        every = [change for number, kind in kinds.items() for change in self._changes(int(number), kind)]
        totals = [self._total(family, theta, sites, change) for change in every]
        return {"total": torch.stack(totals, 1), "rows": torch.tensor(float(len(self.read.sites))).double()}

    def _total(self, family: Family, draws: Tensor, sites: Sequence[str], change: _Change) -> Tensor:
        """Return the sum over rows of changes of the mean response at each draw, per unit of the variable, `(S,)`."""
        owners, offset = np.array(self.read.sites, dtype=object), self.read.offset
        total = torch.zeros(draws.shape[1], dtype=torch.float64)
        for name, theta in zip(sites, draws):
            for part in torch.from_numpy(np.flatnonzero(owners == name)).split(max(1, _NUMBERS // len(theta))):
                more = 0.0 if offset is None else offset[part, None].to(theta)
                low, high = (family.mean(_widened(x[part], theta) @ theta.mT + more) for x in change[:2])
                total += (high - low).sum(0)
        return total / change.step

    def _changes(self, number: int, kind: str) -> Iterator[_Change]:
        """Yield the changes of a variable; for a factor, from its first level to each other level."""
        design = self.columns.design
        if design is None or self.frame is None:
            column = self.read.x[:, number]
            low, high, step = _edges(column.numpy(), kind, ddof=1)
            x = lambda edge: self.read.x.index_copy(1, torch.tensor([number]), torch.as_tensor(edge)[:, None])
            yield _Change(x(low), x(high), step)
            return
        name = _variables(design)[number]
        encode = lambda values: design.rows_of(Cells(self.frame.assign(**{name: values}), design.group), False)[0]
        if kind == "factor":
            first, *others = design.encoding.levels[name].names
            low = encode(first)
            yield from (_Change(low, encode(level), 1.0) for level in others)
        else:
            low, high, step = _edges(self.frame[name].to_numpy(np.float64), kind, ddof=0)
            yield _Change(encode(low), encode(high), step)


def _table(columns: Columns, rows: Any) -> _Table:
    frame = None if columns.design is None else as_frame(rows)
    return _Table(columns, read_rows(columns, rows, None), frame)


def _edges(values: np.ndarray, kind: str, ddof: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return each row's lower and upper value of a numeric variable, and their distance."""
    if kind == "binary":
        return np.zeros(len(values)), np.ones(len(values)), 1.0
    spread = float(np.std(values, ddof=min(ddof, len(values) - 1)))
    step = _STEP * (spread or max(1.0, abs(float(values[0]))))
    return values - step, values + step, 2 * step


def _widened(x: Tensor, theta: Tensor) -> Tensor:
    """Return x with a column of ones in front, where sites have an intercept of their own."""
    return x if x.shape[1] == theta.shape[1] else torch.cat([torch.ones_like(x[:, :1]), x], 1)


def _variables(design: Design) -> list[str]:
    """Return the variables of a formula, without the response and the column of clients."""
    responses = (design.response, design.parsed.response.column)
    used = {variable.quantity.column for variable in design.parsed.variables}
    return [name for name in design.parsed.columns if name not in responses and name in used]


def _kinds(names: Sequence[str], design: Design | None, seen: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the kind of each variable (number, binary or factor), without constant columns of x."""
    kinds = {}
    for name, other, varies in zip(names, seen["other"].tolist(), seen["varies"].tolist()):
        if design is not None and name in design.encoding.levels:
            kinds[name] = "factor"
        elif design is not None or varies:
            kinds[name] = "number" if other else "binary"
    return kinds


def _labels(name: str, kind: str, design: Design | None) -> list[str]:
    """Return the names of a variable's effects."""
    if kind != "factor" or design is None:
        return [name]
    first, *others = design.encoding.levels[name].names
    return [f"{name}: {level} - {first}" for level in others]


# -- what holders of rows compute ------------------------------------------------------------------------------------


def _columns_of(algorithm: Any, data: Any = None) -> Columns:
    """Return the columns of x of a model, by number where they have no formula."""
    known = posterior_of(algorithm)
    return Columns(tuple(map(str, range(known.size))), known.design or getattr(data, "design", None), NEW)


def _table_of(holder: Holder) -> _Table:
    """Return the rows that a site averages over: its frame if there is a formula, otherwise its data."""
    columns = _columns_of(holder.algorithm, holder.data)
    if columns.design is not None and holder.frame is None:
        raise Unanswerable(
            f"the site has rows but no frame, and effects of {columns.design.formula!r} need the columns of a frame; "
            "the site would provide one by SiteConfiguration.of_frame(...)"
        )
    return _table(columns, holder.data if columns.design is None else holder.frame)


def _seen(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, Tensor]:
    return _table_of(holder).seen(bool(about["ones"]), holder.minimum)


def _effects(holder: Holder, sent: Mapping[str, Tensor], about: Mapping[str, Any]) -> dict[str, Tensor]:
    drawn, kinds = sent_draws(holder, sent), about["kinds"]
    table = _table_of(holder)
    known = {str(number) for number in range(len(table.variables))}
    if not (kinds.keys() <= known and all(kind in _KINDS for kind in kinds.values())):
        raise ValueError(f"Expected kinds of variables by number, but got {str(kinds)[:100]}")
    theta = by_client(holder, [holder.data], [drawn.at], lambda every: every[0].theta)
    return table.effects(drawn.family, theta, holder.data.names, kinds)


def _count(form: Form) -> dict[str, Tensor]:
    columns = _columns_of(form.algorithm)
    number = len(columns.names if columns.design is None else _variables(columns.design))
    return dict.fromkeys(("other", "varies"), torch.empty(number, dtype=torch.float64))


def _totals(form: Form) -> dict[str, Tensor]:
    design = _columns_of(form.algorithm).design
    sizes = [
        1 if design is None else len(_labels(_variables(design)[int(number)], kind, design))
        for number, kind in form.about["kinds"].items()
    ]
    total = torch.empty(len(form.sent["phi"]), sum(sizes), dtype=torch.float64)
    return {"total": total, "rows": torch.zeros(()).double()}


VARIABLES = Kind("variables", "margins", _seen, _count, settings=("ones",))
EFFECTS = Kind("effects", "margins", _effects, _totals, ("phi", "key"), ("kinds",))
