"""Rows to predict for, from frames, federated data or tensors: the model's x, and the site of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedtorch.data import FederatedData
from fedtorch.data.formulas.cells import as_frame, level_name
from fedtorch.data.formulas.design import Design
from fedtorch.federation.posterior import Coefficients, posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.models.estimates import own_names

NEW = "new"  # the site of rows without the name of one


class Rows(NamedTuple):
    """Rows to predict for, as a model takes them, with their sites and index."""

    x: Tensor  # (N, d)
    offset: Tensor | None = None  # (N,)
    trials: Tensor | None = None  # (N,)
    sites: Sequence[str] = ()  # (N,) names of the rows' sites
    index: Any = None  # of the pandas frame

    def take(self, part: Any) -> Rows:
        """Return some of the rows, without sites and index."""
        return Rows(*(None if each is None else each[part] for each in self[:3]))  # type: ignore[arg-type]


class Columns(NamedTuple):
    """The columns of x: their names, or the design that makes them."""

    names: tuple[str, ...]
    design: Design | None
    alone: str  # the site of rows without the name of one


def read_rows(columns: Columns, rows: Any, site: str | int | None) -> Rows:
    """Read the rows to predict for, by the columns of x; see `predict`."""
    alone = columns.alone if site is None else level_name(site)
    if isinstance(rows, FederatedData):
        check_design(rows, columns.design)
        made = _given(rows.rows, columns)
        owners = torch.arange(len(rows)).repeat_interleave(rows.counts).tolist()
        return made._replace(sites=[rows.names[owner] for owner in owners], index=pd.RangeIndex(len(owners)))
    if isinstance(rows, (Tensor, tuple)):
        made = _given(rows, columns)
        return made._replace(sites=[alone] * len(made.x), index=pd.RangeIndex(len(made.x)))
    frame = as_frame(rows)
    group = columns.design.group if site is None and columns.design is not None else site
    sites = map(level_name, frame[group]) if group in frame.columns else [alone] * len(frame)
    return _from_frame(frame, columns)._replace(sites=list(sites), index=frame.index)


def check_design(data: FederatedData, design: Design | None) -> None:
    """Raise ValueError for data encoded by other levels, knots, means or scales than the run's."""
    if data.design is not None and design is not None and data.design != design:
        raise ValueError(
            f"Expected rows of the run's design, {design.formula!r} with its levels, knots, means and scales, but got "
            f"rows of another one, {data.design.formula!r}; pass the frame itself, or "
            f"ft.data.from_frame(frame, client={design.group!r}, design=run.design)"
        )


def columns_of(run: Run | Coefficients) -> Columns:
    """Return the columns of x of a run, or of other sites."""
    if isinstance(run, Coefficients):
        names = run.names[1:] if run.intercept else run.names
        names = names if run.ordered is None or run.design is None else run.design.columns
        return Columns(names, run.design, run.sites[0] if len(run.sites) == 1 else NEW)
    (alone,) = own_names([NEW], run.population.names)
    return Columns(*posterior_of(run.algorithm).columns(run), alone)


def _given(rows: Any, columns: Columns) -> Rows:
    """Read rows that are tensors: x alone, or with a response, which is not used, offsets and trials."""
    x = rows[0] if isinstance(rows, tuple) else rows
    last = rows[-1] if isinstance(rows, tuple) else None
    extra: Mapping[str, Tensor] = last if isinstance(last, Mapping) else {}
    x = torch.as_tensor(x, dtype=torch.float64)
    if x.ndim != 2 or x.shape[1] != len(columns.names):
        raise ValueError(
            f"Expected rows x with {len(columns.names)} columns {_few(columns.names)}, but got shape {tuple(x.shape)}"
        )
    return Rows(x, extra.get("offset"), extra.get("trials"))


def _from_frame(frame: pd.DataFrame, columns: Columns) -> Rows:
    """Read the rows of a frame, by the formula or by the names of its columns."""
    if columns.design is not None:
        x, extra = columns.design.rows(frame, response=False)
        return Rows(x, extra.get("offset"), extra.get("trials"))
    missing = [name for name in columns.names if name not in frame.columns]
    if missing:
        raise ValueError(
            f"Expected a column for each of the coefficients {_few(columns.names)}, but got none for {_few(missing)}; "
            "the run has no formula, so name the columns after its coefficients"
        )
    return Rows(torch.from_numpy(frame[list(columns.names)].to_numpy(np.float64, copy=True)))


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + ", …" * (len(names) > 8)
