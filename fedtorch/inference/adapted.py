"""Posterior of a new site's coefficients, from the posterior of the shared parameters and the site's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedtorch.data import FederatedData, from_frame
from fedtorch.data.formulas.cells import as_frame
from fedtorch.federation.posterior import Coefficients, posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.inference._table_rows import NEW, check_design


def adapted(run: Run, rows: Any, *, site: str | None = None, tolerance: float = 0.01) -> Coefficients:
    """Return the coefficients of sites that took no part, from their rows and the run's posterior of what sites share.

    This needs no message to the run's sites. `ranef(adapted(run, rows), total=True)` is a table of the coefficients,
    and `predict(adapted(run, rows), more)` predicts with them.

    Args:
        run: of `ft.ep` with a hierarchical model, linear or generalised.
        rows: a frame with the columns of the run's formula, of several sites if it has the formula's column of clients;
            `(x, y)` of one site; or `FederatedData` of several.
        site: the name of the site of all rows, whatever the frame's column of clients; default: by that column, or
            "new" without it.
        tolerance: as in `ep.posterior`, with its warnings and errors.

    Raises:
        TypeError: an algorithm without a hierarchical model.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models import hierarchical
        >>> x = torch.ones(20, 1, dtype=torch.float64)
        >>> data = ft.data.from_tensors([(x, x[:, 0] * level) for level in (1.0, 2.0, 3.0, 2.0)])
        >>> model = hierarchical.linear(hierarchical.normal(1, names=["level"]), noise=0.1)
        >>> run = ft.run(ft.ep(model), ft.InProcess(data), rounds=30)
        >>> ward = ft.inference.adapted(run, (x[:1], torch.tensor([4.0])), site="ward 7")  # a single row of it
        >>> print(ft.inference.ranef(ward, total=True).to_markdown())
        | site | coefficient | estimate | sd | 95 % interval |
        | :-- | :-- | --: | --: | --: |
        | ward 7 | level | 3.83 | 0.31 | 3.22 to 4.45 |
    """
    data = (rows if isinstance(rows, FederatedData) else _as_data(run, rows, site)).to("cpu")
    check_design(data, run.design)
    return posterior_of(run.algorithm).adapted(run, data, tolerance)


def _as_data(run: Run, rows: Any, site: str | None) -> FederatedData:
    """Convert rows to data: `(x, y)` of one site directly, a frame by the run's formula."""
    if not isinstance(rows, tuple):
        design = run.design
        if design is None:
            raise TypeError(
                f"Expected rows (x, y) for a run without a formula, but got {type(rows).__name__}; pass tensors, or "
                "make the run's data by ft.data.from_frame(frame, client=…, formula=…)"
            )
        frame = as_frame(rows)
        if site is None and design.group in frame.columns:
            return from_frame(frame, client=design.group, design=design)
        rows = design.rows(frame, site=site or NEW)
    made = tuple(part if isinstance(part, (Tensor, Mapping)) else torch.as_tensor(part) for part in rows)
    counts = torch.tensor([len(made[0])])
    return FederatedData(made, counts, (site or NEW,), allow_empty=True)
