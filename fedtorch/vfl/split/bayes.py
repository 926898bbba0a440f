"""The noise and priors of a hierarchical Bayes split network, and what its nodes draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedtorch import random
from fedtorch.vfl.auxiliary import Auxiliary
from fedtorch.vfl.gaussians import GaussianFamily, diagonal
from fedtorch.vfl.likelihoods import Likelihood
from fedtorch.vfl.model import VerticalModel
from fedtorch.vfl.predictors import Predictor, Prior, normal_prior

__all__ = ["PREDICT", "HierarchicalBayes", "NodeNoise", "auxiliary_model", "dropout_keys", "encoder_weights", "held"]

_DRAWS, _DROPOUT, _ENCODER, PREDICT = range(4)  # purposes of a node's key
_BLOCK = 64  # iterations whose noise is drawn at a time


@dataclass(frozen=True)
class HierarchicalBayes:
    """The noise and priors of a hierarchical Bayes split network.

    Attributes:
        rho: standard deviation of z_j given its mean; one for all, or `(B,)`. An element with 0 is a plain network.
        random: shell patterns of the bottom networks' weights that have a prior and a posterior.
        prior: of these, from θ `(B, M, d)` to `(B, M)`; N(0, 1) by default.
        theta: the family q(w_j).
        auxiliary: the family q(z | w); by default one encoder at the server for a sum at the cut layer, and one per
            party otherwise.
        weight_sd: standard deviation of a normal prior on all other weights, whose mode is found; one for all, or
            `(B,)`; None for none.
        sticking: stop the gradient at the parameters of log q (equation 4).
        sd: standard deviation of q(w_j) at the start.
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


class NodeNoise:
    """Standard normal numbers of one node: a pure function of its key and the step, drawn for a block of steps.

    Args:
        key: of the node.
        theta: numbers for its weights.
        z: numbers for a row.
    """

    def __init__(self, key: Tensor, theta: int, z: int) -> None:
        self.key, self.theta, self.z = key, theta, z
        self._blocks: dict[tuple[int, torch.dtype, torch.device], tuple[int, Tensor]] = {}

    def at(self, step: int, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Noise of the weights `(1, 1, theta)` and of z `(1, 1, z, rows)`."""
        count, block = self.theta + self.z * rows, step // _BLOCK
        place = rows, like.dtype, like.device
        if place not in self._blocks or self._blocks[place][0] != block:
            steps = torch.arange(block * _BLOCK, (block + 1) * _BLOCK, device=like.device)
            keys = random.fold_in(random.fold_in(self.key.to(like.device), _DRAWS), steps)
            self._blocks[place] = block, random.normal(keys, (count,), like.dtype)
        own, rest = self._blocks[place][1][step % _BLOCK].split([self.theta, self.z * rows])
        return own.reshape(1, 1, -1), rest.reshape(1, 1, self.z, rows)


def auxiliary_model(likelihood: Likelihood, outputs: int, parties: int, rho: Tensor) -> VerticalModel:
    """What the families of z need to know; ρ = 0 is 1 here, and what it gives is not used."""
    nobody = Predictor(0, lambda theta, x: x, normal_prior(), 0)
    noise = torch.where(rho > 0, rho, 1.0).flatten().double()
    own = dataclasses.replace(likelihood, outputs=outputs)
    return VerticalModel(own, (nobody,) * parties, noise, False, False, normal_prior())


def encoder_weights(auxiliary: Auxiliary, model: VerticalModel, rho: Tensor, key: Tensor) -> nn.ParameterDict:
    """The amortised encoder of one node's z, a stack of one per ρ.

    Raises:
        ValueError: a family with parameters for every row, which a network of changing minibatches cannot keep.
    """
    one = torch.zeros(1, 1, 1)
    shown = model.likelihood.features(one, one.new_zeros(model.likelihood.outputs, 1)).shape[-2]
    weights = auxiliary.init(model, len(rho), 0, shown, random.fold_in(key, _ENCODER), rho.dtype)
    if any(weight.numel() == 0 for weight in weights.values()):
        raise ValueError("Expected an amortised family of z, but got one with parameters for every row")
    return nn.ParameterDict(weights)


def held(q: dict[str, Tensor], bayes: HierarchicalBayes | None) -> dict[str, Tensor]:
    """The parameters for log q: detached to stick the landing."""
    return {name: value.detach() for name, value in q.items()} if bayes is not None and bayes.sticking else q


def dropout_keys(key: Tensor, step: int, size: int, device: torch.device) -> Tensor:
    """Keys of a step's dropout, `(size,)`, one for each network of a stack."""
    own = random.fold_in(random.fold_in(key.to(device), _DROPOUT), step)
    return random.fold_in(own, torch.arange(size, device=device))
