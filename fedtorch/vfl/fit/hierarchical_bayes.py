"""The noise and priors of a hierarchical Bayes split network; see `fedtorch.vfl.split_network`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtorch.models.encoders import perceptron
from fedtorch.vfl.fit.auxiliary import Auxiliary, amortised, sums
from fedtorch.vfl.fit.guide import GaussianFamily, Guide, diagonal, point
from fedtorch.vfl.model.predictors import Prior, normal_prior


@dataclass(frozen=True)
class HierarchicalBayes:
    """The noise and priors of a hierarchical Bayes split network.

    Example:
        >>> import fedtorch as ft
        >>> from fedtorch.vfl.model import likelihoods, split_nn
        >>> bayes = HierarchicalBayes(rho=torch.tensor([1.0, 1e-3, 0.0]))  # noise, hardly any, a plain network
        >>> bottoms = [split_nn.mlp(3, [4], 1), split_nn.mlp(2, [4], 1)]
        >>> network = ft.vfl.SplitNetwork(bottoms, likelihoods.bernoulli(), seed=range(3), bayes=bayes)
        >>> x = [torch.ones(5, 3), torch.ones(5, 2)]
        >>> network.totals(x, 100, seed=0, noise=False).std(1).amax((1, 2)) > 0  # weights have a posterior
        tensor([ True,  True, False])

    Attributes:
        rho: standard deviation of z_j given its mean; one for all, or `(B,)`. An element with exactly 0 is a plain
            network, whose weights have neither priors nor a posterior. In the limit of small ρ, z has no noise either,
            but the `random` weights have both; for this limit take a small number, such as 1e-3.
        random: shell patterns of the bottom networks' weights that have a prior and a posterior.
        prior: of these weights, from θ `(B, M, d)` to `(B, M)`; N(0, 1) by default.
        theta: the family q(w_j).
        auxiliary: the family q(z | w); by default one encoder at the server for a sum at the cut layer, and one per
            party otherwise.
        weight_sd: standard deviation of a normal prior on all other weights, whose posterior mode is the estimate; one
            for all, or `(B,)`; None for no prior.
        sticking: whether the gradient stops at the parameters of log q (equation 4), see `Guide`.
        sd: initial standard deviation of q(w_j).
    """

    rho: float | Tensor
    random: str | Sequence[str] = "last.*"
    prior: Prior = dataclasses.field(default_factory=normal_prior)
    theta: GaussianFamily = dataclasses.field(default_factory=diagonal)
    auxiliary: Auxiliary | None = None
    weight_sd: float | Tensor | None = None
    sticking: bool = True
    sd: float = 0.1

    def __post_init__(self) -> None:
        rho = torch.as_tensor(self.rho, dtype=torch.float64)
        if rho.ndim > 1 or not bool(((rho >= 0) & rho.isfinite()).all()):
            raise ValueError(f"Expected rho ≥ 0, one for all or one an element, but got {rho.tolist()}")
        scales = torch.as_tensor(1.0 if self.weight_sd is None else self.weight_sd)
        if not self.sd > 0 or scales.ndim > 1 or not bool((scales > 0).all()):
            raise ValueError(f"Expected positive sd and weight_sd, but got {self.sd} and {self.weight_sd}")

    def guide(self, at_sum: bool) -> Guide:
        """Return the guide, for a cut layer that is a sum or another one.

        Raises:
            ValueError: noise drawn at the sum, without a sum at the cut layer.
        """
        auxiliary = self.auxiliary or (sums(perceptron(4), skewed=False) if at_sum else amortised(perceptron(8)))
        if auxiliary.server is not None and not at_sum:
            raise ValueError(
                "Expected a sum at the cut layer and no top network for `sums`, but got others; use `amortised`"
            )
        return Guide(auxiliary, self.theta, sticking=self.sticking, sd=self.sd, shared=point())
