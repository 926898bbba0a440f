"""A network whose nodes have models of different kinds, coupled through what they predict for shared inputs."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.kernel_ridge import KernelRidge
from sklearn.tree import DecisionTreeRegressor
from torch import Tensor, nn

import fedtorch as ft
from fedtorch.models.gaussian_process.quiet_gpytorch import gpytorch

COMPOSED = "four kinds of models, coupled"
PARTS = "each alone", "the best of them alone"
NOISE = 0.1
ALPHA = 0.3
KINDS = ("tree", "kernel ridge", "Gaussian process", "neural network")
NODES = 2 * len(KINDS)


class Process(gpytorch.models.ExactGP):
    """A Gaussian process as a regressor: a row of weight w has the noise variance σ² / (m w) for m rows of its own."""

    def __init__(self) -> None:
        nothing = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.ones(1, dtype=torch.float64))
        super().__init__(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), nothing)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.RBFKernel().double()
        self.covar_module.lengthscale = 0.15

    def forward(self, x: Tensor) -> Any:
        """The prior at inputs."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Process:
        """Take the rows in."""
        noise = NOISE**2 * sample_weight.max() / sample_weight
        self.set_train_data(torch.as_tensor(X), torch.as_tensor(y), strict=False)
        self.likelihood.noise = torch.as_tensor(noise)
        return self

    def predict(self, X: Any) -> Any:
        """The posterior mean."""
        self.eval()
        with torch.no_grad(), gpytorch.settings.debug(False):
            return self(torch.as_tensor(X)).mean.numpy()


class Ridge(KernelRidge):
    """Kernel ridge regression of radial basis functions, whose weights sum to one."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Ridge:
        """Fit with weights of this sum, so that the penalty means the same in every round."""
        return super().fit(X, y, sample_weight=sample_weight / sample_weight.sum() * len(y))


def neural_network() -> ft.LocalSolver:
    """Sixteen units, trained by Adam."""
    module = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    with torch.no_grad():
        for at, parameter in enumerate(module.parameters()):
            wide = 6.0 if at < 2 else 0.5
            parameter.copy_(wide * (2 * ft.random.uniform(ft.random.key(at), parameter.shape, torch.float64) - 1))
    return ft.gradient_descent(
        module,
        steps=1,
        loss=lambda output, y: (output[:, 0] - y).square().mean(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        reset="never",
    )


def models() -> list[Any]:
    """A model for each node."""
    return [
        lambda: DecisionTreeRegressor(min_samples_leaf=2, random_state=0),
        lambda: Ridge(alpha=0.01, kernel="rbf", gamma=20.0),
        Process,
        neural_network(),
    ] * 2


def truth(x: Tensor) -> Tensor:
    """The function that all nodes look for."""
    return (6 * x[..., 0]).sin() + 0.5 * (15 * x[..., 0]).cos()


def nodes(seed: int, rows: int = 10) -> ft.data.FederatedData:
    """Each node has a few rows."""
    clients = []
    for k in range(NODES):
        key = ft.random.fold_in(ft.random.key(seed), k)
        x = ft.random.uniform(key, (rows, 1), torch.float64)
        y = truth(x) + NOISE * ft.random.normal(ft.random.fold_in(key, 1), (rows,), torch.float64)
        clients.append((x, y))
    return ft.data.from_tensors(clients)


def predictions(seed: int, alpha: float, rounds: int, makes: list[Any] | None = None) -> Tensor:
    """What the nodes predict for inputs over the whole range, `(8, 60)`."""
    network = ft.Network.from_matrix(1 - torch.eye(NODES))
    algorithm = ft.gtv_regressors(makes or models(), network, alpha, grid(), repeats=50)
    run = ft.run(algorithm, ft.InProcess(nodes(seed)), {}, rounds=rounds, seed=seed)
    return run.tensors()["predictions"]


def grid() -> Tensor:
    """The shared inputs, which need no labels."""
    return torch.linspace(0, 1, 60, dtype=torch.float64)[:, None]


def errors(seed: int, rounds: int) -> dict[str, float]:
    """Root mean squared error over the whole range: the mean and the worst over nodes, by every way."""
    each = lambda found: (found - truth(grid())).square().mean(1).sqrt()
    alone, coupled = each(predictions(seed, 0.0, 1)), each(predictions(seed, ALPHA, rounds))
    found = {"each alone": float(alone.mean()), "the best of them alone": float(alone.min())}
    for kind, make in zip(KINDS, models()):
        found[f"a network of one kind: {kind}"] = float(each(predictions(seed, ALPHA, rounds, [make] * NODES)).mean())
    return {**found, COMPOSED: float(coupled.mean()), "the worst of these": float(coupled.max())}
