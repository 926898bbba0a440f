"""Experiments with vertical federations: VertiBench's splits, ways to maximise z, and that all run."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import common
from experiments.trials import vertibench
from experiments.vfl import em, logistic, promises
from fedtorch import data as ft_data, vfl


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


def test_a_claim_holds_in_the_share_of_seeds_that_show_it() -> None:
    """Bounds of the power model are above in the first seed alone; those of mean field are above in both."""

    def table(power: float) -> dict[tuple[logistic.Key, str], float]:
        bounds = {("augmented", "mean field"): -2.0, ("augmented", "amortised"): -3.0}
        bounds |= {("power", "mean field"): power, ("power", "amortised"): power - 1}
        keys = {(2, 0.5, "with noise", model, way): bound for (model, way), bound in bounds.items()}
        return {(key, metric): bound for key, bound in keys.items() for metric in ("bound", logistic.CLOSE)}

    found = {row.metric: row.ours for row in logistic.claims([table(-1.0), table(-5.0)], [0.5])}
    assert found["claim: the power model's bound is above the augmented one's, mean field"] == 0.5
    assert found["claim: amortised has a higher bound than mean field, power"] == 0
    assert found["claim: amortised is closer to NUTS than mean field, power"] == 1  # the smaller number is closer


def test_what_is_kept_is_not_computed_again(tmp_path: Path) -> None:
    calls = iter([1.0, 2.0])
    work = lambda: {("a", 1): (next(calls), torch.ones(2))}
    first, again = (common.kept(tmp_path / "fits", "one", work) for _ in range(2))
    assert first.keys() == again.keys()
    assert again["a", 1][0] == 1.0
    assert [file.name for file in (tmp_path / "fits").iterdir()] == ["one.pt"]
    assert common.kept(None, "one", work)["a", 1][0] == 2.0


def test_columns_and_levels_are_told_by_what_is_sent_in_many_messages() -> None:
    """Of linear messages without noise all is found; of noise alone nothing is."""
    draws = torch.Generator().manual_seed(0)
    x, groups = torch.randn(200, 2, generator=draws).double(), torch.randint(3, (200,), generator=draws)
    slopes = torch.randn(3, 2, 12, generator=draws).double()
    sent = torch.einsum("np,npt->nt", x, slopes[groups])
    assert promises.predicted(sent, x[:, 0], 60) == pytest.approx(1, abs=1e-9)
    assert promises.nearest_levels(sent, groups, 60, 3) == 1
    noise = torch.randn(200, 12, generator=draws).double()
    assert promises.predicted(noise, x[:, 0], 60) < 0.1
    assert promises.nearest_levels(noise, groups, 60, 3) < 0.5


def test_the_posterior_of_log_sigma_is_that_of_the_normal_density_of_all_rows() -> None:
    draws = torch.Generator().manual_seed(0)
    data = vfl.VerticalData(
        tuple(torch.randn(6, 2, generator=draws).double() for _ in range(2)), torch.randn(6, generator=draws).double()
    )
    x, at = torch.cat(data.features, 1), torch.linspace(-6, 3, 1801, dtype=torch.float64)
    eye = torch.eye(6, dtype=torch.float64)
    covariance = x @ x.T + ((2 * at).exp() + 2 * 0.5**2)[:, None, None] * eye
    density = torch.distributions.MultivariateNormal(torch.zeros_like(data.response), covariance)
    share = (density.log_prob(data.response) - at.square() / 2).softmax(0)
    mean = (share * at).sum()
    expected = float(mean), float((share * (at - mean).square()).sum().sqrt())
    assert promises.posterior_of_sigma(data, 0.5) == pytest.approx(expected, abs=1e-4)


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
