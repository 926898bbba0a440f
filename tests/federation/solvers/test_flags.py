"""Counts and flags that training changes travel with the averaged buffers."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import pytest
import torch
from support.oracles.closed_forms import linear, linear_clients, sgd
from torch import Tensor, nn

import fedtorch as ft
from fedtorch import functional, random
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

F = nn.functional


class Posterior(gpytorch.models.ApproximateGP):
    """A sparse variational Gaussian process, whose posterior is set to the prior when it is first called."""

    def __init__(self) -> None:
        points = torch.linspace(0, 1, 9).unsqueeze(-1)
        variational = gpytorch.variational.CholeskyVariationalDistribution(len(points), mean_init_std=0.0)
        strategy = gpytorch.variational.VariationalStrategy
        super().__init__(strategy(self, points, variational, learn_inducing_locations=False))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.RBFKernel()
        self.covar_module.lengthscale = 0.2

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.posterior, self.likelihood = Posterior(), gpytorch.likelihoods.GaussianLikelihood()
        self.likelihood.noise = 0.01

    def forward(self, x: Tensor) -> Tensor:
        return self.posterior(x[:, 0]).mean

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.posterior, num_data=40)
        return -bound(self.posterior(x[:, 0]), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def waves() -> ft.data.FederatedData:
    x = random.uniform(random.key(1), (4, 40, 1))
    y = torch.sin(6 * x[..., 0]) + 0.05 * random.normal(random.key(2), (4, 40))
    return ft.data.from_tensors(list(zip(x, y)))


def error(module: nn.Module) -> float:
    x = torch.linspace(0, 1, 50)[:, None]
    with torch.no_grad():
        return float((module.eval()(x) - torch.sin(6 * x[:, 0])).square().mean().sqrt())


@pytest.fixture(scope="module")
def posterior() -> ft.Run:
    """Three of four clients have been asked."""
    local = ft.gradient_descent(Regression(), steps=20, batched=False, buffers="average")
    return ft.run(ft.fedavg(local), ft.InProcess(waves()), rounds=4, cohort=[0, 1, 2])


def test_the_server_and_clients_never_asked_predict_with_the_trained_posterior(posterior: ft.Run) -> None:
    assert error(posterior.client_module(0)) < 0.2
    assert error(posterior.global_module()) < 0.2
    assert error(posterior.client_module(3)) < 0.2
    score = posterior.evaluate(waves(), {"mse": lambda prediction, target: (prediction - target).square()})
    assert float(score["mse"].clients[3]) < 0.05


def test_a_late_joiner_goes_on_from_the_trained_posterior(posterior: ft.Run) -> None:
    again = ft.Run(posterior.algorithm, ft.InProcess(waves()), cohort=[3])
    before = float(posterior.last.info["loss"].mean())
    again.server = posterior.server
    assert float(again.step().info["loss"][0]) < before + 0.3


def test_a_posterior_that_would_be_set_anew_with_every_call_is_refused() -> None:
    """The flag is the only buffer that training changes, and changes once: also not by a first look at the rows."""
    local = ft.gradient_descent(Regression(), steps=1, batched=False)
    with pytest.raises(ValueError, match=r"changes the buffers .*variational_params_initialized"):
        ft.Run(ft.fedavg(local), ft.InProcess(waves())).step()


def test_gtv_keeps_flags_with_the_nodes_and_evaluates_each_by_itself() -> None:
    """Nodes that are not coupled are trained as each alone; GPyTorch caches what it has evaluated of another node."""
    data = waves().to(dtype=torch.float64)
    local = ft.gradient_descent(Regression().double(), steps=8, batched=False, buffers="local", reset="never")
    run = ft.Run(ft.gtv(local, ft.Network.ring(4), alpha=0.0), ft.InProcess(data))
    square = {"error": lambda prediction, target: (prediction - target).square()}
    for _ in range(2):  # what was cached in one round must not be used in the next
        run.step()
        found = run.evaluate(data, square)["error"].clients
        with torch.no_grad():
            own = [(run.client_module(k).eval()(x) - y).square().mean() for k, (x, y) in enumerate(data)]
        assert torch.allclose(torch.as_tensor(found), torch.stack(own), rtol=1e-9)
    alone = ft.run(ft.fedavg(local), ft.InProcess(data.select([2])), rounds=2)
    for name, value in alone.tensors([0]).items():
        assert torch.allclose(run.tensors([2])[name], value, rtol=0, atol=1e-8), name
    assert bool((run.tensors()["posterior.variational_strategy.variational_params_initialized"] == 1).all())
    coupled = ft.run(ft.gtv(local, ft.Network.ring(4), alpha=0.3), ft.InProcess(data), rounds=2)
    apart, near = (one.tensors()["likelihood.noise_covar.raw_noise"].std() for one in (run, coupled))
    assert float(near) < float(apart)
    averaged = ft.gradient_descent(Regression(), steps=1, batched=False, buffers="average")
    with pytest.raises(ValueError, match=r"trainable parameters to couple, but got buffers .* use buffers='local'"):
        ft.gtv(averaged, ft.Network.ring(4), alpha=0.3)


class Flagged(nn.Module):
    """Adds a constant in its first training step only."""

    flag: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("steps", torch.tensor(0, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
            self.flag.fill_(True)
        return self.linear(x)


@pytest.mark.parametrize("make", [ft.fedavg, ft.fedadam, ft.feddyn, ft.scaffold, lambda local: ft.ditto(local, 0.1)])
def test_counts_and_flags_keep_their_type(make: Callable[..., ft.Algorithm]) -> None:
    local = sgd(0.01, Flagged(), steps=3, buffers="average", batched=False)
    algorithm = make(local) if make is not ft.feddyn else ft.feddyn(local, 1.0)
    run = ft.run(algorithm, ft.InProcess(linear_clients([4, 5, 6])), rounds=2)
    module = run.client_module(1)
    assert (module.flag.dtype, module.steps.dtype) == (torch.bool, torch.int32)
    assert (bool(module.flag), int(module.steps)) == (True, 6)


def test_a_flag_that_some_have_raised_is_raised() -> None:
    means = torch.tensor([0.0, 1e-9, 0.01, 1.0, 1 + 1e-9, 2.4, 3 - 1e-9])
    assert functional.counted(means, torch.int64).tolist() == [0, 0, 1, 1, 1, 3, 3]
    assert functional.counted(means[:3], torch.bool).tolist() == [False, False, True]
    algorithm = ft.fedavg(sgd(0.01, Flagged(), steps=3, buffers="average", batched=False), lr=0.2)
    run = ft.run(algorithm, ft.InProcess(linear_clients([4, 5])), rounds=1)
    assert bool(run.global_module().flag)


def test_batches_are_counted() -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(1, dtype=torch.float64))
    run = ft.run(
        ft.fedavg(sgd(0.01, module, steps=2, buffers="average")), ft.InProcess(linear_clients([4, 5])), rounds=3
    )
    counted = run.global_module()[1].num_batches_tracked
    assert (int(counted), counted.dtype) == (6, torch.int64)
    assert run.tensors()["1.num_batches_tracked"].tolist() == [6, 6]


def test_bounds_at_infinity_stay_what_they_are(posterior: ft.Run) -> None:
    for module in (posterior.global_module(), posterior.client_module(3)):
        bounds = {name: b for name, b in module.named_buffers() if name.endswith("upper_bound")}
        assert len(bounds) == 2
        assert all(float(bound) == float("inf") for bound in bounds.values())
