"""From a data frame to `FederatedData`: columns unchanged, or the columns of a formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from fedtorch import tree
from fedtorch.data.agreement.disclosure import Disclosure
from fedtorch.data.agreement.server import Request, agreed
from fedtorch.data.agreement.site import Answers
from fedtorch.data.federated import FederatedData
from fedtorch.data.formulas.cells import Cells, as_frame, level_name
from fedtorch.data.formulas.design import Design
from fedtorch.data.formulas.grammar import Formula
from fedtorch.data.formulas.parsing import parse
from fedtorch.data.formulas.pooled import pooled_design
from fedtorch.data.frames.incomplete import Absent, incomplete_cells
from fedtorch.data.frames.raw_columns import RawColumns, observed_values
from fedtorch.tree import Tree

if TYPE_CHECKING:
    import pandas

_AGREED = ("other", "bounds", "scales")  # needed only for clients that agree by a minimum
_MISSING = ("refuse", "drop", "impute")


def from_frame(
    frame: Any,
    *,
    client: str,
    features: Sequence[str] | None = None,
    target: str | None = None,
    formula: str | None = None,
    levels: Mapping[str, Sequence[Any]] | None = None,
    standardise: bool = True,
    offset: str | None = None,
    weights: str | None = None,
    trials: str | None = None,
    missing: str = "refuse",
    minimum: int | None = None,
    other: Mapping[str, str] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    scales: Mapping[str, tuple[float, float]] | None = None,
    design: Design | None = None,
    dtype: torch.dtype | None = None,
) -> FederatedData:
    """Read rows (x, y) of a frame, one client per value of a column, in order of first appearance.

    A `formula` defines x and y, as in lme4 and brms: `"death ~ age + C(sex) + (1 + age | hospital)"`, with columns of
    text as factors; the data then have a `design` with names, encoding and the conversion to the units of the columns.

    `features` and `target` select columns instead: a target of floats stays numeric, in `dtype`. Any other target
    becomes int64 class codes 0, 1, …: a categorical in the order of its categories, also unused ones, so that two
    frames can share their codes; integers, booleans and strings in sorted order. To regress on an integer column,
    convert it to float first.

    Args:
        frame: one row per example: of pandas, or another that offers `__dataframe__`, such as one of polars.
        client: the column with each row's client; its values, as strings, name the clients.
        features: numeric or boolean columns, x `(n, len(features))`.
        target: the column of y `(n,)`.
        formula: in place of both; `docs/tutorials/formulas.md` has the grammar. It is never run as code.
        levels: with a formula, the levels of factors, column -> values, the reference first, or of an ordered response,
            in order, for the family "cumulative"; default: levels with rows, in order; a response with more than two
            has to be an ordered categorical.
        standardise: with a formula, whether columns of x are centred and scaled within the fit, if the model stays the
            same; `design.original` converts back.
        offset: with a formula, a column that is added to the linear predictor.
        weights: with a formula, a column of row weights: for binary responses, counts and levels a row of weight 3 is
            three such rows. For a Gaussian response weights are precisions as in lme4: the noise variance of a row is
            sigma² / weight, so a row of weight 3 is the mean of three rows, and not three rows.
        trials: with a formula, a column with the numbers of trials; the response counts successes.
        missing: "refuse" raises an error that lists missing cells, "drop" leaves out rows with any, and "impute" keeps
            them for `ft.inference.imputed`, which completes them: rows are the columns before the formula is applied,
            see `data.missing()` and [missing values](../howto/missing.md).
        minimum: with a formula, clients agree on levels, knots, means and scales like sites of different organisations,
            without disclosing anything about fewer rows: a level counts if one client has at least this many rows of
            it, levels are in the order of their names, means, sds and knots are round numbers (1 % of the sd) derived
            from histograms. Default: those of all rows together, exactly.
        other: with a minimum, the level of a factor that replaces too rare ones, column -> name. It comes last, so that
            the first of the other levels is the reference.
        bounds: with a minimum, the outer knots of splines, column -> (lower, upper).
        scales: with a minimum, declared means and sds of columns for which clients' answers do not suffice, by column
            or "log(column)", also of the response: `{"nyha": (2, 1)}`.
        design: in place of a formula, that of other rows, such as the training set's: the same encoding.
        dtype: of x, and of y when the target is a float; default: float32, with a formula float64.

    Raises:
        ValueError: a column is missing, or a cell is; the message names the client, the column and the row's label. A
            formula with an unsupported element, which is named.
        TypeError: a feature is not numeric, or the target mixes types.

    >>> import pandas
    >>> frame = pandas.DataFrame(
    ...     {"hospital": ["A", "B", "A"], "age": [50, 60, 70], "sbp": [120, 130, 140], "state": ["ill", "ill", "well"]})
    >>> data = from_frame(frame, client="hospital", features=["age", "sbp"], target="state")
    >>> data.names, data[0]
    (('A', 'B'), (tensor([[ 50., 120.],
            [ 70., 140.]]), tensor([0, 1])))
    >>> data = from_frame(frame, client="hospital", formula="sbp ~ age + state + (1 | hospital)")
    >>> data.design.columns, data.design.random
    (('Intercept', 'age', 'state[T.well]'), (0,))
    """
    if missing not in _MISSING:
        raise ValueError(f"Expected missing= as one of {list(_MISSING)}, but got {missing!r}")
    agreement = {"minimum": minimum, "other": other, "bounds": bounds, "scales": scales}
    by_formula = {"levels": levels, "offset": offset, "weights": weights, "trials": trials, **agreement}
    if formula is None and design is None:
        if features is None or target is None:
            raise TypeError("Expected a formula, or features and target, but got neither; pass formula='y ~ x'")
        given = [name for name, value in by_formula.items() if value is not None]
        if given:
            raise TypeError(f"Expected {given} with a formula, but got none; pass formula=")
        table, lost = _complete_rows(as_frame(frame), client, [*features, target], missing)
        data = _of_columns(table, client, features, target, dtype or torch.float32, missing == "impute")
        return replace(data, absent=lost)
    if features is not None or target is not None or (formula is not None and design is not None):
        raise TypeError("Expected one of a formula, a design, and features with target, but got several")
    given = [name for name, value in by_formula.items() if value is not None]
    if design is not None and given:
        raise TypeError(f"Expected {given} with a formula, but got a design, which has its own; leave them out")
    table = as_frame(frame)
    if design is None:
        parsed = parse(str(formula))
        read = [*parsed.columns, *(column for column in (offset, weights, trials) if column is not None)]
        table, lost = _complete_rows(table, client, read, missing)
        gaps = missing == "impute" and minimum is None  # with an agreement, clients describe their observed cells
        known = observed_values(table, tuple(dict.fromkeys(read))) if gaps else table
        settings = {**by_formula, "standardise": standardise}
        design = (_pooled if minimum is None else _agreed)(parsed, known, client, settings)
    else:
        table, lost = _complete_rows(table, client, design.reads, missing)
    if len(table) == 0:
        raise ValueError("Expected at least one row, but got an empty frame")
    owners = Cells(table, client).complete(client)
    if missing == "impute":
        raw = RawColumns(design)
        return FederatedData(**_by_client(raw.rows(table), owners), features=raw.names, design=design)
    rows = design.rows(table)
    if dtype is not None:
        rows = tree.map(lambda leaf: leaf.to(dtype), rows)
    return FederatedData(**_by_client(rows, owners), features=design.columns, design=design, absent=lost)


def _pooled(formula: Formula, table: pandas.DataFrame, client: str, settings: dict[str, Any]) -> Design:
    given = [name for name in _AGREED if settings[name] is not None]
    if given:
        raise TypeError(f"Expected {given} with a minimum, but got none; pass minimum=10, or declare levels=")
    settings = {name: value for name, value in settings.items() if name not in ("minimum", *_AGREED)}
    return pooled_design(formula, Cells(table, client), **settings)


def _agreed(formula: Formula, table: pandas.DataFrame, client: str, settings: dict[str, Any]) -> Design:
    """Return the design on which clients agree, each answering for its own rows."""
    parts = table.groupby(Cells(table, client).complete(client), sort=False, observed=True)
    limits = Disclosure(settings["minimum"])
    named = {level_name(name): part for name, part in parts}
    sites = {name: Answers(part, limits, name=name) for name, part in named.items()}
    given = {name: value for name, value in settings.items() if value is not None}
    return agreed(Request(formula.text, group=client, **given), sites)


def _complete_rows(
    table: pandas.DataFrame, client: str, columns: Sequence[str], missing: str
) -> tuple[pandas.DataFrame, Absent | None]:
    """Return the remaining rows, and the missing cells of all rows if some are left out."""
    if missing != "drop":
        return table, None
    names = tuple(dict.fromkeys(column for column in columns if column in table.columns))
    if client not in table.columns:
        return table.dropna(subset=list(names)), None
    owned = table.dropna(subset=[client])
    cells = owned[list(names)].isna().to_numpy()
    lacking = {"cells": torch.from_numpy(numpy.column_stack([cells, cells.any(1)]).astype(numpy.float64))}
    clients = _by_client(lacking, owned[client])
    sums = torch.stack([part.sum(0) for part in clients["rows"]["cells"].split(clients["counts"].tolist())])
    lost = Absent(names, clients["names"], clients["counts"], sums)
    return owned.dropna(subset=list(names)), lost


def _by_client(rows: Tree, owners: pandas.Series) -> dict[str, Any]:
    """Return rows, counts and names of clients, in order of first appearance."""
    import pandas as pd  # imported at first use, because it is slow to import

    codes, values = pd.factorize(owners)
    order = torch.from_numpy(codes.astype(numpy.int64)).argsort(stable=True)
    counts = torch.from_numpy(numpy.bincount(codes, minlength=len(values)).astype(numpy.int64))
    names = tuple(map(level_name, values))
    return {"rows": tree.map(lambda leaf: leaf[order], rows), "counts": counts, "names": names}


def _of_columns(
    frame: pandas.DataFrame, client: str, features: Sequence[str], target: str, dtype: torch.dtype, gaps: bool
) -> FederatedData:
    import pandas as pd

    columns = [client, *features, target]
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ValueError(
            f"Expected columns {columns}, but {missing} are not in the frame; it has {list(frame.columns)}"
        )
    if len(frame) == 0:
        raise ValueError("Expected at least one row, but got an empty frame")
    for column in columns[:1] if gaps else columns:
        empty = frame[column].isna().to_numpy()
        if empty.any():
            row = int(empty.argmax())
            raise ValueError(
                f"Expected no missing cells, but got one in column {column!r} of client "
                f"{str(frame[client].iloc[row])!r}, row {frame.index[row]} ({int(empty.sum())} in that "
                'column); keep them by missing="impute", or leave such rows out by missing="drop"'
            )
    for column in (*features, target) if gaps else features:
        if not pd.api.types.is_numeric_dtype(frame[column]) or pd.api.types.is_complex_dtype(frame[column]):
            raise TypeError(
                f"Expected numeric or boolean features, but got {frame[column].dtype} in column {column!r}; "
                + _instead(frame[column])
            )
    if gaps:
        cells = frame[[*features, target]].to_numpy(dtype=numpy.float64, na_value=numpy.nan)
        rows = incomplete_cells(torch.from_numpy(numpy.array(cells)))
        return FederatedData(**_by_client(rows, frame[client]), features=(*features, target))
    x = torch.from_numpy(numpy.array(frame[list(features)].to_numpy(dtype=numpy.float64))).to(dtype)
    y = _target(frame[target], dtype)
    return FederatedData(**_by_client((x, y), frame[client]), features=tuple(features))


def _instead(column: pandas.Series) -> str:
    """Return the advice for a column that is not numeric."""
    if any(isinstance(value, (list, tuple, numpy.ndarray)) for value in column):
        return "of lists, such as tokens, make data by from_loaders(loaders, pad=0), whose batches may differ in length"
    return "encode it, for example with pandas.get_dummies, or write a formula=, in which it is a factor"


def _target(column: pandas.Series, dtype: torch.dtype) -> Tensor:
    import pandas as pd

    if pd.api.types.is_float_dtype(column):
        return torch.from_numpy(numpy.array(column.to_numpy(dtype=numpy.float64))).to(dtype)
    if isinstance(column.dtype, pd.CategoricalDtype):
        return torch.from_numpy(numpy.array(column.cat.codes, dtype=numpy.int64))
    try:
        _, codes = numpy.unique(column.to_numpy(), return_inverse=True)
    except TypeError as error:
        raise TypeError(
            f"Expected a target of numbers, booleans, strings or categories, but got mixed types in column "
            f"{column.name!r}; convert it to one type"
        ) from error
    return torch.from_numpy(codes.astype(numpy.int64))
