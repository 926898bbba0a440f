"""Linear combinations of coefficients with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedtorch.federation.posterior import posterior_of
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.sampler import diagnostics
from fedtorch.inference._combinations import linear, written
from fedtorch.models.estimates import Diagnostics, Estimates
from fedtorch.tables.result_frame import ResultFrame

Combination = str | Mapping[str, float]


def contrasts(
    run: Run, *combinations: Combination | Mapping[str, Combination], level: float = 0.95, **options: Any
) -> ResultFrame:
    """Return linear combinations of the coefficients in `run.summary()`, with intervals and P(> 0).

    Args:
        run: of an algorithm with a posterior.
        combinations: text such as `"age - 2*sex[T.male]"`, of names, numbers, `+ - * /` and parentheses, where names
            that are numbers are in backticks; or weights by name, `{"age": 1, "sex[T.male]": -2}`; or either of these
            by label, `{"old men": "60*age + sex[T.male]"}`.
        level: of the intervals.
        options: as those of `run.summary`.

    Raises:
        ValueError: a name that is not in the summary, or text that is not a linear combination.

    Example:
        >>> import torch, fedtorch as ft
        >>> from fedtorch.models import hierarchical
        >>> x = ft.random.normal(ft.random.key(0), (3, 60, 2), torch.float64)
        >>> y = x @ torch.tensor([1.0, 3.0]).double() + 0.1 * ft.random.normal(ft.random.key(1), (3, 60), torch.float64)
        >>> model = hierarchical.linear(hierarchical.normal(2, random=[], names=["age", "dose"]), noise=0.01)
        >>> run = ft.run(ft.ep(model), ft.InProcess(ft.data.from_tensors(list(zip(x, y)))), rounds=10)
        >>> print(ft.inference.contrasts(run, "dose - 2*age", {"both": "age + dose"}).to_markdown())
        | coefficient | estimate | sd | 95 % interval | P(\\> 0) |
        | :-- | --: | --: | --: | --: |
        | dose - 2\\*age | 0.993 | 0.016 | 0.961 to 1.025 | 1.000 |
        | both | 4.017 | 0.010 | 3.997 to 4.038 | 1.000 |
    """
    estimates: Estimates = _estimates(run, options)
    weights, labels = [], []
    for label, combination in _labelled(combinations):
        by_name = linear(combination, estimates.names) if isinstance(combination, str) else combination
        missing = [name for name in by_name if name not in estimates.names]
        if missing:
            raise ValueError(f"Expected names of {list(estimates.names)}, but got {missing}")
        if twice := [name for name in by_name if estimates.names.count(name) > 1]:
            raise ValueError(f"Expected names of one quantity each, but the summary has {twice} twice; rename columns")
        labels.append(label)
        weights.append([float(by_name.get(name, 0.0)) for name in estimates.names])
    if not weights:
        raise ValueError('Expected a combination, but got none; pass one such as "age - 2*sex"')
    combined = estimates.combined(torch.tensor(weights, dtype=torch.float64), tuple(labels))
    if estimates.diagnostics is not None:
        stack = combined.nodes.unflatten(0, (estimates.chains, -1)).numpy()
        combined = combined._replace(diagnostics=Diagnostics(*(torch.tensor(each) for each in diagnostics(stack))))
    table = combined.table(level)
    table.insert(4, "p_positive", _above_zero(combined).tolist())
    return table


def _estimates(run: Run, options: dict[str, Any]) -> Estimates:
    if not isinstance(run, Run):
        raise TypeError(
            f"Expected a run, but got a {type(run).__name__}; for pooled runs, take the contrasts of each run and pool "
            "them by pooled([(estimate, covariance), …])"
        )
    return posterior_of(run.algorithm).estimates(run, **options)


def _labelled(combinations: tuple[Any, ...]) -> list[tuple[str, Combination]]:
    """Return (label, combination) of each: the label given, or the combination as text."""
    labelled: list[tuple[str, Combination]] = []
    for each in combinations:
        if isinstance(each, str):
            labelled.append((each, each))
        elif all(isinstance(part, (str, Mapping)) for part in each.values()):
            labelled += list(each.items())
        else:
            labelled.append((written(each), each))
    return labelled


def _above_zero(estimates: Estimates) -> Tensor:
    """Return the posterior probability that each quantity is above 0, NaN for point estimates."""
    if estimates.normal is None and len(estimates.nodes) == 1:
        return torch.full_like(estimates.nodes[0], torch.nan)
    if estimates.normal is not None:
        return torch.special.ndtr(estimates.normal.mean / estimates.normal.covariance.diagonal().sqrt())
    if estimates.weights is None:
        return (estimates.nodes > 0).to(torch.float64).mean(0)
    return estimates.weights @ (estimates.nodes > 0).to(estimates.weights)
