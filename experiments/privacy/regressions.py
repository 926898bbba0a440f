"""The regressions of `experiments.privacy.accuracy`: least squares, Gaussian processes and devices, R² against ε.

Each is private at the level of rows (client level where it says so), on data whose bounds are known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fedtorch as ft
from fedtorch.data import FederatedData
from fedtorch.federation.algorithms.ep import devices, posterior
from fedtorch.models import hierarchical
from fedtorch.models.gaussian_process import ConvolvedGP
from fedtorch.models.linear import LinearHead
from fedtorch.trust import privacy

DELTA = 1e-4
FEATURES, LENGTH, SD = 30, 0.7, 0.1  # of the Gaussian process; standard deviation of the noise of all responses
DEVICE, APART = 4, 0.3  # coefficients of a device, and their standard deviation around the devices' mean
BOUNDS: dict[str, Any] = {"clip_features": 1.0, "clip_targets": 2.0}


@cache
def noise_for(epsilon: float, sampling_rate: float = 1.0, rounds: int = 1) -> float:
    """`privacy.noise_for` at δ, found once."""
    return privacy.noise_for(epsilon=epsilon, sampling_rate=sampling_rate, rounds=rounds, delta=DELTA)


class Fourier:
    """Random Fourier features of a squared-exponential kernel in two dimensions, of norm one."""

    def __init__(self, features: int, seed: int) -> None:
        frequencies = ft.random.normal(ft.random.key(seed), (2, features // 2), torch.float64)
        self.frequencies = frequencies / LENGTH

    def __call__(self, x: Tensor) -> Tensor:
        """`(..., 2)` -> `(..., features)`."""
        angles = x @ self.frequencies
        return torch.cat([angles.cos(), angles.sin()], -1) / math.sqrt(self.frequencies.shape[1])


def r2(guess: list[Tensor], held_out: FederatedData) -> float:
    """R² over all rows, of predictions for each client's."""
    y = torch.cat([y for _, y in held_out])
    return 1 - float((torch.cat(guess) - y).square().mean() / y.var(correction=0))


def predicted(w: Tensor, held_out: FederatedData, phi: Callable[[Tensor], Tensor] = lambda x: x) -> float:
    """R² of linear models `(K, d)`, one a client, or `(d,)` of all."""
    each = w.expand(len(held_out), -1) if w.ndim == 1 else w
    return r2([phi(x) @ own for (x, _), own in zip(held_out, each)], held_out)


def descent(module: torch.nn.Module, epsilon: float, lr: float, rounds: int, seed: int) -> ft.LocalSolver:
    """Five gradient steps a round on a tenth of the rows, private at ε after all rounds."""
    settings: dict[str, Any] = {
        "steps": 5,
        "loss": F.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=lr),
    }
    if math.isinf(epsilon):
        return ft.gradient_descent(module, batch_size=32, **settings)
    noise = noise_for(epsilon, sampling_rate=0.1, rounds=5 * rounds)
    return privacy.example_level(
        module, clip=1.0, noise=noise, sampling_rate=0.1, delta=DELTA, entropy=privacy.from_seed(seed), **settings
    )


def least_squares(way: str, epsilon: float, rounds: int, seed: int) -> float:
    """Diabetes progression at 4 clients: FedAvg of least squares on noised sums, or of DP-SGD."""
    x, y = ft.data.diabetes()
    scaled = x / math.sqrt(x.shape[1]), (y - 150) / 150  # by what is known of standardised features and of the scale
    data = ft.data.partition(scaled, ft.data.iid(), clients=4, seed=seed)
    training, held_out = data.split(0.8, seed=seed)
    module = LinearHead(x.shape[1])
    if way == "DP-FedAvg":
        local = descent(module, epsilon, 0.2, rounds, seed)
    elif math.isinf(epsilon):
        local, rounds = ft.least_squares(module), 1
    else:
        noise, rounds = noise_for(epsilon), 1
        local = privacy.sufficient_statistics(
            module, clip_features=1.5, clip_targets=1.0, noise=noise, delta=DELTA, entropy=privacy.from_seed(seed)
        )
    run = ft.run(ft.fedavg(local), ft.InProcess(training), rounds=rounds, seed=seed)
    error = run.evaluate(held_out, {"error": ft.metrics.mean_squared_error()})["error"].overall
    return 1 - error / float(torch.cat([target for _, target in held_out]).var(correction=0))


def draws_of_a_process(clients: int, rows: int, seed: int) -> FederatedData:
    """A draw of the process of `Fourier` features with noise, at uniform places."""
    key = ft.random.fold_in(ft.random.key(seed), torch.arange(3))
    x = 2 * ft.random.uniform(key[0], (clients, rows, 2), torch.float64) - 1
    values = Fourier(FEATURES, 0)(x) @ ft.random.normal(key[1], (FEATURES,), torch.float64)
    y = values + SD * ft.random.normal(key[2], (clients, rows), torch.float64)
    return ft.data.from_tensors(list(zip(x, y)))


def ep_on_sums(
    data: FederatedData, hierarchy: hierarchical.Hierarchy, epsilon: float, rounds: int, seed: int
) -> ft.Run:
    """EP, which has a prior and needs no ridge; on the sums over the rows as they are for ε = ∞."""
    settings: dict[str, Any] = {"noise": SD**2}
    if math.isinf(epsilon):
        return ft.run(ft.ep(hierarchical.linear(hierarchy, **settings)), ft.InProcess(data), rounds=rounds, seed=seed)
    sums = privacy.NoisedSums(
        **BOUNDS, noise=noise_for(epsilon), delta=DELTA, ridge=0.0,
        entropy=privacy.from_seed(seed),
    )  # fmt: skip
    algorithm = ft.ep(hierarchical.linear(hierarchy, statistics=sums, **settings)) | sums.protect()
    return ft.run(algorithm, ft.InProcess(data), rounds=rounds, seed=seed)


