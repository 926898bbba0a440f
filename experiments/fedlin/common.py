"""What the FedLin experiments share: expectation propagation, settings chosen on validation rows, devices' errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import MixtureSameFamily

import fedtorch as ft
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithms.ep import devices, settled
from fedtorch.models import hierarchical
from fedtorch.tree import Tree


class Candidate(NamedTuple):
    """One setting of a method: an algorithm, or a model for expectation propagation."""

    algorithm: ft.Algorithm | None
    rounds: int
    pooled: bool = False  # whether it sees the rows of all devices in one place
    model: hierarchical.Model | None = None  # with a constant as its last feature


def predictions_of(candidate: Candidate, training: FederatedData, test: FederatedData, seed: int = 0) -> list[Tensor]:
    """What every device predicts for its own rows of `test`, `(n_k,)` each."""
    if candidate.model is not None:
        return _expected(candidate.model, candidate.rounds, training, test)
    algorithm = candidate.algorithm
    assert algorithm is not None
    population = ft.InProcess(training.pool() if candidate.pooled else training)
    run = ft.run(algorithm, population, seed=seed, rounds=candidate.rounds)
    outputs = algorithm.predict
    assert outputs is not None

    def predict(tensors: Tree, block: ClientData) -> Tensor:
        size = int(test.counts.max())
        found = outputs(tensors, block.batch[0])
        return torch.nn.functional.pad(found, (0, size - found.shape[1]))

    every = run.clients.evaluate(run.outbox, test, predict)
    return [row[:count] for row, count in zip(every, test.counts.tolist())]


def _expected(model: hierarchical.Model, rounds: int, training: FederatedData, test: FederatedData) -> list[Tensor]:
    """The posterior mean of every row of `test` under a hierarchical model."""
    _, marginals = infer(model, training.map(_with_constant), rounds=rounds, tolerance=0.02)
    return [x @ mean for mean, (x, _) in zip(marginals.mean, test.map(_with_constant))]


def _with_constant(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([rows[0], torch.ones_like(rows[0][:, :1])], 1), rows[1]


def infer(
    model: hierarchical.Model, data: FederatedData, *, rounds: int = 50, tolerance: float = 0.01
) -> tuple[ft.Run, MixtureSameFamily]:
    """Expectation propagation until it stands still: the run, and each coefficient of each device, batch `(K, d)`."""
    run = ft.run(ft.ep(model), ft.InProcess(data), rounds=rounds, until=settled(tolerance))
    return run, devices(run, tolerance=tolerance).marginals()


def mean_rmse(test: Sequence[tuple[Tensor, Tensor]] | FederatedData, coefficients: Sequence[Tensor] | Tensor) -> float:
    """The root mean squared error of every device's own coefficients `(d,)`, averaged over devices."""
    found = [(y - x @ own).square().mean().sqrt() for (x, y), own in zip(test, coefficients)]
    return float(torch.stack(found).mean())


def errors(candidate: Candidate, training: FederatedData, test: FederatedData) -> Tensor:
    """Each device's sum of squared errors on its rows of `test`, `(K,)`; devices without rows have none."""
    found = predictions_of(candidate, training, test)
    return torch.stack([(f - y).square().sum() for f, (_, y) in zip(found, test)])


def device_rmse(candidate: Candidate, training: FederatedData, test: FederatedData) -> float:
    """The root mean squared error of every device, averaged over those with rows."""
    known = test.counts > 0
    return float((errors(candidate, training, test)[known] / test.counts[known]).sqrt().mean())


def choose(candidates: Mapping[str, Candidate], training: FederatedData, validation: FederatedData) -> str:
    """The setting with the smallest mean squared error on the validation rows; one that diverges is out."""
    found = {name: float(errors(one, training, validation).sum()) for name, one in candidates.items()}
    finite = {name: value for name, value in found.items() if value == value}
    return min(finite, key=lambda name: finite[name])
