"""Least squares from noised sums against clipped rows, and what one row can do to the sums."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.oracles.closed_forms import distance, linear, linear_clients
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.federation.algorithms.ep import posterior
from fedtorch.models import hierarchical
from fedtorch.models.gibbs import sparse
from fedtorch.models.linear import polynomial
from fedtorch.trust import privacy
from fedtorch.trust.privacy.mechanisms.sums import sensitivity

DATA = linear_clients([30, 12, 50], outputs=2)
DELTA = 1e-3


def private(module: nn.Module | None = None, noise: float = 1e-9, seed: int | None = 0, **settings) -> ft.LocalSolver:
    settings = {"clip_features": 1.5, "clip_targets": 2.0, "delta": DELTA, "ridge": 0.0, **settings}
    return privacy.sufficient_statistics(
        linear(3, 2) if module is None else module,
        noise=noise,
        entropy=None if seed is None else privacy.from_seed(seed),
        **settings,
    )


def cut(rows: Tensor, bound: float) -> Tensor:
    return rows * (bound / rows.norm(dim=1, keepdim=True)).clamp(max=1)


CUT = ft.data.from_tensors([(cut(x, 1.5), cut(y, 2.0)) for x, y in DATA])


@pytest.mark.parametrize("algorithm", [ft.fedavg, lambda local: ft.fedprox(local, 0.3), ft.separate])
def test_it_is_least_squares_on_clipped_rows(algorithm) -> None:
    plain = ft.run(algorithm(ft.least_squares(linear(3, 2))), ft.InProcess(CUT), rounds=3)
    noised = ft.run(algorithm(private()), ft.InProcess(DATA), rounds=3)
    assert distance(plain.tensors(), noised.tensors()) < 1e-6
    assert noised.history["train_loss"].to_numpy() == pytest.approx(plain.history["train_loss"].to_numpy(), abs=1e-6)


def test_heads_with_features_without_intercept_and_gradient_steps() -> None:
    data = ft.data.from_tensors([(x[:, :2], y[:, 0]) for x, y in DATA])
    head = lambda: ft.LinearHead(4, polynomial(2), intercept=False, dtype=torch.float64)
    clipped = [(cut(polynomial(2)(x), 0.8), y.clamp(-2, 2)) for x, y in data]
    settings = {"steps": 5}
    plain = ft.run(
        ft.fedavg(ft.least_squares(ft.LinearHead(4, intercept=False, dtype=torch.float64), **settings)),
        ft.InProcess(ft.data.from_tensors(clipped)), rounds=2,
    )  # fmt: skip
    noised = ft.run(ft.fedavg(private(head(), clip_features=0.8, **settings)), ft.InProcess(data), rounds=2)
    assert distance(plain.server, noised.server) < 1e-6


@pytest.mark.parametrize("intercept", [True, False])
def test_one_row_changes_the_sums_by_no_more_than_the_sensitivity(intercept: bool) -> None:
    """The largest change is that of a row on both bounds."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2000, 5, generator=generator, dtype=torch.float64)
    features, target = cut(3 * draws[:, :3], 1.0), cut(3 * draws[:, 3:], 1.0)
    constant = [torch.ones(2000, 1).double()] if intercept else []
    rows = torch.cat([features, *constant, target], 1)
    nothing = torch.cat([0 * features, *constant, 0 * target], 1)
    change = rows[:, :, None] * rows[:, None] - nothing[:, :, None] * nothing[:, None]
    sizes = change.flatten(1).norm(dim=1)  # pairs off the diagonal twice is once by √2
    assert float(sizes.max()) <= sensitivity(intercept) + 1e-12
    assert float(sizes.max()) > 0.999 * sensitivity(intercept)
    assert sensitivity(True) == pytest.approx(math.sqrt(8))


def test_noise_on_every_number_has_the_size_that_is_accounted() -> None:
    """Sums of 400 clients, far enough from zero to stay definite, with noise of 1 % of them."""
    rows = torch.cat([torch.eye(3), -torch.eye(3)]).double().repeat(150, 1)
    data = ft.data.from_tensors([(rows, torch.zeros(900, 2).double())] * 400)
    local = private(noise=1.0, clip_features=1.0, delta=1e-5)
    run = ft.Run(ft.separate(local), ft.InProcess(data))
    gram = run.clients._blocks[0][1].statistics.gram * 900
    numbers = {"diagonal": gram[:, 0, 0] - 300, "pair": gram[:, 0, 1], "intercept": gram[:, 2, 3]}
    scale = math.sqrt(8)
    for name, values in numbers.items():
        expected = scale if name == "diagonal" else scale * math.sqrt(0.5)
        assert float(values.std()) == pytest.approx(expected, rel=4 / math.sqrt(800)), name
    assert float((gram[:, 3, 3] - 900).abs().max()) < 0.2  # some noise² / 300, by cutting back to semidefinite
    assert distance(gram, gram.mT) < 1e-12


