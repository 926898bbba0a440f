"""Outputs of several kinds in one model: every row has the index of its likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch


class MixedLikelihood(gpytorch.likelihoods.Likelihood):
    """Likelihood that differs by row, for units whose measurements, counts or classes depend on the same processes.

    Rows are (x, y, kind): kind `(N,)` int64 is the place of the row's likelihood in `parts`.

    Args:
        parts: one-dimensional GPyTorch likelihoods. 0 must be a possible output of each, as it is for Gaussian,
            Student-t, Laplace, Bernoulli (outputs 0 and 1) and Poisson likelihoods. GPyTorch's Poisson rate is the
            softplus of f, not its exponential; units with levels far from 0 need `ConvolvedGP(mean=True)`.

    Source: Moreno-Muñoz, Artés and Álvarez (2018), "Heterogeneous multi-output Gaussian process prediction".

    Raises:
        ValueError: no likelihoods.

    Example:
        >>> import fedtorch as ft, torch
        >>> from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
        >>> from fedtorch.models.gaussian_process import ConvolvedGP, MixedLikelihood
        >>> x = torch.linspace(0.0, 1.0, 9)[:, None].double()
        >>> measured = (x, x[:, 0], torch.zeros(9, dtype=torch.int64))  # the first likelihood
        >>> answered = (x, (x[:, 0] > 0.5).double(), torch.ones(9, dtype=torch.int64))  # the second
        >>> model = ConvolvedGP(x[::2], likelihood=MixedLikelihood([GaussianLikelihood(), BernoulliLikelihood()]))
        >>> population = ft.InProcess(ft.data.from_tensors([measured, answered]))
        >>> ft.run(ft.fedmgp(model, accept_disclosure=True), population, rounds=2, progress=False).number
        2
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        super().__init__()
        if not parts:
            raise ValueError("Expected at least one likelihood, but got none")
        self.parts: Any = torch.nn.ModuleList(parts)

    @property
    def noise(self) -> Tensor | None:
        """Return the noise of the first part that has one, which means that outputs are measurements."""
        return next((part.noise for part in self.parts if hasattr(part, "noise")), None)

    def check(self, *extra: Tensor) -> None:
        """Raise ValueError unless rows have exactly one further field, the index of a likelihood."""
        count = len(self.parts)
        if len(extra) != 1 or extra[0].is_floating_point():
            got = [f"{value.dtype} {tuple(value.shape)}" for value in extra]
            raise ValueError(f"Expected rows (x, y, kind) with an integer kind below {count}, but got beside y {got}")
        wrong = (extra[0] < 0) | (extra[0] >= count)
        if bool(wrong.any()):
            raise ValueError(f"Expected kinds 0…{count - 1} of rows, but got {int(extra[0][wrong][0])}")

    def measured(self, kind: Tensor) -> Tensor:
        """Return which rows are measurements, whose scale the outputs determine: `(*b, N)` bool."""
        has = torch.tensor([hasattr(part, "noise") for part in self.parts], device=kind.device)
        return has[kind]

    def expected_log_prob(self, observations: Tensor, function_dist: Any, *params: Any, **kwargs: Any) -> Tensor:
        """Return E[log p(y_n | f_n)] of every row, `(*b, N)`; `params` is the rows' kind."""
        (kind,) = params
        total = torch.zeros_like(function_dist.mean)
        for number, part in enumerate(self.parts):
            mine = kind == number
            value = part.expected_log_prob(torch.where(mine, observations, 0.0), function_dist)
            total = torch.where(mine, value, total)
        return total

    def log_marginal(self, observations: Tensor, function_dist: Any, *params: Any, **kwargs: Any) -> Tensor:
        """Return log ∫ p(y_n | f_n) q(f_n) df_n of every row, `(*b, N)`; `params` is the rows' kind."""
        (kind,) = params
        total = torch.zeros_like(function_dist.mean)
        for number, part in enumerate(self.parts):
            mine = kind == number
            value = part.log_marginal(torch.where(mine, observations, 0.0), function_dist)
            total = torch.where(mine, value, total)
        return total

    def forward(self, function_samples: Tensor, *params: Any, **kwargs: Any) -> Any:
        """Raise TypeError: mixed rows have no one distribution.

        Raises:
            TypeError: always; use `parts[kind]`.
        """
        raise TypeError("Expected rows of one kind, but got mixed ones; call model.likelihood.parts[kind](model(x))")