def gaussian_process(way: str, epsilon: float, rounds: int, seed: int) -> float:
    """A process: FedMGP on noised sums, or by its Fourier features EP on noised sums, DP-FedAvg, or at client level."""
    clients, rows = (300, 15) if way == "client level" else (10, 500)
    data = draws_of_a_process(clients, rows, seed)
    training, held_out = data.split(0.8, seed=seed)
    phi = Fourier(FEATURES, 0)
    if way == "FedMGP":
        run = ft.run(multi_output(epsilon, seed), ft.InProcess(training), rounds=1, seed=seed)
        with torch.no_grad():
            return r2([run.client_module(k)(x).mean for k, (x, _) in enumerate(held_out)], held_out)
    if way == "EP":
        run = ep_on_sums(
            training.map(lambda pair: (phi(pair[0]), pair[1])), hierarchical.normal(FEATURES, random=[]), epsilon,
            4, seed,
        )  # fmt: skip
        return predicted(posterior(run, tolerance=math.inf).mean[:FEATURES], held_out, phi)
    module = LinearHead(FEATURES, phi, intercept=False, dtype=torch.float64)
    if way == "DP-FedAvg":
        algorithm = ft.fedavg(descent(module, epsilon, 1.0, rounds, seed))
        run = ft.run(algorithm, ft.InProcess(training), rounds=rounds, seed=seed)
    else:
        run = client_level(module, training, epsilon, rounds, seed)
    return predicted(run.tensors()["coefficients"], held_out, phi)


def multi_output(epsilon: float, seed: int) -> ft.Algorithm:
    """FedMGP at its default hyperparameters with 36 inducing inputs; next to no clip and noise for ε = ∞."""
    side = torch.linspace(-1, 1, 6, dtype=torch.float64)
    module = ConvolvedGP(torch.cartesian_prod(side, side))
    module.likelihood.noise = SD**2
    clip, noise = (100.0, 1e-11) if math.isinf(epsilon) else (BOUNDS["clip_targets"], noise_for(epsilon))
    return privacy.private_process(
        module, clip_targets=clip, noise=noise, delta=DELTA, entropy=privacy.from_seed(seed)
    )  # fmt: skip


def client_level(module: torch.nn.Module, data: FederatedData, epsilon: float, rounds: int, seed: int) -> ft.Run:
    """FedAvg of five full gradient steps, clipped changes of a third of the clients and noise on their sum."""
    local = ft.gradient_descent(
        module, steps=5, loss=F.mse_loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    )
    algorithm = ft.fedavg(local)
    if math.isinf(epsilon):
        return ft.run(algorithm, ft.InProcess(data), rounds=rounds, cohort=len(data) // 3, seed=seed)
    noise = noise_for(epsilon, sampling_rate=1 / 3, rounds=rounds)
    private = privacy.client_level(0.5, noise, delta=DELTA, sampling_rate=1 / 3, entropy=privacy.from_seed(seed))
    return ft.run(algorithm | private, ft.InProcess(data), rounds=rounds, seed=seed)


def device_rows(clients: int, rows: int, seed: int) -> FederatedData:
    """Devices with coefficients of their own, and features in the unit ball."""
    key = ft.random.fold_in(ft.random.key(seed), torch.arange(5))
    x = ft.random.normal(key[0], (clients, rows, DEVICE), torch.float64)
    x = x / x.norm(dim=2, keepdim=True)
    x = x * ft.random.uniform(key[1], (clients, rows, 1), torch.float64) ** (1 / DEVICE)
    mean, own = (ft.random.normal(key[i], (size, DEVICE), torch.float64) for i, size in ((2, 1), (3, clients)))
    y = (x * (mean + APART * own)[:, None]).sum(2) + SD * ft.random.normal(key[4], (clients, rows), torch.float64)
    return ft.data.from_tensors(list(zip(x, y)))


def of_devices(way: str, epsilon: float, rounds: int, seed: int) -> float:
    """Thirty devices: HM1 or EP on noised sums, a model for each; DP-FedAvg, one for all, or a model for each."""
    training, held_out = device_rows(30, 300, seed).split(0.8, seed=seed)
    module = LinearHead(DEVICE, intercept=False, dtype=torch.float64)
    if way == "EP":
        run = ep_on_sums(training, hierarchical.normal(DEVICE), epsilon, 20, seed)
        found = devices(run, tolerance=math.inf)
        return predicted((found.weights[..., None] * found.means).sum(1), held_out)
    if way == "HM1":
        local = ft.least_squares(module)
        if math.isfinite(epsilon):
            noise = noise_for(epsilon)
            local = privacy.sufficient_statistics(
                module, **BOUNDS, noise=noise, delta=DELTA, entropy=privacy.from_seed(seed)
            )
        run = ft.run(ft.matrix_normal(local), ft.InProcess(training), rounds=30, seed=seed)
        return predicted(run.server.parameters, held_out)
    local = descent(module, epsilon, 1.0, rounds, seed)
    algorithm = ft.fedavg(local) if way == "DP-FedAvg" else ft.separate(local)
    run = ft.run(algorithm, ft.InProcess(training), rounds=rounds, seed=seed)
    return predicted(run.tensors()["coefficients"], held_out)