def test_all_rounds_cost_one_release_and_every_run_another(tmp_path: Path) -> None:
    make = lambda: private(noise=2.0, ridge=1.0, ledger=tmp_path / "ledger", budget=2.6)
    run = ft.run(ft.fedavg(make()), ft.InProcess(DATA, chunk=1), rounds=20, cohort=2)
    assert run.history["epsilon"].tolist() == pytest.approx([privacy.epsilon(noise=2.0, delta=DELTA)] * 20)
    again = ft.run(ft.fedavg(make()), ft.InProcess(DATA), rounds=1)
    assert again.history["epsilon"].tolist() == pytest.approx([privacy.epsilon(noise=2.0, rounds=2, delta=DELTA)])
    with pytest.raises(RuntimeError, match="above the budget"):
        ft.Run(ft.fedavg(make()), ft.InProcess(DATA))
    assert "server included" in run.algorithm.budget.claim.adversary


def test_blocks_have_noise_of_their_own() -> None:
    data = ft.data.from_tensors([DATA[0]] * 4)
    run = ft.run(ft.separate(private(noise=1.0, ridge=1.0)), ft.InProcess(data, chunk=1), rounds=1)
    assert len(run.tensors()["bias"].unique(dim=0)) == 4


def test_a_ridge_at_the_size_of_the_noise_keeps_solutions_finite() -> None:
    """Where noise is larger than the sums, the solution with hardly a ridge is noise, and with one near zero."""
    sizes = []
    for ridge in (0.01, 1.0):
        local = private(noise=30.0, ridge=ridge, delta=1e-3)
        run = ft.run(ft.separate(local), ft.InProcess(ft.data.from_tensors([DATA[1]] * 50)), rounds=1)
        sizes.append(float(run.tensors()["weight"].norm(dim=(1, 2)).median()))
    assert sizes[1] < 0.5 * sizes[0]


