"""Experiments with vertical federations: VertiBench's splits, ways to maximise z, and that all run."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.trials import vertibench
from experiments.vfl import em
from fedtorch import data as ft_data


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0, 100.0])
def test_every_party_has_a_column_and_every_column_a_party(alpha: float) -> None:
    parties = vertibench.by_importance(30, alpha, seed=3)
    assert sorted(itertools.chain(*parties)) == list(range(30))
    assert min(len(columns) for columns in parties) >= 1
    largest = [max(map(len, vertibench.by_importance(30, alpha, seed))) for seed in range(20)]
    assert (np.mean(largest) > 20) == (alpha < 1)


def test_splits_are_those_of_the_package() -> None:
    """Column by column, with its seeds; and its score of correlation."""
    splitter = pytest.importorskip("vertibench.Splitter")
    x = np.random.RandomState(0).randn(50, 30)
    for alpha, seed in itertools.product((1e-3, 0.1, 1.0, 10.0), range(5)):
        theirs = splitter.ImportanceSplitter(4, weights=alpha, seed=seed).split_indices(x)
        assert [[int(column) for column in columns] for columns in theirs] == vertibench.by_importance(30, alpha, seed)


@pytest.mark.slow
def test_a_larger_share_is_a_larger_correlation_between_parties() -> None:
    draws = np.random.RandomState(0)
    x = np.repeat(draws.randn(200, 4), 3, axis=1) + 0.3 * draws.randn(200, 12)  # four groups of three alike columns
    correlation = np.corrcoef(x.T)
    scores = [
        vertibench.icor(correlation, vertibench.by_correlation(x, beta, 0, swaps=150)) for beta in (0.0, 0.5, 1.0)
    ]
    assert scores[0] < scores[1] < scores[2]
    groups = [[3 * j, 3 * j + 1, 3 * j + 2] for j in range(4)]  # whose Icor is the least one
    assert vertibench.icor(correlation, groups) <= scores[0] < 0


@pytest.mark.slow
def test_the_maximum_of_z_is_where_its_gradient_vanishes() -> None:
    """Newton's ẑ, against the gradient of the density of z with θ integrated out, by autograd."""
    of = em.problem(seed=0, rows=20)
    x, y = of.batch.features, of.batch.y.flatten()
    z = of.z.clone().requires_grad_()
    density = -torch.nn.functional.softplus((1 - 2 * y) * z.sum(0)).sum()
    for part, value in zip(x, z):
        covariance = em.RHO**2 * torch.eye(20, dtype=z.dtype) + part @ part.mT
        density = density + torch.distributions.MultivariateNormal(torch.zeros_like(value), covariance).log_prob(value)
    assert float(torch.autograd.grad(density, z)[0].abs().max()) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["trials.vertibench", "vfl.em", "vfl.clock", "vfl.late", "vfl.mnist", "vfl.areas", "vfl.promises"]
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    if name == "vfl.late":
        pytest.importorskip("grpc")
    if name == "vfl.mnist":
        try:
            ft_data.mnist(train=False)
        except FileNotFoundError as error:
            pytest.skip(str(error))
    script = importlib.import_module(f"experiments.{name}")
    script.main(["--smoke", "--json", str(tmp_path / "rows.json"), "--out", str(tmp_path)])
    assert json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (tmp_path / f"{name.replace('.', '_')}.png").stat().st_size > 10_000
