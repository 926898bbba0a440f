r"""Multiple imputation over a federation: completed data sets, each by its own draw of the parameters.

The model of the rows, the response among the columns, is normal about a mean for each site
(`models.incomplete_normal`). Its parameters are drawn by data augmentation from sums of the sites only
(`ft.normal_em(draws=M)`), one draw per data set, and with that draw each site draws its missing cells from its own
rows. So the data sets carry the uncertainty of the parameters (proper imputation), and no row leaves its site.

Source: Rubin (1987), "Multiple Imputation for Nonresponse in Surveys"; Schafer (1997), "Analysis of Incomplete
Multivariate Data"; van Buuren (2018), "Flexible Imputation of Missing Data", chapters 2 and 7.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch import random, tree
from fedtorch.data import Design, FederatedData
from fedtorch.data.frames.incomplete import Incomplete, absent
from fedtorch.federation.algorithm import Algorithm
from fedtorch.federation.algorithms.normal_em import normal_em
from fedtorch.federation.populations.in_process import InProcess
from fedtorch.federation.runs.run import Run
from fedtorch.federation.runs.sampler import load_arviz
from fedtorch.federation.wrapper import Stage, Wrapper
from fedtorch.models import completion
from fedtorch.models.incomplete_normal import SiteNormal

_MIXED = 1.1  # R-hat
_CELLS = 7  # the purpose of a key: drawing cells


class Imputed(Sequence[FederatedData]):
    """A sequence of completed data sets; item m is the data completed by the m-th draw of the parameters.

    Attributes:
        run: of data augmentation.
        r_hat: the largest R-hat of means, variances and variances between sites.

    Example:
        >>> import torch, fedtorch as ft
        >>> x = torch.tensor([[0.0], [torch.nan], [2.0], [3.0], [4.0]]).double()
        >>> data = ft.models.gibbs.imputation.incomplete([(x, torch.tensor([0.1, 0.9, 2.2, 2.8, 4.1]).double())])
        >>> imputed = ft.inference.imputed(data, 3, between=False)
        >>> first, again, other = (imputed[m].rows[0][1] for m in (0, 0, 1))
        >>> len(imputed), bool(first == again), bool(first == other)
        (3, True, False)
    """

    def __init__(self, data: FederatedData, run: Run, r_hat: float, seed: int) -> None:
        self.data, self.run, self.r_hat, self._seed = data, run, r_hat, seed

    def __repr__(self) -> str:
        return f"Imputed({len(self)} times {self.data}, R-hat {self.r_hat:.2f})"

    def __len__(self) -> int:
        return len(self.run.server.normal.mean)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[m] for m in range(*number.indices(len(self)))]
        m = range(len(self))[number]
        normal = tree.map(lambda leaf: leaf[m], self.run.server.normal)
        return _completed_data(self.data, normal, _key(self._seed, m))

    def __iter__(self) -> Iterator[FederatedData]:
        return (self[m] for m in range(len(self)))


def imputed(
    data: FederatedData,
    imputations: int = 20,
    *,
    rounds: int = 100,
    between: bool = True,
    seed: int = 0,
    population: Callable[[FederatedData], Any] = InProcess,
) -> Imputed:
    """Return completed data sets, to be fitted one by one and `pooled`.

    Issues a `RuntimeWarning` if R-hat shows that the chains have not mixed after `rounds`.

    Args:
        data: rows with missing cells, of `ft.data.from_frame(..., missing="impute")` or `imputation.incomplete(...)`.
        imputations: number of data sets; a good rule is the percentage of rows with a missing cell.
        rounds: of data augmentation, before the draws are taken.
        between: whether each of several sites has its own mean; False where sites are parts of one sample.
        seed: of all draws.
        population: makes a population of the data, such as `ft.Distributed`.

    Raises:
        ValueError: rows without missing cells, a column without a value at any client, or fewer rows than columns.

    Example:
        >>> import torch, fedtorch as ft
        >>> x = ft.random.normal(ft.random.key(0), (2, 60, 2), torch.float64)
        >>> y = x.sum(-1) + 0.1 * ft.random.normal(ft.random.key(1), (2, 60), torch.float64)
        >>> x[:, ::3, 0] = torch.nan
        >>> data = ft.models.gibbs.imputation.incomplete([(x[k], y[k]) for k in range(2)])
        >>> model = ft.models.hierarchical.linear(ft.models.hierarchical.normal(2, random=[], names=["a", "b"]))
        >>> fits = [ft.run(ft.ep(model), ft.InProcess(d), rounds=8) for d in ft.inference.imputed(data, 3)]
        >>> ft.inference.pooled(fits).summary()["estimate"].round(1)[:2].tolist()
        [1.0, 1.0]
    """
    if not isinstance(data.rows, Incomplete):
        raise ValueError(
            'Expected rows with missing cells, as from_frame(..., missing="impute") makes them, but got '
            f"{type(data.rows).__name__}; complete rows need no imputation"
        )
    if imputations < 1 or rounds < 2:
        raise ValueError(f"Expected imputations >= 1 and rounds >= 2, but got {imputations} and {rounds}")
    p, between = data.rows.values.shape[1], between and len(data) > 1
    _check_columns(data)
    run = Run(normal_em(imputations, between=between, columns=p), population(data), seed=seed)
    trace = []
    for _ in run.rounds(rounds):
        normal = run.server.normal
        spread = [normal.between.log()] if between else []
        trace.append(torch.cat([normal.mean, normal.covariance.diagonal(dim1=1, dim2=2).log(), *spread], 1))
    r_hat = _r_hat(torch.stack(trace[rounds // 2 :], 1))
    if r_hat > _MIXED:
        warnings.warn(
            f"Expected chains that have mixed after {rounds} rounds, but got R-hat {r_hat:.2f}; use more rounds=, "
            "between=False where sites need no means of their own, or leave out columns with few observed values",
            RuntimeWarning,
            stacklevel=2,
        )
    return Imputed(data, run, r_hat, seed)


def completed(
    mean: Sequence[float],
    covariance: Sequence[Sequence[float]],
    between: Sequence[float],
    key: int,
    design: Design | str | None = None,
) -> Wrapper:
    """Make clients complete their rows before they fit, `algorithm | completed(...)`, by settings that sites can take.

    Args:
        mean, covariance, between: one draw of `ft.normal_em(draws=M)`, `run.server.normal`, as lists of numbers.
        key: of this data set, a whole number.
        design: of the formula, or its `to_json()`; None for rows (x, y) of the columns without encoding.

    Example:
        >>> import torch, fedtorch as ft
        >>> x = torch.tensor([[0.0], [torch.nan], [2.0], [3.0]]).double()
        >>> data = ft.models.gibbs.imputation.incomplete([(x, torch.tensor([0.0, 1.0, 2.0, 3.0]).double())])
        >>> draw = {"mean": [1.5, 1.5], "covariance": [[2.0, 1.99], [1.99, 2.0]], "between": [0.0, 0.0], "key": 1}
        >>> model = ft.models.hierarchical.linear(ft.models.hierarchical.normal(1, random=[]))
        >>> run = ft.run(ft.ep(model) | ft.inference.completed(**draw), ft.InProcess(data), rounds=5)
        >>> round(float(ft.inference.pooled([run, run]).mean[0]), 1)
        1.0
    """
    numbers = (torch.tensor(part, dtype=torch.float64) for part in (mean, covariance, between))
    normal, formula = SiteNormal(*numbers), Design.from_json(design) if isinstance(design, str) else design

    def wrap(algorithm: Algorithm) -> Algorithm:
        def prepare(data: Any) -> Any:
            return algorithm.prepare(completion.completed(data, normal, random.key(key), formula))

        return dataclasses.replace(algorithm, prepare=prepare)

    settings = {"mean": mean, "covariance": covariance, "between": between, "key": key}
    settings["design"] = None if formula is None else formula.to_json()
    return Wrapper(Stage.LOCAL, "inference.completed", wrap, settings)


def _key(seed: int, number: int) -> Tensor:
    return random.fold_in(random.fold_in(random.key(seed), _CELLS), number)


def _completed_data(data: FederatedData, normal: SiteNormal, key: Tensor) -> FederatedData:
    """Return the data with the rows of every client completed."""
    blocks = [completion.completed(data.stack([k]), normal, key, data.design) for k in range(len(data))]
    rows = [tree.map(lambda leaf: leaf[0], block.batch) for block in blocks]
    counts = torch.cat([block.count for block in blocks]).cpu()
    features = data.features[:-1] if data.design is None else data.design.columns
    was = data.absent or absent(data)
    return dataclasses.replace(data, rows=tree.concatenate(rows), counts=counts, features=features, absent=was)


def _check_columns(data: FederatedData) -> None:
    """Raise ValueError for a column without any value."""
    empty = ~data.rows.observed.any(0)
    if bool(empty.any()):
        numbers = empty.nonzero()[:, 0].tolist()
        names = [data.features[j] if data.features else str(j) for j in numbers]
        raise ValueError(f"Expected values of every column, but no client has any of {names}; leave these out")


def _r_hat(trace: Tensor) -> float:
    """Return the largest rank-normalised R-hat of chains `(M, R, q)`; means of few sites have long tails."""
    az = load_arviz()
    if len(trace) < 2 or trace.shape[1] < 4:
        return float("nan")
    return max(float(az.rhat(trace[..., j].numpy())) for j in range(trace.shape[2]))
