"""Gaussian processes from noised sums against the dense posterior of clipped rows."""

from __future__ import annotations

import pytest
import torch
from support.oracles.closed_forms import distance
from torch import Tensor

import fedtorch as ft
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.trust import privacy

DELTA = 1e-3
INDUCING = torch.linspace(0, 1, 6, dtype=torch.float64)[:, None]


def units(sizes: tuple[int, ...] = (40, 25, 60)) -> ft.data.FederatedData:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for size in sizes:
        x = torch.rand(size, 1, generator=generator, dtype=torch.float64)
        rows.append((x, 2 * (5 * x[:, 0]).sin() + 0.1 * torch.randn(size, generator=generator, dtype=torch.float64)))
    return ft.data.from_tensors(rows, [f"unit {k}" for k in range(len(sizes))])


def module(**settings) -> ConvolvedGP:
    made = ConvolvedGP(INDUCING, **settings)
    made.likelihood.noise = 0.2
    return made


def private(noise: float = 1e-9, made: ConvolvedGP | None = None, **settings) -> ft.Algorithm:
    settings = {"clip_targets": 1.5, "delta": DELTA, "entropy": privacy.from_seed(0), **settings}
    return privacy.private_process(module() if made is None else made, noise=noise, **settings)


def dense(data: ft.data.FederatedData, clip: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of f at the inducing inputs, of all rows at once, by Bayesian regression on what they say."""
    made = module()
    x, y = (torch.cat([row[i] for row in data]) for i in (0, 1))
    with torch.no_grad():
        design, new = made.see(x).basis, made.see(INDUCING)
        covariance = torch.linalg.inv(torch.eye(design.shape[1]).double() + design.T @ design / 0.2)
        mean = covariance @ design.T @ y.clamp(-clip, clip) / 0.2
        rest = made.covariance(INDUCING, INDUCING) - new.basis @ new.basis.T
        return new.basis @ mean, rest + new.basis @ covariance @ new.basis.T


def test_without_noise_it_is_the_posterior_of_clipped_rows_in_any_blocks() -> None:
    mean, covariance = dense(units(), 1.5)
    for chunk, rounds in ((None, 1), (1, 3)):
        run = ft.run(private(), ft.InProcess(units(), chunk), rounds=rounds)
        with torch.no_grad():
            found = run.client_module(1)(INDUCING)
        assert float((found.mean - mean).abs().max()) < 1e-5
        assert float((found.covariance_matrix - covariance).abs().max()) < 1e-5


def test_it_is_fedmgp_at_the_same_hyperparameters() -> None:
    """Which units of `fedmgp` take from their outputs: of one scale that is given, with noise of 0.3 of it."""
    made = ConvolvedGP(INDUCING, scale=1.0)
    plain = ft.run(ft.fedmgp(made, steps=0, server_lr=0.0), ft.InProcess(units()), rounds=2)
    made.likelihood.noise = 0.3**2
    noised = ft.run(private(made=made, clip_targets=100.0, noise=1e-11), ft.InProcess(units()), rounds=2)
    assert distance(plain.server.mean, noised.server.mean) < 1e-4
    assert distance(plain.server.root, noised.server.root) < 1e-4
    assert float(plain.server.bound) == pytest.approx(float(noised.server.bound), rel=1e-4)


def test_no_row_is_clipped_by_its_features_and_any_by_its_output() -> None:
    rows = [(x, y.clone()) for x, y in units()]
    rows[0][1][3] = 1e6
    other = [(x, y.clone()) for x, y in rows]
    other[0][1][3] = 1.5
    ends = [ft.run(private(), ft.InProcess(ft.data.from_tensors(each)), rounds=1).server for each in (rows, other)]
    assert distance(ends[0].mean, ends[1].mean) < 1e-6


def test_all_rounds_cost_one_release_and_nothing_else_is_told() -> None:
    run = ft.run(private(noise=3.0), ft.InProcess(units()), rounds=4, cohort=2)
    assert run.history["epsilon"].tolist() == pytest.approx([privacy.epsilon(noise=3.0, delta=DELTA)] * 4)
    assert all(bool((leaf == 0).all()) for leaf in run.server.moments.first.values())
    assert bool(run.client_module(0)(INDUCING).mean.isfinite().all())
    assert "train_loss" not in run.history or bool(run.history["train_loss"].isna().all())


def test_modules_that_ask_more_of_the_rows_are_refused() -> None:
    import gpytorch

    own = gpytorch.kernels.RBFKernel().double()
    for made in (module(mean=True), module(own_kernel=own)):
        with pytest.raises(ValueError, match="without mean and own_kernel"):
            private(made=made)
    with pytest.raises(ValueError, match="positive finite clip"):
        private(clip_targets=0.0)
    tight = private(delta=1 / 60)
    with pytest.raises(ValueError, match=r"'unit 2'.* 60 rows"):
        ft.Run(tight, ft.InProcess(units()))