def test_rows_that_are_too_large_count_with_the_clip() -> None:
    rows = [(x.clone(), y.clone()) for x, y in DATA]
    rows[0][0][3] *= 1e8
    rows[0][1][3] *= -1e8
    clipped = [(cut(x, 1.5), cut(y, 2.0)) for x, y in rows]
    plain = ft.run(ft.separate(ft.least_squares(linear(3, 2))), ft.InProcess(ft.data.from_tensors(clipped)), rounds=1)
    noised = ft.run(ft.separate(private()), ft.InProcess(ft.data.from_tensors(rows)), rounds=1)
    assert distance(plain.tensors(), noised.tensors()) < 1e-6


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip_features": 0.0}, "positive finite clip"),
        ({"clip_targets": -1.0}, "positive finite clip"),
        ({"noise": 0.0}, "positive finite noise"),
        ({"ridge": -1.0}, "ridge of at least 0"),
        ({"delta": 1.0}, "delta above 0"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        private(**wrong)


def test_what_does_not_fit_is_refused_when_a_run_is_made() -> None:
    with pytest.raises(ValueError, match=r"'client 2'.* 50 rows"):
        ft.Run(ft.fedavg(private(delta=1 / 50)), ft.InProcess(DATA))
    with pytest.raises(ValueError, match=r"targets of shape \(1,\)"):
        ft.Run(ft.fedavg(private(linear(3, 1))), ft.InProcess(DATA))


# -- other models of the sums ------------------------------------------------------------------------------------------

WIDE = linear_clients([80, 60, 90, 70, 75])
BOUNDS = {"clip_features": 1.5, "clip_targets": 2.0}
WIDE_CUT = ft.data.from_tensors([(cut(x, 1.5), y.clamp(-2, 2)) for x, y in WIDE], WIDE.names)


def sums(noise: float = 1e-9, seed: int | None = 0, **settings) -> privacy.NoisedSums:
    entropy = None if seed is None else privacy.from_seed(seed)
    return privacy.NoisedSums(
        noise=noise, entropy=entropy, **{**BOUNDS, "delta": DELTA, "ridge": 0.0, **settings}
    )  # fmt: skip


def hm1(local: ft.LocalSolver) -> ft.Algorithm:
    return ft.matrix_normal(local)


def head() -> ft.LinearHead:
    return ft.LinearHead(3, intercept=False, dtype=torch.float64)


def test_hm1_is_that_of_clipped_rows_at_the_price_of_one_release() -> None:
    plain = ft.run(hm1(ft.least_squares(head())), ft.InProcess(WIDE_CUT), rounds=15)
    noised = ft.run(hm1(private(head())), ft.InProcess(WIDE), rounds=15)
    assert distance(plain.server.parameters, noised.server.parameters) < 1e-5
    assert distance(plain.server.summary, noised.server.summary) < 1e-5
    run = ft.run(hm1(private(head(), noise=2.0, ridge=1.0)), ft.InProcess(WIDE), rounds=15)
    assert run.history["epsilon"].tolist() == pytest.approx([privacy.epsilon(noise=2.0, delta=DELTA)] * 15)


def test_hm1_hears_nothing_but_what_was_released() -> None:
    """Rows that differ and have the same noised sums to the bit cannot be told apart: here, those beyond the clip."""
    rows = [(x.clone(), y.clone()) for x, y in WIDE]
    rows[1][0][4] *= 5 / rows[1][0][4].norm()
    other = [(x.clone(), y.clone()) for x, y in rows]
    other[1][0][4] *= 4.0
    one, two = (
        ft.run(hm1(private(head(), noise=1.0, ridge=1.0)), ft.InProcess(ft.data.from_tensors(each)), rounds=3)
        for each in (rows, other)
    )
    assert distance(one.server.summary, two.server.summary) < 1e-9
    assert distance(one.server.parameters, two.server.parameters) < 1e-9


def test_hm1_refuses_solvers_that_protect_less_than_it_tells() -> None:
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    local = privacy.example_level(
        head(), clip=1.0, noise=1.0, sampling_rate=0.5, steps=1, delta=DELTA, loss=nn.functional.mse_loss, optimizer=sgd
    )  # fmt: skip
    with pytest.raises(ValueError, match="residual sums of their rows"):
        hm1(local)


def test_ep_is_that_of_clipped_rows_at_the_price_of_one_release() -> None:
    model = lambda **more: hierarchical.linear(hierarchical.normal(3), noise=0.1, **more)
    plain = ft.run(ft.ep(model()), ft.InProcess(WIDE_CUT), rounds=8)
    made = sums()
    noised = ft.run(ft.ep(model(statistics=made)) | made.protect(), ft.InProcess(WIDE), rounds=8)
    one, two = posterior(plain), posterior(noised)
    assert distance(one.mean, two.mean) < 1e-5
    assert distance(one.covariance_matrix, two.covariance_matrix) < 1e-5
    made = sums(noise=2.0, ridge=1.0)
    run = ft.run(ft.ep(model(statistics=made)) | made.protect(), ft.InProcess(WIDE), rounds=8)
    assert bool(posterior(run).mean.isfinite().all())
    assert run.history["epsilon"].tolist() == pytest.approx([privacy.epsilon(noise=2.0, delta=DELTA)] * 8)


@pytest.mark.parametrize("interweave", [0, 32])
def test_gibbs_is_that_of_clipped_rows_at_the_price_of_one_release(interweave: int) -> None:
    """The same draws of the same conditionals, whose sums differ by 1e-9: after few sweeps by little more."""
    sampler = lambda **more: ft.gibbs(
        sparse.regression(interweave=interweave, **more), sparse.hierarchy(), sweeps=3, chains=2
    )  # fmt: skip
    plain = ft.run(sampler(), ft.InProcess(WIDE_CUT), torch.zeros(3), rounds=2)
    made = sums()
    noised = ft.run(sampler(statistics=made) | made.protect(), ft.InProcess(WIDE), torch.zeros(3), rounds=2)
    assert distance(plain.server.variables.theta, noised.server.variables.theta) < 1e-4
    made = sums(noise=2.0, ridge=1.0)
    run = ft.run(sampler(statistics=made) | made.protect(), ft.InProcess(WIDE, chunk=2), torch.zeros(3), rounds=4)
    assert bool(run.server.variables.theta.isfinite().all())
    assert run.history["epsilon"].tolist() == pytest.approx([privacy.epsilon(noise=2.0, delta=DELTA)] * 4)


def test_sums_are_drawn_in_runs_that_pay_for_them_and_paid_for_where_they_are_drawn() -> None:
    made = sums()
    sampler = lambda **more: ft.gibbs(sparse.regression(**more), sparse.hierarchy(), sweeps=2, chains=1)
    with pytest.raises(RuntimeError, match="outside a run"):
        ft.Run(sampler(statistics=made), ft.InProcess(WIDE), torch.zeros(3))
    with pytest.raises(RuntimeError, match="a model that uses the noised sums"):
        ft.run(sampler() | made.protect(), ft.InProcess(WIDE), torch.zeros(3), rounds=1)
    with pytest.raises(ValueError, match=r"sums\.protect twice"):
        sampler() | made.protect() | made.protect()
    local = privacy.sufficient_statistics(
        torch.nn.Linear(3, 1), clip_features=1.0, clip_targets=1.0, noise=1.0, delta=1e-3
    )
    with pytest.raises(ValueError, match="one level of privacy"):
        ft.fedavg(local) | made.protect()
    with pytest.raises(ValueError, match="no intercept"):
        sparse.regression(statistics=made, intercept=True)
    tight = sums(delta=1 / 90)
    with pytest.raises(ValueError, match=r"'client 2'.* 90 rows"):
        ft.Run(sampler(statistics=tight) | tight.protect(), ft.InProcess(WIDE), torch.zeros(3))
