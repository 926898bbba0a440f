"""What the FedLin experiments on real data share: settings chosen on validation rows, errors of every device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

import fedtorch as ft
from fedtorch.data import ClientData, FederatedData
from fedtorch.federation.algorithms.ep import devices, settled
from fedtorch.models import hierarchical
from fedtorch.tree import Tree


class Candidate(NamedTuple):
    """One setting of a method."""

    algorithm: ft.Algorithm
    rounds: int
    pooled: bool = False  # whether it sees the rows of all devices in one place
    model: hierarchical.Model | None = None  # of expectation propagation, with a constant as its last feature


def predictions_of(candidate: Candidate, training: FederatedData, test: FederatedData, seed: int = 0) -> list[Tensor]:
    """What every device predicts for its own rows of `test`, `(n_k,)` each."""
    if candidate.model is not None:
        return _expected(candidate, training, test)
    population = ft.InProcess(training.pool() if candidate.pooled else training)
    run = ft.run(candidate.algorithm, population, seed=seed, rounds=candidate.rounds)
    outputs = candidate.algorithm.predict
    assert outputs is not None

    def predict(tensors: Tree, block: ClientData) -> Tensor:
        size = int(test.counts.max())
        found = outputs(tensors, block.batch[0])
        return torch.nn.functional.pad(found, (0, size - found.shape[1]))

    every = run.clients.evaluate(run.outbox, test, predict)
    return [row[:count] for row, count in zip(every, test.counts.tolist())]


def _expected(candidate: Candidate, training: FederatedData, test: FederatedData) -> list[Tensor]:
    """The posterior mean of every row of `test` under a hierarchical model."""
    rows = ft.InProcess(training.map(_with_constant))
    run = ft.run(candidate.algorithm, rows, rounds=candidate.rounds, until=settled(0.02))
    means = devices(run, tolerance=0.02).marginals().mean
    return [x @ mean for mean, (x, _) in zip(means, test.map(_with_constant))]


def _with_constant(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([rows[0], torch.ones_like(rows[0][:, :1])], 1), rows[1]


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
